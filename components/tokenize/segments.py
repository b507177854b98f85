"""A side of the split in segments: each becomes one Arrow file, whichever process writes it and whenever.

Where a segment begins and ends depends on the file alone, so that what is done stays done when the stage is killed, and
any number of workers gives the same files.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.components.shared.core.errors import UserError
from baton.components.shared.models import loading
from baton.components.shared.recipe import Recipe
from baton.components.tokenize import arrow, card, encoding
from baton.components.tokenize.encoding import Row
from baton.components.tokenize.lengths import Fitting

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LEAST, MOST, SHARE = 2**20, 2**24, 64
"""Bytes of text in a segment: a 64th of the file, at least 1 MiB, at most 16 MiB, which give 16 to 64 MiB of tokens."""
BATCH_ROWS, BATCH_BYTES = 1000, 2**22
"""Lines, and bytes of them, that are tokenized at once."""


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Lines of a file.

    Attributes:
        side: `train`, `eval` or `test`.
        index: Its number within the side, from 0.
        path: The file.
        start: Where its first line begins, in bytes.
        end: Where its last line ends.
        first_line: Number of its first line, from 1.
    """

    side: str
    index: int
    path: str
    start: int
    end: int
    first_line: int

    @property
    def name(self) -> str:
        """What files made of it are called."""
        return f"{self.side}-{self.index:05d}"

    @property
    def is_all(self) -> bool:
        """Whether it is the whole file."""
        return self.start == 0 and self.end == os.path.getsize(self.path)


@dataclass(frozen=True, kw_only=True)
class Made:
    """A tokenized segment: its local files and counts.

    Attributes:
        name: The segment's.
        files: Kind → local path: `arrow` where rows are left, `dropped` where some are not.
        figures: Counts `rows`, `tokens`, `truncated`, `dropped`, the `lengths`, and of a side's first segment the
            `first` sequences; plain values.
    """

    name: str
    files: dict[str, str]
    figures: dict[str, object]


def cut(path: str, side: str) -> list[Segment]:
    """Returns the segments of a file of lines."""
    # A function of the file alone: a stage that was started again cuts the same segments, and finds by name which of
    # them are made.
    size = min(max(os.path.getsize(path) // SHARE, LEAST), MOST)
    segments: list[Segment] = []
    start, line = 0, 1
    with open(path, "rb") as file:
        while block := file.read(size):
            rest = b"" if block.endswith(b"\n") else file.readline()
            end = start + len(block) + len(rest)
            segments.append(Segment(side=side, index=len(segments), path=path, start=start, end=end, first_line=line))
            line += block.count(b"\n") + rest.count(b"\n")
            start = end
    return segments


def make(segment: Segment, recipe: Recipe, tokenizer_folder: str, folder: str) -> Made:
    """Tokenizes a segment.

    Args:
        segment: Which.
        recipe: The recipe.
        tokenizer_folder: The tokenizer's files.
        folder: Where the segment's files go.

    Raises:
        UserError: the chat template does not do, or refuses a conversation.
    """
    from jinja2 import TemplateError

    tokenizer = _tokenizer(tokenizer_folder, recipe.model.trust_remote_code)
    fitting = Fitting(recipe)
    dropped: list[dict[str, object]] = []
    try:
        batches = _fitted(segment, recipe, tokenizer, fitting, dropped)
        path = f"{folder}/{segment.name}.arrow"
        if recipe.data.packing is True or (recipe.data.packing == "best-fit" and segment.side == "train"):
            written = arrow.write_packed(path, batches, recipe.data, is_all=segment.is_all)
        else:
            written = arrow.write(path, batches)
    except TemplateError as error:
        raise UserError(
            f"the chat template refuses a conversation of the {segment.side} side: {error}.",
            remedy="Mend the data (data.quality.turns: fix drops such rows), or set model.chat_template.",
        ) from None
    files = {"arrow": path} if written.rows else {}
    if dropped:
        files["dropped"] = f"{folder}/{segment.name}.jsonl"
        with open(files["dropped"], "w", encoding="utf-8") as file:
            file.writelines(json.dumps(entry) + "\n" for entry in dropped)
    figures: dict[str, object] = {
        "rows": written.rows,
        "tokens": written.tokens,
        "truncated": fitting.truncated,
        "dropped": fitting.dropped,
        "lengths": fitting.lengths.to_json(),
    }
    if segment.index == 0 and written.rows:
        figures["first"] = card.first_sequences(path, tokenizer)
    return Made(name=segment.name, files=files, figures=figures)


@functools.cache
def _tokenizer(folder: str, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """Loads a tokenizer once in each process."""
    return loading.load_tokenizer(folder, trust_remote_code=trust_remote_code)


def _fitted(
    segment: Segment,
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerBase,
    fitting: Fitting,
    dropped: list[dict[str, object]],
) -> Iterator[list[Row]]:
    """Yields batches of rows that can be used, and notes the others."""
    encode = encoding.batch_encoder(recipe, tokenizer)
    number = segment.first_line
    for rows in _batches(segment):
        encoding.require_template(tokenizer, rows[0], recipe.data)
        batch: list[Row] = []
        for line, made in enumerate(encode(rows), number):
            for row in made:
                fitted = fitting.fit(row)
                if isinstance(fitted, str):
                    dropped.append({"file": os.path.basename(segment.path), "line": line, "reason": fitted})
                else:
                    batch.append(fitted)
        number += len(rows)
        if batch:
            yield batch


def _batches(segment: Segment) -> Iterator[list[Row]]:
    with open(segment.path, "rb") as file:
        file.seek(segment.start)
        batch: list[Row] = []
        began = at = segment.start
        while at < segment.end:
            line = file.readline()
            batch.append(json.loads(line))
            at += len(line)
            if len(batch) == BATCH_ROWS or at - began >= BATCH_BYTES:
                yield batch
                batch, began = [], at
        if batch:
            yield batch
