"""Shared by all commands: options, the one message of a known error, and JSON on standard output."""

import contextlib
import functools
import inspect
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from enum import StrEnum
from importlib import metadata
from typing import Annotated, Any, TextIO

import typer
from rich.table import Table
from typer.core import TyperCommand, TyperGroup
from typing_extensions import TypedDict

from baton import machine
from baton.cli.display import Verbosity
from baton.compiler.pipeline_file import Pipeline
from baton.errors import BatonError, UserError, no_room
from baton.recipe.run import Store as StoreSection
from baton.source import origin
from baton.store.clouds import ANY_BUCKET
from baton.terminal import Terminal, visible

REJECTED = 3  # exit code of a run that the recipe's gate rejects
INTERRUPTED = 130  # exit code after Ctrl-C
UNKNOWN = "unknown"  # state of a run that could not be followed to its end
EXIT_CODES = {"failed": 1, "canceled": 1, "skipped": 1, "rejected": REJECTED, UNKNOWN: 4}  # 0 for all others


class Runner(StrEnum):
    process = "process"
    docker = "docker"


class Control(StrEnum):
    """Part of the state that a negative control omits."""

    rng = "rng"
    hooks = "hooks"


RECIPE_HELP = "YAML file, address, - for standard input, or name of a bundled recipe."
RecipePath = Annotated[str, typer.Argument(metavar="RECIPE", help=RECIPE_HELP, show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="PATH=VALUE", help="Change a value, e.g. training.learning_rate=1e-4. Repeatable."),
]
Store = Annotated[str | None, typer.Option(help=f"Store instead of the recipe's: folder, {ANY_BUCKET} bucket.")]
RunName = Annotated[str | None, typer.Option("--run", help="Name of the run; an existing one resumes.")]
Endpoint = Annotated[
    str | None,
    typer.Option(
        envvar=["BATON_KFP_ENDPOINT", "KF_PIPELINES_ENDPOINT"],
        help="Kubeflow Pipelines API, e.g. http://localhost:8888.",
        show_default=False,
    ),
]
Experiment = Annotated[str | None, typer.Option(help="Experiment. Default: the recipe's name.")]
ServiceAccount = Annotated[str | None, typer.Option(help="Service account of the pods.")]
Cache = Annotated[bool, typer.Option("--cache/--no-cache", help="Let Kubeflow skip finished stages of this run.")]
Registers = Annotated[
    bool, typer.Option("--register/--no-register", help="Register the pipeline, so that Kubeflow's page can start it.")
]
Wait = Annotated[bool, typer.Option("--wait", help="Follow the run to its end; the exit code is its state.")]
Timeout = Annotated[float, typer.Option(help="Hours to wait.")]
Retries = Annotated[int, typer.Option(min=0, max=10, help="With --wait: retries after a lost pod.")]
WEEK_H = 168.0  # of `Timeout`
LeaveOut = Annotated[
    list[Control] | None,
    typer.Option(help="Negative control: do not restore this part of the state. The runs should differ."),
]
Turns = Annotated[
    str | None,
    typer.Option(
        metavar="N,M,…",
        help="Numbers of processes, in turn from chunk to chunk or kill to kill; needs virtual workers.",
    ),
]
Namespace = Annotated[str | None, typer.Option(help="Kubeflow profile, where there are several.")]
RunnerOption = Annotated[
    Runner, typer.Option(help="docker: each stage in its own container, from the image of its pods.")
]
Image = Annotated[
    str | None,
    typer.Option(envvar="BATON_IMAGE", metavar="NAME:TAG", help="Container image instead of the recipe's."),
]
Limit = Annotated[
    str | None,
    typer.Option("--budget", metavar="LIMIT", help="Most to spend instead of the recipe's: 40 USD, 12 gpu-hours, 6h."),
]
By = Annotated[str | None, typer.Option("--by", metavar="TIME", help="Time to end by, e.g. 2026-12-01T18:00Z.")]
ChunkCount = Annotated[int | None, typer.Option(help="Number of chunks instead of the recipe's.")]
PipelineOption = Annotated[
    Pipeline,
    typer.Option(help="retrain: only if data or recipe have changed; sweep: compare configurations."),
]
DEFAULT_STORE: str = StoreSection.model_fields["uri"].default  # where names are looked up
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]
Trust = Annotated[bool, typer.Option("--trust", help="Consent to the code of a remote recipe, as it is now.")]


