"""What `baton generate` and `baton serve` do: prompts from anywhere, several models side by side, a chat."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.columns import Columns
from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from baton.components.shared.core.errors import UserError
from baton.components.shared.core.machine import cache_dir
from baton.components.shared.models import generation, loading

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DEFAULT_LENGTH = 2048
"""Tokens that a model without a stated limit reads."""

Messages = list[dict[str, str]]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How models write; see `generation.write_all`."""

    max_new_tokens: int
    temperature: float
    top_p: float
    seed: int


@dataclass(frozen=True)
class Prompt:
    """A text to continue, or a conversation to answer."""

    content: str | Messages

    def as_chat(self, system: str | None) -> Prompt:
        """Returns it as a conversation, with a system message in front where there is one."""
        messages = [{"role": "user", "content": self.content}] if isinstance(self.content, str) else self.content
        return Prompt([{"role": "system", "content": system}, *messages] if system else messages)

    def shown(self) -> str:
        """Returns the text, or the last message."""
        return self.content if isinstance(self.content, str) else self.content[-1]["content"]


@dataclass(frozen=True)
class Loaded:
    """A model in memory, under the name it was asked for."""

    uri: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    def render(self, prompt: Prompt) -> str:
        """Returns a prompt as the text that the model reads.

        Raises:
            UserError: it is a conversation, and the model has no chat template.
        """
        if not isinstance(prompt.content, str) and not self.tokenizer.chat_template:
            raise UserError(f"{self.uri} has no chat template.", remedy="Leave out --chat, or name an instruct model.")
        return generation.rendered(prompt.content, self.tokenizer)


def load(uri: str) -> Loaded:
    """Loads a model onto the GPU, where there is one."""
    import torch

    model, tokenizer = generation.load(uri)
    return Loaded(uri, model.to("cuda") if torch.cuda.is_available() else model, tokenizer)


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

    from baton.pipelines.cli.display import console

    texts = [loaded.render(prompt) for prompt in prompts]
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


def show(console: Console, prompt: str, answers: dict[str, str]) -> None:
    """Prints a prompt, and the answers beside each other."""
    console.print(Panel(Text(prompt), title="prompt", title_align="left", border_style="dim"))
    width = max(30, (console.width - 2 * len(answers)) // len(answers))
    panels = [
        Panel(Text(text), title=uri[-(width - 6) :], title_align="left", width=width) for uri, text in answers.items()
    ]
    console.print(Columns(panels, padding=(0, 1)))


def converse(console: Console, loaded: Sequence[Loaded], system: str | None, settings: Settings) -> None:
    """Talks until the input ends; each model keeps its own answers in mind. `/new` begins anew, `/quit` ends it."""
    start: Messages = [{"role": "system", "content": system}] if system else []
    histories = {model.uri: list(start) for model in loaded}
    console.print("[dim]/new begins anew, /quit ends it.[/]")
    for line in _inputs(console):
        if line == "/new":
            histories = {model.uri: list(start) for model in loaded}
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


def servable(uri: str) -> str:
    """Returns a local folder with a whole model: an adapter is folded into its base, once, in the cache.

    Raises:
        UserError: there is no such model.
    """
    folder = loading.local_model(uri)
    if os.path.isfile(f"{folder}/config.json"):
        return folder
    made_from = hashlib.sha256(f"{uri} {loading.model_identity(folder)}".encode()).hexdigest()[:16]
    target = os.path.join(cache_dir(), "served", made_from)
    if not os.path.isfile(f"{target}/config.json"):
        model, tokenizer = generation.load(uri)
        whole: Any = model
        tokenizer.save_pretrained(target)
        whole.merge_and_unload().save_pretrained(target)
    return target
