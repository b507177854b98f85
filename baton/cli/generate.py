"""`baton generate`: tries out a trained model: prompts from anywhere, several models side by side, a chat."""

from __future__ import annotations

import json as json_text
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer
from rich.columns import Columns
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.progress import Progress
from rich.text import Text

from baton import events
from baton.cli import address
from baton.cli.display import console, screen
from baton.cli.options import Json, answer, print_json
from baton.errors import UserError
from baton.models import generate as generation
from baton.models import loading
from baton.models import prompts as prompting
from baton.terminal import visible

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DEFAULT_LENGTH = 2048  # tokens that a model without a stated limit reads
Messages = list[dict[str, str]]


@dataclass(frozen=True, kw_only=True)
class Writing:
    """Settings of a generation; see `baton.models.generate.write_all`."""

    max_new_tokens: int
    temperature: float
    top_p: float
    seed: int
    chat: bool | None = None  # whether a text is a user's turn, not a beginning; None: as in training
    system: str | None = None  # None: as in training


@dataclass(frozen=True)
class Prompt:
    """A text to continue, or a conversation to answer."""

    content: str | Messages

    def shown(self) -> str:
        return self.content if isinstance(self.content, str) else self.content[-1]["content"]


@dataclass(frozen=True)
class LoadedModel:
    uri: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    trained: prompting.PromptFormat | None = None  # as asked in training, where known

    def render(self, prompt: Prompt, settings: Writing) -> str:
        """Returns a prompt as the model reads it: as in training, unless the settings differ."""
        trained, content, chat = self.trained, prompt.content, settings.chat
        if chat is None:
            chat = settings.system is not None or (trained is not None and trained.is_chat)
        if isinstance(content, str) and not chat:
            return trained.as_text(content) if trained and settings.chat is None else content
        if not self.tokenizer.chat_template:
            raise UserError(f"{self.uri} has no chat template.", remedy="Leave out --chat, or name an instruct model.")
        system = trained.system if settings.system is None and trained else settings.system
        return generation.rendered(prompting.with_system_turn(content, system), self.tokenizer)


def _load(uri: str, *, trust: bool) -> LoadedModel:
    prompting.require_readable(uri)
    try:
        model, tokenizer = generation.load(uri, trust_remote_code=trust)
    except UserError as error:
        if "/" in uri or "run" in error.message:
            raise
        remedy = "`baton runs list` shows the runs of a store; hub ids are OWNER/NAME."
        raise UserError(f"{uri!r} is neither a run begun here nor a model: {error.message}", remedy=remedy) from error
    trained = prompting.format_of_model(uri, loading.local_model(uri), tokenizer)
    return LoadedModel(uri, loading.place_model(model), tokenizer, trained)


def _prompts_of(file: str) -> list[Prompt]:
    """Reads prompts: JSON lines with `prompt` or `messages` where the first is a JSON object, else lines of text."""
    try:
        if file == "-":
            lines = sys.stdin.read().splitlines()
        else:
            with open(file, encoding="utf-8-sig") as opened:
                lines = opened.read().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--file {file!r} cannot be read: {error}.") from None
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise UserError(f"--file {file!r} holds no prompts.")
    if not numbered[0][1].lstrip().startswith("{"):
        return [Prompt(line) for _, line in numbered]
    return [_prompt(file, number, line) for number, line in numbered]


def _prompt(file: str, number: int, line: str) -> Prompt:
    try:
        row = json_text.loads(line)
    except ValueError as error:
        raise UserError(f"{file} line {number}: broken JSON: {error}.") from None
    content = row.get("messages", row.get("prompt")) if isinstance(row, dict) else None
    whole = isinstance(content, list) and all(
        isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))
        for message in content
    )
    if not content or not (isinstance(content, str) or whole):
        raise UserError(
            f"{file} line {number} is not a prompt.",
            remedy='Expected {"prompt": text} or {"messages": [{"role": …, "content": …}]}.',
        )
    return Prompt(content)


def _write(loaded: LoadedModel, prompts: Sequence[Prompt], settings: Writing, batch_size: int) -> list[str]:
    texts = [loaded.render(prompt, settings) for prompt in prompts]
    with Progress(console=console, transient=True, disable=len(texts) < 2 or not console.is_terminal) as bar:
        task = bar.add_task(loaded.uri, total=len(texts))
        limit = int(getattr(loaded.model.config, "max_position_embeddings", DEFAULT_LENGTH))
        return generation.write_all(
            loaded.model,
            loaded.tokenizer,
            texts,
            max_new_tokens=settings.max_new_tokens,
            max_length=max(1, limit - settings.max_new_tokens),
            batch_size=batch_size,
            temperature=settings.temperature,
            top_p=settings.top_p,
            seed=settings.seed,
            progress=lambda done, _: bar.update(task, completed=done),
        )


