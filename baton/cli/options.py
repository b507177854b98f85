"""Shared by all commands: options, the one message of a known error, and JSON on standard output."""

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from enum import StrEnum
from typing import Annotated, Any, TextIO

import typer
from typer.core import TyperGroup
from typing_extensions import TypedDict

from baton import machine
from baton.compiler.pipeline_file import Pipeline
from baton.errors import BatonError, UserError, no_room
from baton.recipe.run import Store as StoreSection
from baton.source import origin
from baton.store.clouds import ANY_BUCKET
from baton.terminal import visible

REJECTED = 3  # exit code of a run that the recipe's gate rejects
INTERRUPTED = 130  # exit code after Ctrl-C
UNKNOWN = "unknown"  # state of a run that could not be followed to its end
EXIT_CODES = {"failed": 1, "canceled": 1, "skipped": 1, "rejected": REJECTED, UNKNOWN: 4}  # 0 for all others


class Runner(StrEnum):
    process = "process"
    docker = "docker"


class Control(StrEnum):
    """Part of the state that a negative control leaves out."""

    rng = "rng"
    hooks = "hooks"


RECIPE_HELP = (
    "YAML file or its address, - for standard input, or a name that `baton recipes` lists; see docs/reference/recipe."
)
RecipePath = Annotated[str, typer.Argument(metavar="RECIPE", help=RECIPE_HELP, show_default=False)]
RunUri = Annotated[str, typer.Argument(metavar="RUN_URI", help="STORE/runs/NAME, as `baton run` prints it.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="PATH=VALUE", help="Change a value, e.g. training.learning_rate=1e-4. Repeatable."),
]
Store = Annotated[str | None, typer.Option(help=f"Folder, {ANY_BUCKET} bucket, instead of the recipe's store.")]
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
WEEK_H = 168.0  # of `Timeout`
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
DEFAULT_STORE: str = StoreSection.model_fields["uri"].default  # where names are looked up
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output, and nothing else there.")]
Trust = Annotated[
    bool, typer.Option("--trust", help="Consent to run the code of a recipe from elsewhere, as it is now.")
]

GONE = {  # group and command of an earlier release → remedy
    "baton serve": "`baton serve` is gone: run `vllm serve` or `transformers serve`, "
    "see docs/guides/evaluate-and-export.md.",
    "sweep submit": "`baton sweep submit RECIPE` is gone: run `baton submit RECIPE --pipeline sweep`.",
}
RENAMED = {  # group, command and perhaps option of an earlier release → name of today
    "baton outcome": "ci-report",
    "runs fork --cold": "--weights-only",
    "runs fork --start": "--run-now",
}


class Commands(TyperGroup):
    """Group that takes the words of earlier releases, too."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        called = f"{self.name} {args[0]}"
        if gone := GONE.get(called):
            ctx.fail(gone)
        name, command, words = super().resolve_command(ctx, [_today(called, args[0]), *args[1:]])
        takes = {option for parameter in command.params for option in parameter.opts} if command else set()
        if "--json" in takes and "--output" not in takes:
            words = list(_without_output(words))
        return name, command, [_today(f"{called} {word}", word) for word in words]


def _today(former: str, word: str) -> str:
    if former not in RENAMED:
        return word
    typer.echo(f"note: {word} is called {RENAMED[former]} now", err=True)
    return RENAMED[former]


def _without_output(words: list[str]) -> Iterator[str]:
    """Replaces `--output json`, the earlier name of `--json`, and drops `--output text`."""
    rest = iter(words)
    for word in rest:
        if word == "--":
            yield from (word, *rest)
        elif word == "--output":
            form = next(rest, "")
            yield from {"json": ["--json"], "text": []}.get(form, [word, form])
        elif word != "--output=text":
            yield "--json" if word == "--output=json" else word


def start(app: typer.Typer) -> None:
    """Runs the command line; with `--json`, a mistake in its words is an object, too."""
    if "--json" not in _without_output(sys.argv[1:]):
        app()
        return
    try:
        code = app(standalone_mode=False)
    except typer.TyperException as error:
        print_json({"state": "failed", "error": error.format_message(), "exit_code": error.exit_code})
        typer.secho(f"baton: {error.format_message()}", err=True, fg=typer.colors.RED)
        code = error.exit_code
    sys.exit(code or 0)


class StageAnswer(TypedDict):
    name: str
    state: str
    seconds: float | None
    message: str | None


class FailedAnswer(TypedDict):
    stage: str
    message: str | None
    exit_code: int | None  # None where its pod was lost


class RunAnswer(TypedDict, total=False):
    """Answer of a command about one run, for `--json`."""

    run: str
    run_id: str
    url: str
    state: str
    pipeline: str
    version: str  # of the registered pipeline
    sweep_uri: str
    stages: list[StageAnswer]
    failed: list[FailedAnswer]
    error: str  # why the command failed, alone; or why the run could not be followed, beside it
    exit_code: int


_stdout: ContextVar[TextIO | None] = ContextVar("stdout", default=None)  # meanwhile `sys.stdout` may be stderr


@contextlib.contextmanager
def answer(json: bool, trust: bool = False) -> Iterator[None]:
    """Runs a command: a known error becomes one message and its exit code; with `json`, all else goes to stderr."""

    def ended(words: str, code: int, color: str | None = None) -> typer.Exit:
        if json:
            print_json({"state": "failed", "error": words, "exit_code": code})
        typer.secho(f"baton: {visible(words)}", err=True, fg=color)
        return typer.Exit(code)

    token = _stdout.set(sys.stdout)
    aside = contextlib.redirect_stdout(sys.stderr) if json else contextlib.nullcontext()
    try:
        with aside, origin.consenting(trust):
            try:
                yield
            except OSError as error:
                raise of_file(error) from error
    except BatonError as error:
        raise ended(str(error), error.exit_code, typer.colors.RED) from None
    except KeyboardInterrupt:
        words = "interrupted; the same command with --run NAME resumes from the last checkpoint"
        raise ended(words, INTERRUPTED) from None
    finally:
        _stdout.reset(token)


def page_path(path: str) -> str:
    """Returns the path of a page, checked before hours are spent on it."""
    where = os.path.abspath(os.path.expanduser(path))
    folder = os.path.dirname(where)
    if not path.endswith((".html", ".htm")):
        raise UserError(f"report {path!r} has another ending than .html.", remedy="Name an HTML file.")
    if not os.access(folder, os.W_OK | os.X_OK) or os.path.isdir(where):
        raise UserError(f"report {path!r} cannot be written.", remedy=f"Check that {folder} is there and is yours.")
    return where


def of_file(error: OSError) -> BatonError:
    """Returns a known error with the name of the file or folder that cannot be used."""
    if error.filename is None:
        raise error
    if full := no_room(error):
        return full
    path = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else repr(error.filename)
    is_cache = os.path.abspath(path).startswith(os.path.abspath(machine.cache_dir()))
    remedy = "Set BATON_CACHE to a folder that can be written to." if is_cache else "Check the path and its rights."
    return UserError(f"{path!r} cannot be used: {error.strerror}.", remedy=remedy)


def print_json(document: Mapping[str, object]) -> None:
    """Prints the one JSON object of a command; a number that is not finite, unknown to JSON, is null."""
    plain = json.loads(json.dumps(document), parse_constant=lambda name: None)
    (_stdout.get() or sys.stdout).write(json.dumps(plain) + "\n")
