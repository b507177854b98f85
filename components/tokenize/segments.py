"""A side of the split in segments: each becomes one Arrow file, whichever process writes it and whenever.

Where a segment begins and ends depends on the file alone, so that what is done stays done when the stage is killed, and
any number of workers gives the same files.
"""

from __future__ import annotations

import functools
import gc
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from baton.components.shared.models import loading, packing, prompt_columns
from baton.components.shared.recipe import Recipe
from baton.components.shared.runs.formats import FORMATS
from baton.components.tokenize import arrow, card, encoding, seen
from baton.components.tokenize.encoding import Row
from baton.components.tokenize.lengths import Fitting
from baton.components.tokenize.origins import Origins
from baton.components.tokenize.refusals import Refusals

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
        files: Kind → local path: `arrow` where rows are left, `dropped` where some are not, `lines` where those left do
            not tell which lines they are of, and of a side's first segment `seen`, its first rows as the model sees
            them.
        figures: The segment's `first_line`, counts `rows`, `tokens`, `truncated`, `dropped`, those that are `refused`,
            the `lengths`, and of a side's first segment the `first` sequences; plain values.
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


def are_wide(recipe: Recipe, paths: Iterable[str]) -> bool:
    """Tells whether files have rows whose messages need `prompt_columns`: a function of all of them, as all segments
    have the same columns."""
    return recipe.training.spec.rows == "prompts" and prompt_columns.hold_more(paths)


def make(
    segment: Segment,
    recipe: Recipe,
    tokenizer_folder: str,
    folder: str,
    *,
    wide: bool = False,
    number: int = FORMATS["tokens"].number,
) -> Made:
    """Tokenizes a segment.

    Args:
        segment: Which.
        recipe: The recipe.
        tokenizer_folder: The tokenizer's files.
        folder: Where the segment's files go.
        wide: As for `arrow.write`.
        number: Of the format of tokens.

    Raises:
        UserError: there are conversations and no chat template, or a tokenizer that does not do.
    """
    tokenizer = _tokenizer(tokenizer_folder, recipe.model.trust_remote_code)
    fitting, refused = Fitting(recipe), Refusals()
    dropped: list[dict[str, object]] = []
    encode = encoding.BatchEncoder(recipe, tokenizer, number)
    origins = Origins(segment.first_line)
    batches = _fitted(segment, encode, tokenizer, fitting, refused, dropped, origins)
    path = f"{folder}/{segment.name}.arrow"
    is_packed = packing.packs(recipe.data, segment.side)
    if is_packed:
        written = arrow.write_packed(path, batches, recipe.data, is_all=segment.is_all)
    else:
        written = arrow.write(path, batches, wide=wide)
    files = {"arrow": path} if written.rows else {}
    if dropped:
        files["dropped"] = f"{folder}/{segment.name}.jsonl"
        with open(files["dropped"], "w", encoding="utf-8") as file:
            file.writelines(json.dumps(entry) + "\n" for entry in dropped)
    if segment.side == "train" and written.rows and (is_packed or not origins.are_plain):
        files["lines"] = origins.save(f"{folder}/{segment.name}.npy")
    figures: dict[str, object] = {
        "first_line": segment.first_line,
        "rows": written.rows,
        "tokens": written.tokens,
        "truncated": fitting.truncated,
        "dropped": fitting.dropped + refused.rows,
        "refused": replace(refused, told=Counter(encode.told)).to_json(),
        "lengths": fitting.lengths.to_json(),
    }
    if segment.index == 0:
        files["seen"] = f"{folder}/{segment.name}.seen.jsonl"
        with open(files["seen"], "w", encoding="utf-8") as file:
            file.writelines(
                row.model_dump_json() + "\n"
                for row in seen.first(segment.path, segment.side, recipe, tokenizer, number)
            )
    if segment.index == 0 and written.rows:
        figures["first"] = card.first_sequences(path, tokenizer)
    return Made(name=segment.name, files=files, figures=figures)


@functools.cache
def _tokenizer(folder: str, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """Loads a tokenizer once in each process."""
    tokenizer = loading.load_tokenizer(folder, trust_remote_code=trust_remote_code)
    gc.freeze()  # each collection would look at all that is imported, and batches of rows make many
    return tokenizer


def _fitted(
    segment: Segment,
    encode: encoding.BatchEncoder,
    tokenizer: PreTrainedTokenizerBase,
    fitting: Fitting,
    refused: Refusals,
    dropped: list[dict[str, object]],
    origins: Origins,
) -> Iterator[list[Row]]:
    """Yields batches of rows that can be used, and notes the others."""
    number = segment.first_line

    def drop(line: int, reason: str) -> None:
        dropped.append({"file": os.path.basename(segment.path), "line": line, "reason": reason})

    for rows in _batches(segment):
        encoding.require_template(tokenizer, rows[0])
        batch: list[Row] = []
        for line, made in enumerate(encode(rows), number):
            if isinstance(made, str):
                refused.add(os.path.basename(segment.path), line, made)
                drop(line, made)
                continue
            for row in made:
                fitted = fitting.fit(row)
                if isinstance(fitted, str):
                    drop(line, fitted)
                else:
                    batch.append(fitted)
                    origins.add(line, fitted)
        number += len(rows)
        refused.of += len(rows)
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