def budgeted(overrides: Sequence[str] | None, limit: str | None, by: str | None) -> list[str]:
    """Returns changes of the recipe with those of `--budget` and `--by`."""
    given = {"limit": limit, "by": by}
    return [*(overrides or ()), *(f"budget.{key}={json.dumps(value)}" for key, value in given.items() if value)]


GONE = {  # command of an earlier release → remedy
    "serve": "`baton serve` is gone: run `vllm serve` or `transformers serve`, see docs/guides/evaluate-and-export.md.",
    "sweep submit": "`baton sweep submit RECIPE` is gone: run `baton kfp submit RECIPE --pipeline sweep`.",
}
RENAMED = {  # command, and perhaps option, of an earlier release → name of today
    "runs fork --cold": "--weights-only",
    "runs fork --start": "--run-now",
}
ALIASES = {"train": "run", "report": "open"}  # what other tools call a command → ours
MOVED = {  # hidden command of an earlier release → command of today
    "validate": "check",
    "doctor": "check",
    "schema": "recipe schema",
    "compile": "kfp compile",
    "submit": "kfp submit",
    "cancel": "stop",
    "schedule": "kfp schedule",
    "schedules list": "kfp schedules",
    "schedules delete": "kfp unschedule",
    "ci-report": "kfp summary",
    "outcome": "kfp summary",
    "runs tree": "runs graph",
    "retrain": "run --if-changed",
    "import axolotl": "init --from axolotl",
    "import llamafactory": "init --from llamafactory",
    "recipes": "recipe list",
    "recipes list": "recipe list",
    "recipes show": "recipe show",
    "prove": "verify chunks",
    "drill": "verify kills",
    "audit": "verify replay",
    "checkpoints list": "runs show",
    "checkpoints show": "runs show RUN@STEP",
    "checkpoints prune": "runs prune",
    "checkpoints merge": "runs merge",
    "checkpoints verify": "verify checkpoints",
    "checkpoints signature": "verify signature",
    "keys new": "verify keys new",
    "keys show": "verify keys show",
}


def _without_flag_types(command: Any) -> None:
    """Keeps help from naming the type of a flag."""
    for parameter in command.params:
        if getattr(parameter, "is_flag", False) and parameter.metavar is None:
            parameter.metavar = ""


class Command(TyperCommand):
    """Command whose help names no type for a flag."""

    def __init__(self, *args: Any, **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        _without_flag_types(self)

    def get_help_option(self, ctx: Any) -> Any:
        return _help_option(super().get_help_option(ctx))


def _help_option(option: Any) -> Any:
    if option is not None:
        option.metavar, option.help = "", "Show this help and exit."
    return option


class Commands(TyperGroup):
    """Group that takes the words of earlier releases, too."""

    def __init__(self, *args: Any, **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        _without_flag_types(self)

    def get_help_option(self, ctx: Any) -> Any:
        return _help_option(super().get_help_option(ctx))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        called = " ".join([*_path(ctx), args[0]])
        if gone := GONE.get(called):
            ctx.fail(gone)
        word = ALIASES.get(called) or _today(called, args[0])
        name, command, words = super().resolve_command(ctx, [word, *args[1:]])
        takes = {option for parameter in command.params for option in parameter.opts} if command else set()
        if "--json" in takes and "--output" not in takes:
            words = list(_without_output(words))
        is_whole = not hasattr(command, "commands") or all(word.startswith("-") for word in words)
        if is_whole and (today := MOVED.get(" ".join([*_path(ctx), str(name)]))):
            typer.echo(f"note: `baton {called}` is now `baton {today}`", err=True)
        return name, command, [_today(f"{called} {word}", word) for word in words]


class TopCommands(Commands):
    """Group whose help fits a terminal of 24 lines and 80 columns."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            error.message = error.message.removeprefix("Value error, ")  # of pydantic, in typer 0.29
            raise

    def format_help(self, ctx: Any, formatter: Any) -> None:
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(style="bold", no_wrap=True)
        table.add_column(style="bold cyan", no_wrap=True)
        table.add_column()
        panel = ""
        for command in (self.get_command(ctx, name) for name in self.list_commands(ctx)):
            if command and not command.hidden:
                own = str(getattr(command, "rich_help_panel", ""))
                table.add_row(
                    "" if own == panel else own, command.name, command.get_short_help_str(limit=300).rstrip(".")
                )
                panel = own
        out = Terminal(highlight=False)
        out.print(self.get_usage(ctx), markup=False, soft_wrap=True)
        out.print(f"{self.help}\n", markup=False)
        out.print(table)
        out.print("Options: -h, --help · --version · -q, --quiet · -v, --verbose", markup=False)


def _path(ctx: Any) -> list[str]:
    """Returns the names of a group and the groups around it, without the program's."""
    names: list[str] = []
    while ctx.parent is not None:
        names.insert(0, ctx.info_name)
        ctx = ctx.parent
    return names


def _today(former: str, word: str) -> str:
    if former not in RENAMED:
        return word
    typer.echo(f"note: {word} is called {RENAMED[former]} now", err=True)
    return RENAMED[former]


Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="Print the answer, warnings and errors alone.")]
Verbose = Annotated[bool, typer.Option("-v", "--verbose", help="Print more, such as digests.")]


