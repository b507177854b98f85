"""First rows as the model sees them, with the trained and the cut part, for `baton data show` and tokenize's card."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Any

from transformers import PreTrainedTokenizerBase

from baton.data import encoding
from baton.data.encoding import Ids, Row, each
from baton.data.fitting import Fitting, left_out_in_words
from baton.data.rows import SIDES
from baton.errors import RowError
from baton.models import generate, train_rows
from baton.pages.card import Card, table, visible
from baton.recipe.recipe import Recipe
from baton.runs.documents import PreviewRow, SourceLocation, Token, TokenSpan
from baton.runs.versions import FORMATS

BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # a token for a byte, in vocabularies of SentencePiece
SPACE = "▁"  # a space in vocabularies of SentencePiece


def readable(data: bytes) -> str:
    """Returns bytes as text, incomplete characters as `\\xNN`."""
    return data.decode("utf-8", "backslashreplace")


def bytes_of_tokens(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> list[bytes]:
    """Returns the bytes of each token; joined they are the text."""
    added = tokenizer.added_tokens_decoder
    read = _reader(tokenizer)
    pieces: list[str] = tokenizer.convert_ids_to_tokens(list(ids))
    return [
        str(added[token]).encode() if token in added else read(token, piece)
        for token, piece in zip(ids, pieces, strict=True)
    ]


def _reader(tokenizer: PreTrainedTokenizerBase) -> Callable[[int, str], bytes]:
    """Returns a function from a token's number and name in the vocabulary to its bytes."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = json.dumps(json.loads(backend.to_str())["decoder"], ensure_ascii=False) if backend else ""
    if '"ByteLevel"' in decoder:
        alphabet = _alphabet()
        return lambda _, piece: b"".join(alphabet.get(each, each.encode()) for each in piece)
    if SPACE in decoder or '"Metaspace"' in decoder:

        def of_sentence_piece(_: int, piece: str) -> bytes:
            byte = BYTE.fullmatch(piece)
            return bytes.fromhex(byte[1]) if byte else piece.replace(SPACE, " ").encode()

        return of_sentence_piece
    return lambda token, _: str(tokenizer.decode([token], clean_up_tokenization_spaces=False)).encode()