def _show(console: Console, prompt: str, answers: dict[str, str]) -> None:
    console.print(Panel(Text(prompt), title="prompt", title_align="left", border_style="dim"))
    width = max(30, (console.width - 2 * len(answers)) // len(answers))
    panels = [
        Panel(Text(text), title=escape(uri[-(width - 6) :]), title_align="left", width=width)
        for uri, text in answers.items()
    ]
    console.print(Columns(panels, padding=(0, 1)))


def _converse(console: Console, loaded: Sequence[LoadedModel], settings: Writing) -> None:
    """Talks until the input ends; each model remembers its own answers."""
    histories: dict[str, Messages] = {model.uri: [] for model in loaded}
    console.print("[dim]/new starts over, /quit exits[/]")
    for line in _inputs(console):
        if line == "/new":
            histories = {model.uri: [] for model in loaded}
            continue
        answers = {}
        for model in loaded:
            history = histories[model.uri]
            history.append({"role": "user", "content": line})
            answers[model.uri] = _write(model, [Prompt(history)], settings, 1)[0]
            history.append({"role": "assistant", "content": answers[model.uri]})
        if len(answers) == 1:
            console.print(Text(next(iter(answers.values()))))
        else:
            _show(console, line, answers)


def _inputs(console: Console) -> Iterator[str]:
    while True:
        try:
            line = console.input("[bold]> [/]").strip()
        except EOFError:
            return
        if line == "/quit":
            return
        if line:
            yield line


ModelUris = Annotated[
    list[str], typer.Argument(metavar="MODEL…", help="Runs (RUN or RUN@STEP), exported models, checkpoints or hub ids.")
]
Chat = Annotated[
    bool | None,
    typer.Option(
        "--chat/--no-chat",
        help="Use the chat template, or continue the prompt as it is. Default: as in training. Without a prompt, "
        "--chat starts a conversation.",
        show_default=False,
    ),
]


def generate(
    model_uris: ModelUris,
    prompt: Annotated[str | None, typer.Option(help="Text to continue.")] = None,
    file: Annotated[
        str | None,
        typer.Option(help="Prompts: lines of text, or JSON lines with `prompt` or `messages`; - for standard input."),
    ] = None,
    chat: Chat = None,
    system: Annotated[str | None, typer.Option(help="System message, instead of data.system.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest continuation in tokens.")] = 64,
    temperature: Annotated[float, typer.Option(min=0, help="0 always takes the likeliest token.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0, max=1, help="Share of the probability to sample from.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the samples.")] = 0,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts per batch.")] = 8,
    trust: Annotated[bool, typer.Option("--trust", help="Run the model's own Python code.")] = False,
    json: Json = False,
) -> None:
    """Write text with a model, or with several side by side.

    Takes one prompt, a file of prompts, or a chat. With --file, --json prints one JSON line per prompt.
    """
    with answer(json):
        if prompt is not None and file is not None:
            raise UserError("--prompt and --file exclude each other.", remedy="Give one of them.")
        if prompt is None and file is None and chat and json:
            raise UserError("a chat has no JSON output.", remedy="Give --prompt or --file.")
        if prompt is None and file is None and not chat:
            raise UserError("no prompt is given.", remedy="Give --prompt, --file or --chat.")
        events.setup_logging()
        out = screen()
        settings = Writing(
            max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=seed, chat=chat, system=system
        )
        resolved = {given: address.model_of(given) for given in model_uris}
        if prompt is None and file is None:
            _converse(out, [_load(uri, trust=trust) for uri in resolved.values()], settings)
            return
        prompts = _prompts_of(file) if file is not None else [Prompt(prompt or "")]
        texts_by_model = {
            given: _write(_load(uri, trust=trust), prompts, settings, batch_size) for given, uri in resolved.items()
        }
        for number, item in enumerate(prompts):
            answers = {uri: texts[number] for uri, texts in texts_by_model.items()}
            if json:
                print_json({"prompt": item.shown(), "answers": answers})
            elif len(prompts) == 1 and len(answers) == 1:
                typer.echo(visible(answers[model_uris[0]]) if sys.stdout.isatty() else answers[model_uris[0]])
            else:
                _show(out, item.shown(), answers)