def with_verbosity(command: Callable[..., None]) -> Callable[..., None]:
    """Returns a command that takes -q and -v, too."""

    @functools.wraps(command)
    def called(*args: Any, quiet: bool, verbose: bool, **options: Any) -> None:
        Verbosity.add(quiet=quiet, verbose=verbose)
        command(*args, **options)

    signature = inspect.signature(command, eval_str=True)
    own = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=kind)
        for name, kind in (("quiet", Quiet), ("verbose", Verbose))
    ]
    signature = signature.replace(parameters=[*signature.parameters.values(), *own])
    called.__signature__ = signature  # type: ignore[attr-defined]
    called.__annotations__ = {name: parameter.annotation for name, parameter in signature.parameters.items()}
    return called


def print_version(asked: bool) -> None:
    """Prints Baton's version and exits, where it is asked for."""
    if asked:
        typer.echo(f"baton {metadata.version('baton-llm')}")
        raise typer.Exit


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


def require_endpoint(endpoint: str | None) -> str:
    """Returns the endpoint; `UserError` without one."""
    if not endpoint:
        remedy = "Give --endpoint URL, such as http://localhost:8888, or set BATON_KFP_ENDPOINT."
        raise UserError("no Kubeflow endpoint is given.", remedy=remedy)
    return endpoint


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
    error: str  # reason of a failed command, alone; or, with the rest, of a run that could not be followed
    exit_code: int


_resuming: ContextVar[str] = ContextVar("resuming", default="")
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
        command = _resuming.get()
        raise ended(f"interrupted; resume with: {command}" if command else "interrupted", INTERRUPTED) from None
    finally:
        _stdout.reset(token)
        _resuming.set("")


def resumable(words: Sequence[str]) -> None:
    """Names the command that resumes what this one does, for the message after Ctrl-C."""
    _resuming.set(shlex.join(["baton", *words]))


def end_run(shown: RunAnswer, json: bool) -> None:
    """Prints the answer about a run on Kubeflow, and exits with the code of its state."""
    print_json(shown) if json else typer.echo(shown["url"])
    if code := shown.get("exit_code") or EXIT_CODES.get(shown["state"]):
        raise typer.Exit(code)


def page_path(path: str) -> str:
    """Returns the path of a page, checked before hours are spent on it."""
    where = os.path.abspath(os.path.expanduser(path))
    folder = os.path.dirname(where)
    if not path.endswith((".html", ".htm")):
        raise UserError(f"report {path!r} does not end in .html.", remedy="Name an HTML file.")
    if not os.access(folder, os.W_OK | os.X_OK) or os.path.isdir(where):
        raise UserError(f"report {path!r} cannot be written.", remedy=f"Check that {folder} is there and is yours.")
    return where


def default_page(store: str | None, name: str) -> str:
    """Returns the path of a page: in a store that is a folder, else in Baton's cache."""
    is_folder = store is not None and "://" not in store
    folder = os.path.join(
        os.path.abspath(os.path.expanduser(str(store))) if is_folder else machine.cache_dir(), "pages"
    )
    os.makedirs(folder, exist_ok=True)
    return page_path(os.path.join(folder, name))


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
