"""From texts to tokens, and from characters of a rendering to its tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import BatchEncoding, PreTrainedTokenizerBase

Span = tuple[int, int]


def ids_of(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    """Returns the tokens of texts with the special ones that the tokenizer adds: what a call of it gives.

    Where the tokenizer has no code of its own the library encodes all but the first without their places, which take it
    a third of the time. The first goes by the tokenizer, which tells the library whether to cut and to pad.
    """
    options = {"return_attention_mask": False, "return_token_type_ids": False, "verbose": False}
    by_call: list[list[int]]
    if not _is_plain(tokenizer):
        by_call = tokenizer(texts, **options)["input_ids"]
        return by_call
    by_call = tokenizer(texts[:1], **options)["input_ids"]
    library = tokenizer.backend_tokenizer  # type: ignore[attr-defined]
    return by_call + [encoding.ids for encoding in library.encode_batch_fast(texts[1:], add_special_tokens=True)]


def _is_plain(tokenizer: PreTrainedTokenizerBase) -> bool:
    from transformers import PreTrainedTokenizerFast

    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return False
    own = type(tokenizer)
    return all(
        getattr(own, name) is getattr(PreTrainedTokenizerFast, name)
        for name in ("__call__", "_encode_plus", "set_truncation_and_padding")
    )


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
