"""Held-out rows as prompts, for the model to continue: as training renders them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from baton.components.shared.models import conversing, generation, prompting
from baton.components.shared.recipe import Recipe
from baton.components.shared.runs.documents.data import SplitData
from baton.components.shared.runs.run import Run
from baton.components.shared.store import bundles

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEXT_PROMPT_SHARE = 3
"""A row of plain text is cut after this fraction (1/3) to be continued by the model."""


def held_out_prompts(
    run: Run, recipe: Recipe, tokenizer: PreTrainedTokenizerBase, count: int, side: str = "eval"
) -> list[tuple[str, str]]:
    """Returns the first rows of a side as (prompt, reference), none for a model that writes nothing.

    Args:
        run: The training run.
        recipe: Its recipe.
        tokenizer: Renders conversations.
        count: Rows at most.
        side: `eval`, or `test`, which nothing but the last evaluation may look at.

    Returns:
        The pairs; the reference is empty for a row without an answer, or with one that is rated as bad.
    """
    prefix = run.need(SplitData).prefix
    manifest = bundles.read_manifest(run.storage, prefix)
    if manifest is None or count == 0 or recipe.training.spec.scores:
        return []
    lines = run.storage.first_lines(manifest.path(prefix, f"{side}.jsonl"), count)
    recipe = prompting.as_rendered(run, recipe)
    return [_prompt(json.loads(line), recipe, tokenizer) for line in lines if line]


def judged_side(run: Run) -> str:
    """Returns the side that a run's result is judged on: `test` where the split has such rows, else `eval`."""
    prefix = run.need(SplitData).prefix
    manifest = bundles.read_manifest(run.storage, prefix)
    return "test" if manifest and manifest.files.get("test.jsonl", {"size": 0})["size"] else "eval"


def _prompt(row: dict[str, Any], recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    (row,) = conversing.conversed([row], recipe, tokenizer)
    tools = row.get("tools")
    if "messages" in row:
        last = max(i for i, message in enumerate(row["messages"]) if message["role"] == "assistant")
        return generation.rendered(row["messages"][:last], tokenizer, tools), str(row["messages"][last]["content"])
    if "text" in row:
        at = len(row["text"]) // TEXT_PROMPT_SHARE
        return row["text"][:at], row["text"][at:]
    reference = next((row[name] for name in ("completion", "chosen", "answer") if name in row), "")
    if row.get("label") is False:
        reference = ""
    if isinstance(row["prompt"], list):
        answer = reference if isinstance(reference, str) else "".join(message["content"] for message in reference)
        return generation.rendered(row["prompt"], tokenizer, tools), answer
    return row["prompt"] + recipe.data.separator, reference
