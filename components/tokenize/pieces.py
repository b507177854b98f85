"""Tokens in words: what each stands for, also where it is part of a character."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""A token that stands for a byte, in vocabularies of SentencePiece."""
SPACE = "▁"
"""A space in vocabularies of SentencePiece."""


def readable(data: bytes) -> str:
    """Returns bytes as text, those that are no whole character as `\\xNN`."""
    return data.decode("utf-8", "backslashreplace")


def in_bytes(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> list[bytes]:
    """Returns the bytes that each token stands for; joined they are the text."""
    added = tokenizer.added_tokens_decoder
    read = _reader(tokenizer)
    pieces: list[str] = tokenizer.convert_ids_to_tokens(list(ids))
    return [
        str(added[token]).encode() if token in added else read(token, piece)
        for token, piece in zip(ids, pieces, strict=True)
    ]


def _reader(tokenizer: PreTrainedTokenizerBase) -> Callable[[int, str], bytes]:
    """Returns what reads a token, given by its number and its name in the vocabulary."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = json.dumps(json.loads(backend.to_str())["decoder"], ensure_ascii=False) if backend else ""
    if '"ByteLevel"' in decoder:
        alphabet = _alphabet()
        return lambda _, piece: b"".join(alphabet.get(each, each.encode()) for each in piece)
    if SPACE in decoder or '"Metaspace"' in decoder:
        return lambda _, piece: _of_sentence_piece(piece)
    return lambda token, _: str(tokenizer.decode([token], clean_up_tokenization_spaces=False)).encode()


def _of_sentence_piece(piece: str) -> bytes:
    if byte := BYTE.fullmatch(piece):
        return bytes.fromhex(byte[1])
    return piece.replace(SPACE, " ").encode()


@functools.cache
def _alphabet() -> dict[str, bytes]:
    """Returns the characters that byte-level vocabularies are written in, with the byte that each stands for."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    written = {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}
    return {character: bytes([byte]) for character, byte in written.items()}