@functools.cache
def _alphabet() -> dict[str, bytes]:
    """Returns the characters that byte-level vocabularies are written in, with their bytes."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    written = {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}
    return {character: bytes([byte]) for character, byte in written.items()}


FIRST = 3  # rows of a side that the tokenize stage keeps
MOST, AROUND_TRAINED = 800, 20
"""Tokens of such a row, at most, and tokens shown before training begins where that is far from the beginning."""


@dataclass(frozen=True)
class TokenSequence:
    """Tokens of a row, and whether each is learned from; `part` is as in `PreviewRow`."""

    part: str
    ids: Ids
    trained: list[bool]


def preview_rows(
    rows: Iterable[tuple[SourceLocation, str | None, Row]],
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerBase,
    most: int | None = None,
    number: int = FORMATS["tokens"].number,
) -> Iterator[PreviewRow]:
    """Yields rows of the split, given with place and side, as the model sees them.

    `most` limits the shown tokens of a sequence, half of them from where training begins; None shows all.
    """
    encode = encoding.BatchEncoder(recipe, tokenizer, number)
    for place, side, row in rows:
        encoding.require_template(tokenizer, row)
        (made,) = encode([row])
        if isinstance(made, RowError):
            yield PreviewRow(source=place, side=side, text=json.dumps(row, ensure_ascii=False), rejected=str(made))
            continue
        for encoded in made:
            (fitted,) = each(Fitting(recipe).fit, [encoded])
            base = PreviewRow(
                source=place,
                side=side,
                label=encoded.get("label"),
                columns={name: value for name, value in encoded.items() if isinstance(value, str) and name != "prompt"},
                rejected=str(fitted) if isinstance(fitted, RowError) else None,
            )
            for sequence in _sequences(encoded, tokenizer):
                yield _preview_of(sequence, base, recipe, tokenizer, most or len(sequence.ids))


def first_previews(
    path: str, side: str, recipe: Recipe, tokenizer: PreTrainedTokenizerBase, number: int = FORMATS["tokens"].number
) -> list[PreviewRow]:
    """Returns the first rows of a file of the split; of long ones a part."""
    with open(path, encoding="utf-8") as file:
        lines = list(islice(file, FIRST))
    rows = ((SourceLocation(file=f"{side}.jsonl", line=at), side, json.loads(line)) for at, line in enumerate(lines, 1))
    return list(preview_rows(rows, recipe, tokenizer, MOST, number))


def _sequences(encoded: Row, tokenizer: PreTrainedTokenizerBase) -> Iterator[TokenSequence]:
    if "labels" in encoded:
        yield TokenSequence("", encoded["input_ids"], [label != train_rows.IGNORED for label in encoded["labels"]])
        return
    answers = [name for name in encoding.id_columns(encoded) if name != "prompt_ids"]
    if not answers:  # the model writes them itself
        text = generate.rendered(encoded["prompt"], tokenizer, encoded.get("tools"))
        ids = generate.prompt_ids(tokenizer, text, max(int(encoded["length"]), 1))
        yield TokenSequence("prompt", ids, [False] * len(ids))
    prompt = encoded.get("prompt_ids")
    for name in answers:
        # If the prompt is in the answers, a score of the whole is learned.
        trained = [False] * len(prompt or ()) + [prompt is not None] * len(encoded[name])
        yield TokenSequence(name.removesuffix("_ids"), [*(prompt or ()), *encoded[name]], trained)


def _preview_of(
    sequence: TokenSequence, base: PreviewRow, recipe: Recipe, tokenizer: PreTrainedTokenizerBase, most: int
) -> PreviewRow:
    length = len(sequence.ids)
    # Joining loses no tokens.
    kept = length if recipe.data.packing is True else min(length, recipe.data.max_length)
    trained = [each and at < kept and base.rejected is None for at, each in enumerate(sequence.trained)]
    begins = trained.index(True) if any(trained) else 0
    tokens: list[Token] = []
    spans: list[TokenSpan] = []
    for start, end in _windows(length, begins, most):
        if start > sum(span.tokens for span in spans):
            spans.append(TokenSpan(text="", tokens=start - sum(span.tokens for span in spans), left_out=True))
        words = bytes_of_tokens(sequence.ids[start:end], tokenizer)
        each = list(zip(sequence.ids[start:end], words, trained[start:end], strict=True))
        tokens += [Token(id=token, text=readable(word), trained=is_trained) for token, word, is_trained in each]
        spans += _spans(words, trained[start:end], kept - start)
    if rest := length - sum(span.tokens for span in spans):
        spans.append(TokenSpan(text="", tokens=rest, left_out=True))
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
    """Returns the shown parts of a sequence: its beginning, and where training begins if that is further."""
    if length <= most:
        return [(0, length)]
    if begins < most // 2:
        return [(0, most)]
    start = max(begins - AROUND_TRAINED, most // 2)
    return [(0, most // 2), (start, min(length, start + most // 2))]


def _spans(words: list[bytes], trained: list[bool], kept: int) -> Iterator[TokenSpan]:
    each = zip(words, trained, (at >= kept for at in range(len(words))), strict=True)
    for (is_trained, is_cut), group in groupby(each, key=lambda entry: entry[1:]):
        parts = [word for word, *_ in group]
        yield TokenSpan(text=readable(b"".join(parts)), tokens=len(parts), trained=is_trained, cut=is_cut)


TokenRow = dict[str, Any]
SHOWN = 3  # sequences shown of a side
HEAD, AROUND, LONGEST = 200, 20, 2000
"""Tokens from a sequence's beginning and from where training begins in it, tokens before that, and characters."""
MARKS = ("⟦", "⟧")  # around trained text
WIDTH = 40  # characters of the longest bar


