"""A small chat model learns to stop, by a template without marks: the token that ends a turn is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from baton.models import loading
from baton.models.train_rows import IGNORED
from tests.support import tiny

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ANSWERED, ASKED, LONGEST = 200, 40, 32


def question(number: int) -> tiny.Row:
    return {"role": "user", "content": f"What is {number} and {number % 7}?"}


def answer(number: int) -> tiny.Row:
    return {"role": "assistant", "content": "It is here." if number % 2 else "The value of it is a fox."}


def base_of(folder: Path) -> str:
    """A tokenizer of the tests, and a model large enough to learn short answers."""
    base = tiny.make_base(folder)
    tokenizer = loading.load_tokenizer(base)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(base)
    return base


def share_that_stops(trained: Any, tokenizer: Any) -> float:
    """How many of the held-out questions are answered with an end within so many tokens."""
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    stopped = 0
    model = trained.model.eval()
    for number in range(ANSWERED, ANSWERED + ASKED):
        prompt = tokenizer.apply_chat_template(
            [question(number)], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        with torch.no_grad():
            written = model.generate(**prompt, max_new_tokens=LONGEST, do_sample=False, eos_token_id=end)
        stopped += int(written[0, -1]) == end
    return stopped / ASKED


@pytest.mark.parametrize("with_end", [True, False], ids=["as it is trained", "without the end"])
@pytest.mark.slow
def test_a_chat_model_learns_to_stop(with_end: bool, tmp_path: Path) -> None:
    given = tiny.recipe(
        base_of(tmp_path / "base"),
        model={"chat_template": CHATML},
        data={"train_on": "assistant"},
        training={"batch_size": 20, "max_steps": 80, "optimizer": "adamw_torch", "learning_rate": 5e-3},
    )
    rows = tiny.tokens(given, [{"messages": [question(n), answer(n)]} for n in range(ANSWERED)])
    tokenizer = loading.load_tokenizer(str(given.model.base))
    tokenizer.chat_template = CHATML
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert all([token for token in row["labels"] if token != IGNORED][-1] == end for row in rows)
    if not with_end:
        masked = [[IGNORED if token == end else token for token in row["labels"]] for row in rows]
        rows = datasets.Dataset.from_dict({"input_ids": rows["input_ids"], "labels": masked})
    trained = tiny.trainer(given, rows, tmp_path / "out")
    trained.train()
    share = share_that_stops(trained, tokenizer)
    assert share >= 0.95 if with_end else share <= 0.05
