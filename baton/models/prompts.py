"""Prompts as training rendered them: the format of a run or model, and held-out rows to continue."""

from __future__ import annotations

import contextlib
import json
import os
import re
from typing import TYPE_CHECKING, Any, Literal

from baton.checkpoint.store import CheckpointStore
from baton.documents import Document
from baton.errors import DamagedError, RowError, UserError
from baton.models import chat, generate
from baton.recipe.recipe import Recipe
from baton.runs.documents import RunInfo, SplitData, TokenizedRows
from baton.runs.run import Run
from baton.store.manifest import read_manifest
from baton.store.storage import Storage

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


Row = dict[str, Any]
FILE = "baton.json"  # the prompt format, in an exported model's folder
SETTINGS = "generation_config.json"  # a model's own settings for writing, of Transformers and other libraries
# Address of a run or of anything below it, and of a checkpoint or an export below its run.
IN_RUN = re.compile(r"(?P<run>.*/runs/[^/]+)(/checkpoints/step-(?P<step>\d+))?(/.*)?")
BELOW = re.compile(r"(?P<run>.*/runs/[^/]+)/(checkpoints(/step-(?P<step>\d+))?|exports?)/.*")


class PromptFormat(Document):
    """How prompts were written in training."""

    prompts: Literal["chat", "instruction", "prompt", "text"]
    """As a user's turn of the chat template, as Alpaca's instruction, as the text that a completion follows, or as the
    beginning of a text."""
    system: str | None = None
    """Beginning of a conversation without a system turn (`data.system`)."""
    separator: str = ""
    """Between prompt and completion."""

    @property
    def is_chat(self) -> bool:
        return self.prompts == "chat"

    def as_text(self, prompt: str) -> str:
        """Returns a prompt as the text that the model was trained to continue."""
        if self.prompts == "instruction":
            prompt = chat.alpaca(prompt, None)
        return prompt if prompt.endswith(self.separator) else prompt + self.separator


def with_system_turn(prompt: str | list[dict[str, Any]], system: str | None) -> list[dict[str, Any]]:
    """Returns a conversation with a system turn in front, if it has none."""
    turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if not system or any(turn["role"] in ("system", "developer") for turn in turns):
        return turns
    return [{"role": "system", "content": system}, *turns]


def end_tokens(folder: str, tokenizer: PreTrainedTokenizerBase) -> list[int] | None:
    """Returns the tokens that end an answer, None where a model's own settings have them all."""
    own = _settings(folder).get("eos_token_id", tokenizer.eos_token_id)
    listed = own if isinstance(own, list) else [own]
    ends = chat.end_tokens(tokenizer, listed)
    return ends if set(ends) - set(listed) else None