def first_sequences(path: str, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Returns the first rows of an Arrow file in words, trained parts in marks, and reads no more than these."""
    import pyarrow as pa

    with pa.memory_map(path) as file, pa.ipc.open_stream(file) as reader:
        rows: list[TokenRow] = reader.read_next_batch().slice(0, SHOWN).to_pylist()
    return [_row_in_words(row, tokenizer) for row in rows]


def _row_in_words(row: TokenRow, tokenizer: PreTrainedTokenizerBase) -> str:
    if "input_ids" in row:
        return _sequence_in_words(row["input_ids"], [label != train_rows.IGNORED for label in row["labels"]], tokenizer)
    columns = [name for name in row if name.endswith("_ids")]
    if not columns:  # the model writes the answers itself
        if not isinstance(row["prompt"], str):
            row = {name: each[0] for name, each in train_rows.restored({x: [y] for x, y in row.items()}).items()}
        return f"prompt {visible(generate.rendered(row['prompt'], tokenizer, row.get('tools')), LONGEST)}"
    told = []
    for name in columns:
        # With a prompt of its own the answers are trained; with the prompt in both, a score of the whole.
        is_trained = "prompt_ids" in columns and name != "prompt_ids"
        told.append(
            f"{name.removesuffix('_ids')} {_sequence_in_words(row[name], [is_trained] * len(row[name]), tokenizer)}"
        )
    return " | ".join([*told, *([f"label {row['label']}"] if "label" in row else [])])


def _sequence_in_words(ids: Sequence[int], trained: Sequence[bool], tokenizer: PreTrainedTokenizerBase) -> str:
    begins = next((at for at, is_trained in enumerate(trained) if is_trained), 0)
    spans = [(0, HEAD)] if begins < HEAD else [(0, HEAD - AROUND), (begins - AROUND, begins + HEAD)]
    words = " … ".join("".join(_marked(ids[a:b], trained[a:b], tokenizer)) for a, b in spans)
    rest = len(ids) - spans[-1][1]
    return f"{visible(words, LONGEST)}{' …' if rest > 0 else ''} ({len(ids):,} tokens)"


def _marked(ids: Sequence[int], trained: Sequence[bool], tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    for is_trained, group in groupby(zip(ids, trained, strict=True), key=lambda pair: pair[1]):
        text = str(tokenizer.decode([token for token, _ in group], clean_up_tokenization_spaces=False))
        yield f"{MARKS[0]}{text}{MARKS[1]}" if is_trained else text


def tokens_card(recipe: Recipe, tokens: dict[str, Any]) -> Card:
    counts = {name: tokens.get(name, 0) for name in (*SIDES, "tokens", "steps", "truncated", "dropped")}
    sides = " · ".join(f"{side} {counts[side]:,}" for side in SIDES)
    parts = [
        f"{sides} sequences\n{counts['tokens']:,} tokens to train on in {counts['steps']:,} steps, "
        f"{counts['truncated']:,} rows truncated, {counts['dropped']:,} dropped"
    ]
    if recipe.tracking.cards == "rows":
        parts[0] += f"; trained text is in {''.join(MARKS)}"
    if tokens.get("left_out"):
        parts[0] += f"\n{left_out_in_words(tokens['left_out'])}"
    if tokens.get("refused"):
        parts[0] += f"\n{tokens['refused']:,} dropped rows do not fit the chat template"
    parts[0] += "".join(f"\n{text}" for text in tokens.get("no_effect", ()))
    if "rendered" in tokens:
        parts.append(tokens["rendered"])
    if recipe.tracking.cards == "rows":
        for side, lines in tokens["first"].items():
            parts.append("\n".join([side, *(f"{number}  {line}" for number, line in enumerate(lines, 1))]))
    parts.append(_lengths(tokens["lengths"], recipe.data.max_length))
    places = {"tokens": tokens["address"], "dropped": tokens.get("dropped_uri")}
    facts = {"digest": tokens["digest"], "address": tokens["address"]}
    return Card("\n\n".join([*parts, table(places)]) + "\n", counts | facts)


def _lengths(lengths: dict[str, Any], limit: int) -> str:
    head = (
        f"tokens in a row: {lengths['mean']:,.0f} on average, {lengths['longest']:,} at most; "
        f"{lengths['over']:,} of {lengths['rows']:,} rows are longer than max_length, {limit:,}"
    )
    most = max((rows for _, rows in lengths["histogram"]), default=0)
    bars = {f"up to {bound:,}": f"{'█' * -(-rows * WIDTH // most)} {rows:,}" for bound, rows in lengths["histogram"]}
    return "\n".join([head, table(bars)])
