"""How a model was asked in training, for those who ask it later: `generate`, tasks."""

from __future__ import annotations

import contextlib
import json
import os
import re
from typing import TYPE_CHECKING, Any, Literal

from baton.components.shared.checkpoints.store import CheckpointStore
from baton.components.shared.core.document import Document
from baton.components.shared.core.errors import DamagedError, UserError
from baton.components.shared.models import conversing, vocabulary
from baton.components.shared.recipe import Recipe
from baton.components.shared.runs.documents.data import RunHead, SplitData, Tokens
from baton.components.shared.runs.run import Run
from baton.components.shared.store import bundles
from baton.components.shared.store.storage import Storage

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Row = dict[str, Any]
FILE = "baton.json"
"""Its place beside an exported model."""
SETTINGS = "generation_config.json"
"""Where Transformers, and others after it, have a model's own settings for writing."""
IN_RUN = re.compile(r"(?P<run>.*/runs/[^/]+)(/checkpoints/step-(?P<step>\d+))?(/.*)?")
"""Address of a run, or of anything below it."""
BELOW = re.compile(r"(?P<run>.*/runs/[^/]+)/(checkpoints(/step-(?P<step>\d+))?|exports?)/.*")
"""Address of a checkpoint or an export, below its run."""


class Prompting(Document):
    """How prompts were written in training."""

    prompts: Literal["chat", "instruction", "prompt", "text"]
    """As a user's turn of the chat template, as Alpaca's instruction, as the text that a completion follows, or as the
    beginning of a text."""
    system: str | None = None
    """What a conversation began with that had no system turn (`data.system`)."""
    separator: str = ""
    """Between prompt and completion."""

    @property
    def is_chat(self) -> bool:
        """Whether the model was trained on conversations."""
        return self.prompts == "chat"

    def as_text(self, prompt: str) -> str:
        """Returns a prompt as the text that the model was trained to continue."""
        if self.prompts == "instruction":
            prompt = conversing.alpaca(prompt, None)
        return prompt if prompt.endswith(self.separator) else prompt + self.separator


def begun(prompt: str | list[dict[str, Any]], system: str | None) -> list[dict[str, Any]]:
    """Returns a conversation with a system turn in front, if there is one and it has none."""
    turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if not system or any(turn["role"] in ("system", "developer") for turn in turns):
        return turns
    return [{"role": "system", "content": system}, *turns]


def ends(folder: str, tokenizer: PreTrainedTokenizerBase) -> list[int] | None:
    """Returns the tokens that an answer ends with, None where a model's own settings for writing have them all."""
    own = _settings(folder).get("eos_token_id", tokenizer.eos_token_id)
    listed = own if isinstance(own, list) else [own] if own is not None else []
    known = (conversing.end_of_turn(tokenizer), vocabulary.end_of_turn(tokenizer))
    missing = [end for end in dict.fromkeys(known) if end is not None and end not in listed]
    return [*listed, *missing] if missing else None


