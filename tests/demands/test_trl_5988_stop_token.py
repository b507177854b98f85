"""A fine-tuned chat model never stops: it was not trained on the token that ends its turn.

Issue: https://github.com/huggingface/trl/pull/5988
Upstream: reproduced. TRL's own templates are fixed. For another template, whose `{% generation %}` mark closes before
    the end of the turn, TRL 1.16 warns and trains without the token.
Baton: trains the assistant's text and the token that ends it, with or without marks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pytest
from trl import SFTConfig, SFTTrainer

from baton.models import loading
from baton.models.train_rows import IGNORED
from tests.support import tiny

MARKED = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\\n' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}"
    "{{ '<|eot|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
TALK = [
    {"role": "user", "content": "What is 3 and 4?"},
    {"role": "assistant", "content": "It is 7."},
    {"role": "user", "content": "And 5?"},
    {"role": "assistant", "content": "It is 12."},
]
OWN = "It is 7.It is 12."


@pytest.fixture(scope="module")
def marked(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A chat model whose template marks what the assistant says, without the end."""
    return tiny.make_chat_base(tmp_path_factory.mktemp("marked") / "base", MARKED)


def test_upstream_trains_without_the_end(marked: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = loading.load_tokenizer(marked)
    config = SFTConfig(str(tmp_path), report_to="none", use_cpu=True, max_length=200, assistant_only_loss=True)
    data = datasets.Dataset.from_list([{"messages": TALK}])
    trainer: Any = SFTTrainer(loading.load_model(marked), config, train_dataset=data, processing_class=tokenizer)
    row = trainer.train_dataset[0]
    trained = [token for token in row["labels"] if token != IGNORED]
    assert tokenizer.decode(trained) == OWN
    assert tokenizer.convert_tokens_to_ids("<|eot|>") in row["input_ids"]
    assert "the model may not learn to stop" in caplog.text


@pytest.mark.parametrize("template", [MARKED, tiny.CHAT], ids=["marked", "unmarked"])
def test_baton_trains_the_end(template: str, tmp_path: Path) -> None:
    base = tiny.make_chat_base(tmp_path / "base", template)
    tokenizer = loading.load_tokenizer(base)
    recipe = tiny.recipe(base, data={"train_on": "assistant", "max_length": 200})
    (row,) = tiny.tokens(recipe, [{"messages": TALK}])
    assert row["input_ids"] == tokenizer.apply_chat_template(TALK, tokenize=True, return_dict=True)["input_ids"]
    trained = [token for token in row["labels"] if token != IGNORED]
    assert tokenizer.decode(trained) == "It is 7.<|eot|>It is 12.<|eot|>"
