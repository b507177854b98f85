"""What tokenize leaves in Kubeflow: the first sequences as the model sees them, counts, and where all of them are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from baton.components.shared.core.labels import IGNORED
from baton.components.shared.models import generation, prompt_columns
from baton.components.shared.pages.cards import Card, table, visible
from baton.components.shared.recipe import Recipe
from baton.components.tokenize.refusals import in_words

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Row = dict[str, Any]
SHOWN = 3
"""Sequences of a side that are shown."""
HEAD, AROUND, LONGEST = 200, 20, 2000
"""Tokens from a sequence's beginning and from where training begins in it, tokens before that, and characters."""
MARKS = ("⟦", "⟧")
"""Around what is trained."""
SIDES = ("train", "eval", "test")
WIDTH = 40
"""Of the longest bar."""


def first_sequences(path: str, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Returns the first rows of an Arrow file in words, what is trained in marks, and reads no more than these."""
    import pyarrow as pa

    with pa.memory_map(path) as file, pa.ipc.open_stream(file) as reader:
        rows: list[Row] = reader.read_next_batch().slice(0, SHOWN).to_pylist()
    return [_in_words(row, tokenizer) for row in rows]


def _in_words(row: Row, tokenizer: PreTrainedTokenizerBase) -> str:
    if "input_ids" in row:
        return _sequence(row["input_ids"], [label != IGNORED for label in row["labels"]], tokenizer)
    columns = [name for name in row if name.endswith("_ids")]
    if not columns:  # the model writes the answers itself
        if not isinstance(row["prompt"], str):
            row = {name: each[0] for name, each in prompt_columns.restored({x: [y] for x, y in row.items()}).items()}
        return f"prompt {visible(generation.rendered(row['prompt'], tokenizer, row.get('tools')), LONGEST)}"
    told = []
    for name in columns:
        # Where the prompt stands alone the answers are what is trained; where it is in both, a score of the whole is.
        is_trained = "prompt_ids" in columns and name != "prompt_ids"
        told.append(f"{name.removesuffix('_ids')} {_sequence(row[name], [is_trained] * len(row[name]), tokenizer)}")
    return " | ".join([*told, *([f"label {row['label']}"] if "label" in row else [])])


def _sequence(ids: Sequence[int], trained: Sequence[bool], tokenizer: PreTrainedTokenizerBase) -> str:
    """Returns a sequence in words: its beginning, and where training begins if that is further on."""
    begins = next((at for at, is_trained in enumerate(trained) if is_trained), 0)
    spans = [(0, HEAD)] if begins < HEAD else [(0, HEAD - AROUND), (begins - AROUND, begins + HEAD)]
    words = " … ".join("".join(_marked(ids[a:b], trained[a:b], tokenizer)) for a, b in spans)
    rest = len(ids) - spans[-1][1]
    return f"{visible(words, LONGEST)}{' …' if rest > 0 else ''} ({len(ids):,} tokens)"


def _marked(ids: Sequence[int], trained: Sequence[bool], tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    for is_trained, group in groupby(zip(ids, trained, strict=True), key=lambda pair: pair[1]):
        text = str(tokenizer.decode([token for token, _ in group], clean_up_tokenization_spaces=False))
        yield f"{MARKS[0]}{text}{MARKS[1]}" if is_trained else text


def card(recipe: Recipe, tokens: dict[str, Any]) -> Card:
    """Returns the card of the tokens.

    Args:
        recipe: The recipe.
        tokens: What `tokenize_run` returned.
    """
    counts = {name: tokens.get(name, 0) for name in (*SIDES, "tokens", "steps", "truncated", "dropped")}
    sides = " · ".join(f"{side} {counts[side]:,}" for side in SIDES)
    parts = [
        f"{sides} sequences\n{counts['tokens']:,} tokens to train on in {counts['steps']:,} steps, "
        f"{counts['truncated']:,} rows truncated, {counts['dropped']:,} dropped"
    ]
    if recipe.tracking.cards == "rows":
        parts[0] += f"; what is trained is in {''.join(MARKS)}"
    if tokens.get("left_out"):
        parts[0] += f"\n{in_words(tokens['left_out'])}"
    if tokens.get("refused"):
        parts[0] += f"\n{tokens['refused']:,} of those dropped could not be written by the chat template"
    parts[0] += "".join(f"\n{text}" for text in tokens.get("no_effect", ()))
    if "rendered" in tokens:
        parts.append(tokens["rendered"])
    if recipe.tracking.cards == "rows":
        parts += ["\n".join([side, *_numbered(lines)]) for side, lines in tokens["first"].items()]
    parts.append(_lengths(tokens["lengths"], recipe.data.max_length))
    places = {"tokens": tokens["address"], "dropped": tokens.get("dropped_uri")}
    facts = {"digest": tokens["digest"], "address": tokens["address"]}
    return Card("\n\n".join([*parts, table(places)]) + "\n", counts | facts)


def _numbered(lines: Sequence[str]) -> list[str]:
    return [f"{number}  {line}" for number, line in enumerate(lines, 1)]


def _lengths(lengths: dict[str, Any], limit: int) -> str:
    """Returns how long rows are before they are cut or packed, a bar for each class of lengths."""
    head = (
        f"tokens in a row: {lengths['mean']:,.0f} on average, {lengths['longest']:,} at most; "
        f"{lengths['over']:,} of {lengths['rows']:,} rows are longer than max_length, {limit:,}"
    )
    most = max((rows for _, rows in lengths["histogram"]), default=0)
    bars = {f"up to {bound:,}": f"{'█' * -(-rows * WIDTH // most)} {rows:,}" for bound, rows in lengths["histogram"]}
    return "\n".join([head, table(bars)])
