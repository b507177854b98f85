"""What the commands of `baton` share: options, the one message of a known error, and JSON on standard output."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, TextIO

import typer
from typer.core import TyperGroup

from baton import machine
from baton.compiler.pipeline_file import Pipeline
from baton.errors import BatonError, UserError, no_room
from baton.recipe.run import Store as StoreSection
from baton.source import origin
from baton.terminal import visible

REJECTED = 3
"""Exit code of a run that the recipe's gate rejects."""
INTERRUPTED = 130
"""Exit code of a command that Ctrl-C ended."""


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
    hooks = "hooks"


RECIPE_HELP = (
    "YAML file or its address, - for standard input, or a name that `baton recipes` lists; see docs/recipe.md."
)
RecipePath = Annotated[str, typer.Argument(metavar="RECIPE", help=RECIPE_HELP, show_default=False)]
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
AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on standard output, and nothing else there.")
]
Trust = Annotated[
    bool, typer.Option("--trust", help="Consent to run the code of a recipe from elsewhere, as it is now.")
]
MAY_TAKE_RECIPE = ("data check",)
"""Commands that take a recipe as one of several things."""


GONE = {
    ("baton", "serve"): "`baton serve` is gone: run `vllm serve` or `transformers serve`, see docs/evaluation.md.",
    ("sweep", "submit"): "`baton sweep submit RECIPE` is gone: run `baton submit RECIPE --pipeline sweep`.",
}
"""Group and command of an earlier release → the remedy."""


class Commands(TyperGroup):
    """Group that answers a command of an earlier release with its remedy."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Returns the command of the words, and the words after it."""
        if gone := GONE.get((str(self.name), args[0])):
            ctx.fail(gone)
        return super().resolve_command(ctx, args)


@dataclass
class _Answer:
    """Form in which the command that runs answers, and where to."""

    output: Output
    stream: TextIO


_answer: ContextVar[_Answer | None] = ContextVar("answer", default=None)
Function = Callable[..., None]


def give_json(app: typer.Typer) -> None:
    """Gives every command of an app, and of those below it, the option `--json`.

    A command with `--output json` has `--json` as another word for it. A command without asks `as_json`.

    Args:
        app: The app, its commands registered.
    """
    _replace(app, lambda name, function: _with_json(function))


def give_trust(app: typer.Typer, reading: Mapping[str, str]) -> None:
    """Gives every command of an app that runs something of a recipe, and of those below it, the option `--trust`.

    Args:
        app: The app, its commands registered.
        reading: Command with a recipe → why it has no such option.
    """

    def replace(name: str, function: Function) -> Function:
        takes_recipe = "recipe" in inspect.signature(function).parameters or name in MAY_TAKE_RECIPE
        return _with_trust(function) if takes_recipe and name not in reading else function

    _replace(app, replace)


def _replace(app: typer.Typer, replace: Callable[[str, Function], Function], path: str = "") -> None:
    """Puts other functions behind the commands of an app, by their names."""
    for info in app.registered_commands:
        assert info.callback is not None
        name = info.name or info.callback.__name__.replace("_", "-")
        info.callback = replace(f"{path}{name}", info.callback)
    if app.registered_callback and app.registered_callback.callback:
        app.registered_callback.callback = replace(path.strip(), app.registered_callback.callback)
    for group in app.registered_groups:
        assert group.typer_instance is not None
        _replace(group.typer_instance, replace, f"{path}{group.name} ")


def _with_trust(function: Function) -> Function:
    """Returns a command with the option `--trust`."""

    @functools.wraps(function)
    def command(*, trust: bool, **given: Any) -> None:
        with origin.consenting(trust):
            function(**given)

    return _announced(command, function, "trust", Trust)


def _with_json(function: Function) -> Function:
    """Returns a command with the option `--json`."""
    takes_output = inspect.signature(function, eval_str=True).parameters.get("output")
    has_output = takes_output is not None and isinstance(takes_output.default, Output)

    @functools.wraps(function)
    def command(*, json_wanted: bool, **given: Any) -> None:
        if json_wanted and has_output:
            given["output"] = Output.json
        with answering(Output.json if json_wanted or (has_output and given["output"] is Output.json) else Output.text):
            function(**given)

    return _announced(command, function, "json_wanted", AsJson)


