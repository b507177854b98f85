"""A byte-level BPE tokenizer learned from the training split: the same rows give the same vocabulary."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from baton.components.shared.models import own_tokenizer
from baton.components.shared.models.chat_templates import CHATML, OWN_TOKENS
from baton.components.shared.recipe import Recipe, TrainTokenizer


def train(train_file: str, spec: TrainTokenizer, max_length: int) -> PreTrainedTokenizerFast:
    """Trains a tokenizer.

    Args:
        train_file: The training split as JSON lines.
        spec: Size of the vocabulary and minimum frequency.
        max_length: Longest sequence in tokens, kept as the tokenizer's own limit.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=spec.vocab_size,
        min_frequency=spec.min_frequency,
        special_tokens=list(OWN_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(train_file), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=OWN_TOKENS[0], pad_token=OWN_TOKENS[1], model_max_length=max_length
    )
    fast.chat_template = CHATML
    return fast


def of_run(recipe: Recipe, base: str | None, train_file: str) -> PreTrainedTokenizerBase:
    """Returns the tokenizer of a run: trained here where its recipe asks for it, and changed as it says.

    Args:
        recipe: The recipe.
        base: Local files of `model.base`.
        train_file: The training split as JSON lines.

    Raises:
        UserError: see `own_tokenizer.make`.
    """
    spec = recipe.model.tokenizer
    learned = train(train_file, spec.train, recipe.data.max_length) if spec and spec.train else None
    return own_tokenizer.make(recipe, base, learned)


def _texts(train_file: str) -> Iterator[str]:
    with open(train_file, encoding="utf-8") as file:
        for line in file:
            row = json.loads(line)
            for name in ("messages", "text", "prompt", "completion", "chosen", "rejected", "answer"):
                value = row.get(name, ())
                yield from [value] if isinstance(value, str) else (text for turn in value for text in _said(turn))


def _said(message: dict[str, Any]) -> Iterator[str]:
    yield message["content"]
    if "reasoning_content" in message:
        yield message["reasoning_content"]
    for call in message.get("tool_calls", ()):
        yield json.dumps(call["function"], ensure_ascii=False)
