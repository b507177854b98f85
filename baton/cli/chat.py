"""Prompts for `baton generate`: prompts from anywhere, several models side by side, a chat."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.columns import Columns
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.text import Text

from baton.errors import UserError
from baton.models import generate, loading
from baton.models import prompts as prompting
from baton.models.prompts import PromptFormat

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DEFAULT_LENGTH = 2048
"""Tokens that a model without a stated limit reads."""

Messages = list[dict[str, str]]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How models are asked, and how they write; see `generate.write_all`."""

    max_new_tokens: int
    temperature: float
    top_p: float
    seed: int
    chat: bool | None = None
    """Whether a text is what a user says, and not the beginning of a text; None: as the model was trained."""
    system: str | None = None
    """What a conversation begins with; None: as in training."""


@dataclass(frozen=True)
class Prompt:
    """A text to continue, or a conversation to answer."""

    content: str | Messages

    def shown(self) -> str:
        """Returns the text, or the last message."""
        return self.content if isinstance(self.content, str) else self.content[-1]["content"]


@dataclass(frozen=True)
class Loaded:
    """A model in memory, under the name it was asked for."""

    uri: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    trained: PromptFormat | None = None
    """How it was asked in training, where that is known."""

    def render(self, prompt: Prompt, settings: Settings) -> str:
        """Returns a prompt as the text that the model reads: as in training, unless the settings say otherwise.

        Raises:
            UserError: it is a conversation, and the model has no chat template.
        """
        trained, content, chat = self.trained, prompt.content, settings.chat
        if chat is None:
            chat = settings.system is not None or (trained is not None and trained.is_chat)
        if isinstance(content, str) and not chat:
            return trained.as_text(content) if trained and settings.chat is None else content
        if not self.tokenizer.chat_template:
            raise UserError(f"{self.uri} has no chat template.", remedy="Leave out --chat, or name an instruct model.")
        system = trained.system if settings.system is None and trained else settings.system
        return generate.rendered(prompting.with_system_turn(content, system), self.tokenizer)


def load(uri: str, *, trust: bool) -> Loaded:
    """Loads a model onto the GPU, where there is one.

    Args:
        uri: Its address.
        trust: Run Python code that comes with it.

    Raises:
        UserError: there is no such model, this Baton does not read it, or it needs code that is not to run.
    """
    prompting.require_readable(uri)
    model, tokenizer = generate.load(uri, trust_remote_code=trust)
    trained = prompting.format_of_model(uri, loading.local_model(uri), tokenizer)
    return Loaded(uri, loading.place_model(model), tokenizer, trained)


def prompts_of(file: str) -> list[Prompt]:
    """Reads prompts: JSON lines with `prompt` or `messages` where the first line is a JSON object, else lines of text.

    Raises:
        UserError: there is no such file, it holds none, or a line is not one.
    """
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
        row = json.loads(line)
    except ValueError as error:
        raise UserError(f"{file} line {number}: broken JSON: {error}.") from None
    content = row.get("messages", row.get("prompt")) if isinstance(row, dict) else None
    whole = isinstance(content, list) and all(
        isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))
        for message in content
    )
    if not content or not (isinstance(content, str) or whole):
        raise UserError(
            f"{file} line {number} is no prompt.",
            remedy='Expected {"prompt": text} or {"messages": [{"role": …, "content": …}]}.',
        )
    return Prompt(content)


def write(loaded: Loaded, prompts: Sequence[Prompt], settings: Settings, batch_size: int) -> list[str]:
    """Returns what a model writes after each prompt, with a bar where there are many."""
    from rich.progress import Progress

    from baton.cli.display import console

    texts = [loaded.render(prompt, settings) for prompt in prompts]
    with Progress(console=console, transient=True, disable=len(texts) < 2 or not console.is_terminal) as bar:
        task = bar.add_task(loaded.uri, total=len(texts))
        limit = int(getattr(loaded.model.config, "max_position_embeddings", DEFAULT_LENGTH))
        return generate.write_all(
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


def show(console: Console, prompt: str, answers: dict[str, str]) -> None:
    """Prints a prompt, and the answers beside each other."""
    console.print(Panel(Text(prompt), title="prompt", title_align="left", border_style="dim"))
    width = max(30, (console.width - 2 * len(answers)) // len(answers))
    panels = [
        Panel(Text(text), title=escape(uri[-(width - 6) :]), title_align="left", width=width)
        for uri, text in answers.items()
    ]
    console.print(Columns(panels, padding=(0, 1)))


def converse(console: Console, loaded: Sequence[Loaded], settings: Settings) -> None:
    """Talks until the input ends; each model keeps its own answers in mind. `/new` begins anew, `/quit` ends it."""
    histories: dict[str, Messages] = {model.uri: [] for model in loaded}
    console.print("[dim]/new begins anew, /quit ends it.[/]")
    for line in _inputs(console):
        if line == "/new":
            histories = {model.uri: [] for model in loaded}
            continue
        answers = {}
        for model in loaded:
            history = histories[model.uri]
            history.append({"role": "user", "content": line})
            answers[model.uri] = write(model, [Prompt(history)], settings, 1)[0]
            history.append({"role": "assistant", "content": answers[model.uri]})
        if len(answers) == 1:
            console.print(Text(next(iter(answers.values()))))
        else:
            show(console, line, answers)


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
