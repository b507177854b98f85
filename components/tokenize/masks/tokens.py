"""From characters of a rendering to its tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import BatchEncoding, PreTrainedTokenizerBase

Span = tuple[int, int]


def encoded(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> BatchEncoding:
    """Returns the tokens of renderings, which hold their special tokens."""
    from transformers import BatchEncoding

    if not texts:
        return BatchEncoding({"input_ids": []})
    return tokenizer(
        texts, add_special_tokens=False, return_attention_mask=False, return_token_type_ids=False, verbose=False
    )


def tokens_of(encoding: BatchEncoding, index: int, text: str, span: Span, count: int) -> Span:
    """Returns the tokens that a span of a text is, the last one excluded.

    A token that reaches over the beginning is not among them, unless it only brings white space to the first word; one
    that reaches over the end is if it only brings white space along.
    """
    start, end = span
    first, last = token_at(encoding, index, text, start, count), token_at(encoding, index, text, end, count)
    places = encoding[index]
    if first < count and (reach := places.token_to_chars(first)) and reach[0] < start:
        first += bool(text[reach[0] : start].strip() or not text[start : reach[1]].strip())
    if last < count and (over := places.token_to_chars(last)) and over[0] < end and not text[end : over[1]].strip():
        last += 1
    return first, max(first, last)


def token_at(encoding: BatchEncoding, index: int, text: str, at: int, count: int) -> int:
    """Returns the first token of a character, or of the next one that has any."""
    places = encoding[index]
    while at < len(text):
        token: int | None = places.char_to_token(at)
        if token is not None:
            return token
        at += 1
    return count
