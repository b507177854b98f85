"""What the commands of `baton` share: options, the one message of a known error, and JSON on standard output."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Annotated

import typer

from baton.components.shared.core.errors import BatonError
from baton.components.shared.recipe import Store as StoreSection
from baton.pipelines.compiling.package import Pipeline

REJECTED = 3
"""Exit code of a run that the recipe's gate rejects."""


class Output(StrEnum):
    """Form of a command's answer."""

    text = "text"
    json = "json"


class Runner(StrEnum):
    """Kind of process that a stage is on this machine."""

    process = "process"
    docker = "docker"


class Control(StrEnum):
    """Part of the state that a negative control leaves out."""

    rng = "rng"


RecipePath = Annotated[str, typer.Argument(metavar="RECIPE", help="YAML file; see docs/recipe.md.", show_default=False)]
RunUri = Annotated[str, typer.Argument(metavar="RUN_URI", help="STORE/runs/NAME, as `baton run` prints it.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="PATH=VALUE", help="Change a value, e.g. training.learning_rate=1e-4. Repeatable."),
]
Store = Annotated[str | None, typer.Option(help="Folder, s3://, gs:// or az:// bucket, instead of the recipe's store.")]
RunName = Annotated[
    str | None, typer.Option("--run", help="Name of the run; one that exists resumes where it stopped.")
]
Endpoint = Annotated[
    str,
    typer.Option(
        envvar=["BATON_KFP_ENDPOINT", "KF_PIPELINES_ENDPOINT"],
        help="Kubeflow Pipelines API, e.g. http://localhost:8888.",
        show_default=False,
    ),
]
Experiment = Annotated[str | None, typer.Option(help="Experiment; the recipe's name when left out.")]
ServiceAccount = Annotated[str | None, typer.Option(help="Service account of the pods.")]
Cache = Annotated[
    bool, typer.Option("--cache/--no-cache", help="Let Kubeflow skip stages that this run has finished before.")
]
Registers = Annotated[
    bool, typer.Option("--register/--no-register", help="Register the pipeline on Kubeflow, for its page to start it.")
]
Wait = Annotated[bool, typer.Option("--wait", help="Follow the run; the exit code is its state.")]
Timeout = Annotated[float, typer.Option(help="Hours to wait at most.")]
Retries = Annotated[
    int, typer.Option(min=0, max=10, help="With --wait: times a run is started again whose pod was lost.")
]
WEEK_H = 168.0
"""How long a command waits where `Timeout` is left out."""
LeaveOut = Annotated[
    list[Control] | None, typer.Option(help="Do not restore this part of the state: a negative control.")
]
Turns = Annotated[
    str | None,
    typer.Option(
        metavar="N,M,…",
        help="Numbers of processes that take turns, from chunk to chunk or kill to kill; needs virtual workers.",
    ),
]
Namespace = Annotated[str | None, typer.Option(help="Kubeflow profile, where there are several.")]
RunnerOption = Annotated[
    Runner, typer.Option(help="docker runs each stage in its own container, from the image of its pods.")
]
Image = Annotated[
    str | None,
    typer.Option(envvar="BATON_IMAGE", metavar="NAME:TAG", help="Container image instead of the recipe's."),
]
ChunkCount = Annotated[int | None, typer.Option(help="Number of chunks instead of the recipe's.")]
PipelineOption = Annotated[
    Pipeline,
    typer.Option(
        help="retrain looks first whether data or recipe have changed since a model was accepted; sweep compares the "
        "configurations of the recipe's sweep."
    ),
]
DEFAULT_STORE: str = StoreSection.model_fields["uri"].default
"""Where a name is looked up when no store is given."""
OutputOption = Annotated[Output, typer.Option("--output", help="json prints one object on standard output.")]


@contextlib.contextmanager
def reported(output: Output = Output.text) -> Iterator[None]:
    """Turns a known error into one message and its exit code."""
    try:
        yield
    except BatonError as error:
        if output is Output.json:
            print_json({"state": "failed", "error": str(error), "exit_code": error.exit_code})
        typer.secho(f"baton: {error}", err=True, fg=typer.colors.RED)
        raise typer.Exit(error.exit_code) from None
    except KeyboardInterrupt:
        typer.secho("baton: interrupted; the same command with --run NAME resumes from the last checkpoint", err=True)
        raise typer.Exit(130) from None


def print_json(document: Mapping[str, object]) -> None:
    """Prints the one JSON object of a command."""
    sys.stdout.write(json.dumps(document) + "\n")