def _announced(command: Function, function: Function, name: str, annotation: Any) -> Function:
    """Tells typer that a command has the parameters of a function, and a switch besides."""
    signature = inspect.signature(function, eval_str=True)
    switch = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=annotation)
    command.__signature__ = signature.replace(parameters=[*signature.parameters.values(), switch])  # type: ignore[attr-defined]
    command.__annotations__ = {**function.__annotations__, name: annotation}
    return command


def start(app: typer.Typer) -> None:
    """Runs the command line; where it is to answer in JSON, what is wrong with its words is an object, too."""
    words = sys.argv[1:]
    if "--json" not in words and "--output=json" not in words and ("--output", "json") not in itertools.pairwise(words):
        app()
        return
    try:
        code = app(standalone_mode=False)
    except typer.TyperException as error:
        print_json({"state": "failed", "error": error.format_message(), "exit_code": error.exit_code})
        typer.secho(f"baton: {error.format_message()}", err=True, fg=typer.colors.RED)
        code = error.exit_code
    sys.exit(code or 0)


@contextlib.contextmanager
def answering(output: Output) -> Iterator[None]:
    """Lets a command answer in a form: for JSON, whatever else is printed goes to standard error."""
    token = _answer.set(_Answer(output, sys.stdout))
    try:
        if output is Output.text:
            yield
        else:
            with contextlib.redirect_stdout(sys.stderr):
                yield
    finally:
        _answer.reset(token)


def as_json() -> bool:
    """Tells whether the command that runs is to answer in JSON."""
    answer = _answer.get()
    return answer is not None and answer.output is Output.json


@contextlib.contextmanager
def reported(output: Output | None = None) -> Iterator[None]:
    """Turns a known error into one message and its exit code.

    Args:
        output: Form of the command's answer; as `--json` says when left out.
    """
    in_json = as_json() if output is None else output is Output.json
    try:
        try:
            yield
        except OSError as error:
            raise of_file(error) from error
    except BatonError as error:
        if in_json:
            print_json({"state": "failed", "error": str(error), "exit_code": error.exit_code})
        typer.secho(f"baton: {visible(str(error))}", err=True, fg=typer.colors.RED)
        raise typer.Exit(error.exit_code) from None
    except KeyboardInterrupt:
        words = "interrupted; the same command with --run NAME resumes from the last checkpoint"
        if in_json:
            print_json({"state": "failed", "error": words, "exit_code": INTERRUPTED})
        typer.secho(f"baton: {words}", err=True)
        raise typer.Exit(INTERRUPTED) from None


def page_path(path: str) -> str:
    """Returns where a page will be written, before hours are spent on what it shows.

    Raises:
        UserError: it is not the path of an HTML file in a folder that can be written.
    """
    where = os.path.abspath(os.path.expanduser(path))
    folder = os.path.dirname(where)
    if not path.endswith((".html", ".htm")):
        raise UserError(f"report {path!r} has another ending than .html.", remedy="Name an HTML file.")
    if not os.access(folder, os.W_OK | os.X_OK) or os.path.isdir(where):
        raise UserError(f"report {path!r} cannot be written.", remedy=f"Check that {folder} is there and is yours.")
    return where


def of_file(error: OSError) -> BatonError:
    """Returns the error of a file or folder that cannot be used, with its name.

    Raises:
        OSError: no file is named in it.
    """
    if error.filename is None:
        raise error
    if full := no_room(error):
        return full
    path = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else repr(error.filename)
    is_cache = os.path.abspath(path).startswith(os.path.abspath(machine.cache_dir()))
    remedy = "Set BATON_CACHE to a folder that can be written to." if is_cache else "Check the path and its rights."
    return UserError(f"{path!r} cannot be used: {error.strerror}.", remedy=remedy)


def print_json(document: Mapping[str, object]) -> None:
    """Prints the one JSON object of a command; a number that is not finite, which JSON has no name for, is null."""
    answer = _answer.get()
    plain = json.loads(json.dumps(document), parse_constant=lambda name: None)
    (answer.stream if answer else sys.stdout).write(json.dumps(plain) + "\n")
