"""Rows as the model sees them: their tokens, what is trained, and what is cut."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby, islice
from typing import TYPE_CHECKING

from baton.components.shared.core.labels import IGNORED
from baton.components.shared.models import generation
from baton.components.shared.recipe import Recipe
from baton.components.shared.runs.documents.rows import Place, SeenRow, Span, Token
from baton.components.shared.runs.formats import FORMATS
from baton.components.tokenize import encoding, pieces
from baton.components.tokenize.lengths import Fitting
from baton.components.tokenize.masks.answers import Ids, Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FIRST = 3
"""Rows of a side that the tokenize stage keeps."""
MOST, AROUND = 800, 20
"""Tokens of such a row, at most, and of these before training begins where that is far from the beginning."""


@dataclass(frozen=True)
class Sequence:
    """A sequence of a row.

    Attributes:
        part: Which it is; see `SeenRow`.
        ids: Its tokens.
        trained: Whether each is learned from.
    """

    part: str
    ids: Ids
    trained: list[bool]


def see(
    rows: Iterable[tuple[Place, str | None, Row]],
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerBase,
    most: int | None = None,
    number: int = FORMATS["tokens"].number,
) -> Iterator[SeenRow]:
    """Yields rows of the split as the model sees them.

    Args:
        rows: Each with its place and side.
        recipe: The recipe.
        tokenizer: The run's.
        most: Tokens of a sequence that are shown, half of them from where training begins; all when None.
        number: Of the format of tokens.

    Raises:
        UserError: there is no chat template that does.
    """
    encode = encoding.BatchEncoder(recipe, tokenizer, number)
    for place, side, row in rows:
        encoding.require_template(tokenizer, row)
        (made,) = encode([row])
        if isinstance(made, str):
            yield SeenRow(source=place, side=side, text=json.dumps(row, ensure_ascii=False), rejected=made)
            continue
        for encoded in made:
            fitted = Fitting(recipe).fit(encoded)
            base = SeenRow(
                source=place,
                side=side,
                label=encoded.get("label"),
                columns={name: value for name, value in encoded.items() if isinstance(value, str) and name != "prompt"},
                rejected=fitted if isinstance(fitted, str) else None,
            )
            for sequence in _sequences(encoded, tokenizer):
                yield _in_words(sequence, base, recipe, tokenizer, most or len(sequence.ids))


def first(
    path: str, side: str, recipe: Recipe, tokenizer: PreTrainedTokenizerBase, number: int = FORMATS["tokens"].number
) -> list[SeenRow]:
    """Returns the first rows of a file of the split; of long ones a part."""
    with open(path, encoding="utf-8") as file:
        lines = list(islice(file, FIRST))
    rows = ((Place(file=f"{side}.jsonl", line=at), side, json.loads(line)) for at, line in enumerate(lines, 1))
    return list(see(rows, recipe, tokenizer, MOST, number))


def _sequences(encoded: Row, tokenizer: PreTrainedTokenizerBase) -> Iterator[Sequence]:
    """Yields the sequences of a row that a method learns from."""
    if "labels" in encoded:
        yield Sequence("", encoded["input_ids"], [label != IGNORED for label in encoded["labels"]])
        return
    answers = [name for name in encoding.id_columns(encoded) if name != "prompt_ids"]
    if not answers:  # the model writes them itself
        text = generation.rendered(encoded["prompt"], tokenizer, encoded.get("tools"))
        ids = generation.prompt_ids(tokenizer, text, max(int(encoded["length"]), 1))
        yield Sequence("prompt", ids, [False] * len(ids))
    prompt = encoded.get("prompt_ids")
    for name in answers:
        # Where the prompt is in the answers, a score of the whole is learned.
        trained = [False] * len(prompt or ()) + [prompt is not None] * len(encoded[name])
        yield Sequence(name.removesuffix("_ids"), [*(prompt or ()), *encoded[name]], trained)


def _in_words(
    sequence: Sequence, base: SeenRow, recipe: Recipe, tokenizer: PreTrainedTokenizerBase, most: int
) -> SeenRow:
    length = len(sequence.ids)
    # Of what is packed by joining, nothing is lost.
    kept = length if recipe.data.packing is True else min(length, recipe.data.max_length)
    trained = [each and at < kept and base.rejected is None for at, each in enumerate(sequence.trained)]
    begins = trained.index(True) if any(trained) else 0
    tokens: list[Token] = []
    spans: list[Span] = []
    for start, end in _windows(length, begins, most):
        if start > sum(span.tokens for span in spans):
            spans.append(Span(text="", tokens=start - sum(span.tokens for span in spans), left_out=True))
        words = pieces.in_bytes(sequence.ids[start:end], tokenizer)
        each = list(zip(sequence.ids[start:end], words, trained[start:end], strict=True))
        tokens += [Token(id=token, text=pieces.readable(word), trained=is_trained) for token, word, is_trained in each]
        spans += _spans(words, trained[start:end], kept - start)
    if rest := length - sum(span.tokens for span in spans):
        spans.append(Span(text="", tokens=rest, left_out=True))
    found: dict[str, object] = {
        "part": sequence.part,
        "text": "".join(" … " if span.left_out else span.text for span in spans),
        "tokens": tokens,
        "length": length,
        "kept": kept,
        "learned": sum(trained),
        "spans": spans,
    }
    return base.model_copy(update=found)


def _windows(length: int, begins: int, most: int) -> list[tuple[int, int]]:
    """Returns the parts of a sequence that are shown: its beginning, and where training begins if that is further."""
    if length <= most:
        return [(0, length)]
    if begins < most // 2:
        return [(0, most)]
    start = max(begins - AROUND, most // 2)
    return [(0, most // 2), (start, min(length, start + most // 2))]


def _spans(words: list[bytes], trained: list[bool], kept: int) -> Iterator[Span]:
    each = zip(words, trained, (at >= kept for at in range(len(words))), strict=True)
    for (is_trained, is_cut), group in groupby(each, key=lambda entry: entry[1:]):
        parts = [word for word, *_ in group]
        yield Span(text=pieces.readable(b"".join(parts)), tokens=len(parts), trained=is_trained, cut=is_cut)
