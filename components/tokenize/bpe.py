"""A byte-level BPE tokenizer learned from the training split: the same rows give the same vocabulary."""

from __future__ import annotations

import json
from collections.abc import Iterator

from transformers import PreTrainedTokenizerFast

from baton.components.shared.models.chat_templates import CHATML
from baton.components.shared.recipe import TrainTokenizer

SPECIAL = ("<|end|>", "<|pad|>", "<|im_start|>", "<|im_end|>")


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
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(train_file), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=SPECIAL[0], pad_token=SPECIAL[1], model_max_length=max_length
    )
    fast.chat_template = CHATML
    return fast


def _texts(train_file: str) -> Iterator[str]:
    with open(train_file, encoding="utf-8") as file:
        for line in file:
            row = json.loads(line)
            for name in ("messages", "text", "prompt", "completion", "chosen", "rejected", "answer"):
                value = row.get(name, ())
                yield from [value] if isinstance(value, str) else (message["content"] for message in value)