def write_ends(folder: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Adds what a chat template closes an answer with to the tokens that end a model's writing, for any library."""
    if needed := ends(folder, tokenizer):
        document = {**_settings(folder), "eos_token_id": needed}
        with open(os.path.join(folder, SETTINGS), "w", encoding="utf-8") as file:
            json.dump(document, file, indent=2, sort_keys=True)


def _settings(folder: str) -> dict[str, Any]:
    path = os.path.join(folder, SETTINGS)
    if not os.path.isfile(path):
        return {}
    with open(path, encoding="utf-8") as file:
        document: dict[str, Any] = json.load(file)
    return document


def of_row(row: Row, recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> Prompting:
    """Returns how a recipe renders a row of its split, and so all of them."""
    prompt = row.get("prompt")
    if "text" in row:
        return Prompting(prompts="text")
    if "messages" in row or isinstance(prompt, list) or conversing.applies(recipe, tokenizer):
        return Prompting(prompts="chat", system=recipe.data.system)
    is_instruction = isinstance(prompt, str) and conversing.asked(prompt) != prompt
    return Prompting(prompts="instruction" if is_instruction else "prompt", separator=recipe.data.separator)


def as_rendered(run: Run, recipe: Recipe) -> Recipe:
    """Returns a run's recipe with `data.render_as` as its tokens were made: before there was a choice, as text."""
    if recipe.data.render_as != "auto":
        return recipe
    head, tokens = run.read(RunHead), run.read(Tokens)
    if head is None or head.made.baton or tokens is None or tokens.rendered:
        return recipe
    return recipe.model_copy(update={"data": recipe.data.model_copy(update={"render_as": "text"})})


def of_run(run: Run, recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> Prompting | None:
    """Returns how a run renders its rows, None where they are gone."""
    prefix = run.need(SplitData).prefix
    manifest = bundles.read_manifest(run.storage, prefix)
    if manifest is None:
        return None
    path = manifest.path(prefix, "eval.jsonl")
    with run.storage.translated(path), run.storage.fs.open(run.storage.key(path), "rb") as file:
        return of_row(json.loads(file.readline()), as_rendered(run, recipe), tokenizer)


def asks_in_turns(run: Run, recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Tells whether tasks of the harness are put as conversations; see `Tasks.render_as`.

    Raises:
        UserError: they are to be, and there is no chat template.
    """
    tasks = recipe.evaluation.tasks
    if tasks is None or tasks.render_as == "text":
        return False
    if tasks.render_as == "chat":
        if not tokenizer.chat_template:
            raise UserError(
                "evaluation.tasks.render_as: chat, and the tokenizer has no chat template.",
                remedy="Set model.chat_template, or render_as to auto.",
            )
        return True
    trained = of_run(run, recipe, tokenizer)
    return (trained is not None and trained.is_chat) or conversing.applies(recipe, tokenizer)


def of_model(uri: str, folder: str, tokenizer: PreTrainedTokenizerBase) -> Prompting | None:
    """Returns how a model was asked in training, as far as that is known.

    Args:
        uri: Address of an exported model, a checkpoint or another model.
        folder: Its local files.
        tokenizer: Its tokenizer.
    """
    path = os.path.join(folder, FILE)
    if os.path.isfile(path):
        with open(path, "rb") as file:
            return Prompting.read(file.read(), path)
    if below := _below(uri):
        run = Run.open(below["run"])
        if run.read(RunHead) and run.read(SplitData):
            return of_run(run, run.recipe(), tokenizer)
    return None


def require_readable(uri: str) -> None:
    """Checks that an address is a model's, and that this Baton reads what a run has there.

    Raises:
        UserError: it is that of a folder without a model, such as a run's.
        FormatError: another release made it, whose work this one does not continue.
    """
    in_run = IN_RUN.fullmatch(uri.rstrip("/") if "://" in uri else os.path.abspath(uri))
    if os.path.isdir(uri) or (in_run and "://" in uri):
        names = Storage(uri).list("")
        if names and not {"config.json", "adapter_config.json"} & set(names):
            remedy = _model_of(Run.open(in_run["run"]), in_run["step"]) if in_run else ""
            raise UserError(f"{uri!r} is a folder without a model.", remedy=remedy or "Give one with a config.json.")
    if below := _below(uri):
        run = Run.open(below["run"])
        if head := run.read(RunHead):
            head.made.require_known(f"run {run.name!r}")
        # One that was marked as damaged is the user's to try.
        with contextlib.suppress(DamagedError):
            if below["step"] and (checkpoint := CheckpointStore(run).read(int(below["step"]))):
                checkpoint.require_continued("checkpoint")


def _model_of(run: Run, step: str | None) -> str:
    """Returns a remedy that names a model of a run, empty where it has none."""
    store = CheckpointStore(run)
    if step is None and (exported := bundles.read_manifest(run.storage, run.path("export"))):
        return f"Give the run's export: {run.storage.uri(exported.path(run.path('export')))}"
    checkpoint = store.read(int(step)) if step else next(store.whole(), None)
    return f"Give the run's checkpoint: {store.uri(checkpoint)}" if checkpoint else ""


def _below(uri: str) -> re.Match[str] | None:
    """Returns the run, and of a checkpoint the step, that an address lies below, None for any other."""
    return BELOW.fullmatch(uri if "://" in uri else os.path.abspath(uri))
