"""Tokens without their places are those that a call of the tokenizer gives."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from baton.data.encoding import ids_of

TEXTS = ["", "one two three", " leading", "naïve 🙂 日本語", "a\u0000b\r\n\tc", "<s>one</s> two", "x" * 300, "One TWO"]
LETTERS = sorted({letter for text in TEXTS for letter in text.lower()} | {"▁"})


class Shouting(PreTrainedTokenizerFast):
    """A tokenizer with code of its own."""

    def _encode_plus(self, text: Any, *args: Any, **kwargs: Any) -> Any:
        return super()._encode_plus([each.upper() for each in text], *args, **kwargs)


def _words() -> Tokenizer:
    words = ["<unk>", "<s>", "</s>", "one", "two", "three", "leading", "ONE", "TWO", "One"]
    tokenizer = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return tokenizer


def _unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram([("<unk>", 0.0), *((letter, -2.0) for letter in LETTERS)], unk_id=0))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


KINDS = {"words": _words, "unigram": _unigram}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("own", [PreTrainedTokenizerFast, Shouting])
@pytest.mark.parametrize("settings", [{}, {"split_special_tokens": True}, {"padding_side": "left"}])
def test_they_are_those_of_a_call(kind: str, own: type[PreTrainedTokenizerFast], settings: dict[str, Any]) -> None:
    tokenizer = own(
        tokenizer_object=KINDS[kind](),
        bos_token="<s>",
        eos_token="</s>",
        pad_token="</s>",
        model_max_length=8,
        **settings,
    )
    by_call = tokenizer(TEXTS)["input_ids"]
    for before in ({}, {"truncation": True, "max_length": 2}, {"padding": "max_length", "max_length": 400}):
        tokenizer(TEXTS[:2], **before)  # what the library was told last
        assert ids_of(tokenizer, TEXTS) == by_call
    assert [ids_of(tokenizer, [text])[0] for text in TEXTS] == by_call