def write_ends(folder: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Adds the chat template's end of an answer to a model's own settings, for any library."""
    if needed := end_tokens(folder, tokenizer):
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


def format_of_row(row: Row, recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> PromptFormat:
    """Returns a recipe's format of a row of its split, and so of all."""
    prompt = row.get("prompt")
    if "text" in row:
        return PromptFormat(prompts="text")
    if "messages" in row or isinstance(prompt, list) or chat.uses_chat(recipe, tokenizer):
        return PromptFormat(prompts="chat", system=recipe.data.system)
    is_instruction = isinstance(prompt, str) and chat.strip_alpaca(prompt) != prompt
    return PromptFormat(prompts="instruction" if is_instruction else "prompt", separator=recipe.data.separator)


def as_rendered(run: Run, recipe: Recipe) -> Recipe:
    """Returns a run's recipe with `data.render_as` as its tokens were made: before there was a choice, as text."""
    if recipe.data.render_as != "auto":
        return recipe
    head, tokens = run.read(RunInfo), run.read(TokenizedRows)
    if head is None or head.made.baton or tokens is None or tokens.rendered:
        return recipe
    return recipe.model_copy(update={"data": recipe.data.model_copy(update={"render_as": "text"})})


def format_of_run(run: Run, recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> PromptFormat | None:
    """Returns a run's format of its rows, None where they are gone."""
    prefix = run.need(SplitData).prefix
    manifest = read_manifest(run.storage, prefix)
    if manifest is None:
        return None
    (line,) = run.storage.first_lines(manifest.path(prefix, "eval.jsonl"), 1)
    return format_of_row(json.loads(line), as_rendered(run, recipe), tokenizer)


def asks_in_turns(run: Run, recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Tells whether the harness's tasks are put as conversations (`Tasks.render_as`)."""
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
    trained = format_of_run(run, recipe, tokenizer)
    return (trained is not None and trained.is_chat) or chat.uses_chat(recipe, tokenizer)


def format_of_model(uri: str, folder: str, tokenizer: PreTrainedTokenizerBase) -> PromptFormat | None:
    """Returns how a model was asked in training, as far as its address and local files tell."""
    path = os.path.join(folder, FILE)
    if os.path.isfile(path):
        with open(path, "rb") as file:
            return PromptFormat.read(file.read(), path)
    if below := _below(uri):
        run = Run.open(below["run"])
        if run.read(RunInfo) and run.read(SplitData):
            return format_of_run(run, run.recipe(), tokenizer)
    return None


def require_readable(uri: str) -> None:
    """Checks that an address is a model's, and that this Baton continues the work of its release."""
    in_run = IN_RUN.fullmatch(uri.rstrip("/") if "://" in uri else os.path.abspath(uri))
    if os.path.isdir(uri) or (in_run and "://" in uri):
        names = Storage(uri).list("")
        if names and not {"config.json", "adapter_config.json"} & set(names):
            remedy = _model_of(Run.open(in_run["run"]), in_run["step"]) if in_run else ""
            raise UserError(f"{uri!r} is a folder without a model.", remedy=remedy or "Give one with a config.json.")
    if below := _below(uri):
        run = Run.open(below["run"])
        if head := run.read(RunInfo):
            head.made.require_known(f"run {run.name!r}")
        # The user may try a checkpoint that is marked as damaged.
        with contextlib.suppress(DamagedError):
            if below["step"] and (checkpoint := CheckpointStore(run).read(int(below["step"]))):
                checkpoint.require_continued("checkpoint")


def _model_of(run: Run, step: str | None) -> str:
    """Returns a remedy that names a model of a run, empty where it has none."""
    store = CheckpointStore(run)
    if step is None and (exported := read_manifest(run.storage, run.path("export"))):
        return f"Give the run's export: {run.storage.uri(exported.path(run.path('export')))}"
    checkpoint = store.read(int(step)) if step else next(store.whole(), None)
    return f"Give the run's checkpoint: {store.uri(checkpoint)}" if checkpoint else ""


def _below(uri: str) -> re.Match[str] | None:
    """Returns run and step of an address below a run, None for any other."""
    return BELOW.fullmatch(uri if "://" in uri else os.path.abspath(uri))


TEXT_PROMPT_SHARE = 3  # the model continues the first third of a plain text


def held_out_prompts(
    run: Run, recipe: Recipe, tokenizer: PreTrainedTokenizerBase, count: int, side: str = "eval"
) -> list[tuple[str, str]]:
    """Returns the first rows of a side as (prompt, reference), none for a model that writes nothing."""
    prefix = run.need(SplitData).prefix
    manifest = read_manifest(run.storage, prefix)
    if manifest is None or count == 0 or recipe.training.spec.scores:
        return []
    # Only the last evaluation may read the side `test`.
    lines = run.storage.first_lines(manifest.path(prefix, f"{side}.jsonl"), count)
    recipe = as_rendered(run, recipe)
    return [_prompt(json.loads(line), recipe, tokenizer) for line in lines if line]


def _answer(messages: list[dict[str, Any]], asked: str, tokenizer: PreTrainedTokenizerBase, tools: Any) -> str:
    """Returns the answer that ends a conversation as the model would write it, calls of tools included."""
    if not messages[-1].get("tool_calls"):
        return str(messages[-1]["content"])
    (whole,) = chat.ChatTemplate(tokenizer).render_each([chat.Conversation(messages, tools)])
    if isinstance(whole, RowError) or not whole.text.startswith(asked):
        return ""
    ids = tokenizer(whole.text[len(asked) :], add_special_tokens=False)["input_ids"]
    return str(tokenizer.decode(ids, skip_special_tokens=True)).strip()


def judged_side(run: Run) -> str:
    """Returns the side that judges a run's result: `test` where the split has such rows, else `eval`."""
    manifest = read_manifest(run.storage, run.need(SplitData).prefix)
    return "test" if manifest and manifest.files.get("test.jsonl", {"size": 0})["size"] else "eval"


def _prompt(row: dict[str, Any], recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    (row,) = chat.apply_chat([row], recipe, tokenizer)
    tools = row.get("tools")
    if "messages" in row:
        last = max(i for i, message in enumerate(row["messages"]) if message["role"] == "assistant")
        asked = generate.rendered(row["messages"][:last], tokenizer, tools)
        return asked, _answer(row["messages"][: last + 1], asked, tokenizer, tools)
    if "text" in row:
        at = len(row["text"]) // TEXT_PROMPT_SHARE
        return row["text"][:at], row["text"][at:]
    reference = next((row[name] for name in ("completion", "chosen", "answer") if name in row), "")
    if row.get("label") is False:  # rated as bad
        reference = ""
    if isinstance(row["prompt"], list):
        answer = reference if isinstance(reference, str) else "".join(message["content"] for message in reference)
        return generate.rendered(row["prompt"], tokenizer, tools), answer
    return row["prompt"] + recipe.data.separator, reference
