"""The methods whose model generates render each prompt with the tools of its row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pytest

from baton.models import loading
from tests.support import tiny

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}{% for message in messages %}{{ message.role }}: "
    "{{ message.content }} {% for call in message.tool_calls or [] %}{{ call.function.name }}"
    "({{ call.function.arguments | tojson }}){% endfor %};{% endfor %}{% if add_generation_prompt %}: {% endif %}"
)
AS_TEXT = TEMPLATE.replace("{{ call.function.arguments | tojson }}", "{{ '' + call.function.arguments }}")
"""A template that takes arguments as JSON text alone."""
ADD = {"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}}}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
ASK = {"role": "user", "content": "1+1?"}
ROWS: list[dict[str, Any]] = [
    {"prompt": [ASK], "tools": [ADD]},
    {"prompt": [ASK, {"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "2"}]},
]


@pytest.mark.parametrize("method", ["grpo", "rloo", "distillation"])
@pytest.mark.parametrize("template", [TEMPLATE, AS_TEXT], ids=["objects", "text"])
def test_a_prompt_is_rendered_with_its_tools(method: str, template: str, tiny_base: str, tmp_path: Path) -> None:
    own = {"teacher": tiny_base} if method == "distillation" else {"rewards": ["length"], "num_generations": 2}
    own |= {"max_completion_length": 2}
    batch_size = 2 if method == "distillation" else 4  # both prompts in one step
    tokenizer = loading.load_tokenizer(tiny_base)
    tokenizer.chat_template = template
    base = str(tmp_path / "base")
    loading.load_model(tiny_base).save_pretrained(base)
    tokenizer.save_pretrained(base)
    recipe = tiny.recipe(
        base,
        training={"method": method, method: own, "batch_size": batch_size, "max_steps": 1},
        data={"max_length": 512},
    )
    rows = list(tiny.tokens(recipe, [{**row, "tools": row.get("tools")} for row in ROWS]))
    trainer = tiny.trainer(recipe, datasets.Dataset.from_list(rows), tmp_path / "out")
    rendered: list[list[int]] = []
    tokenize = trainer._tokenize_prompts

    def tokenized(prompts: list[Any]) -> Any:
        found = tokenize(prompts)
        rendered.extend(found[0])
        return found

    trainer._tokenize_prompts = tokenized
    trainer.train()

    shown = {tokenizer.decode(ids) for ids in rendered}
    assert {len(ids) for ids in rendered} == {row["length"] for row in rows}
    assert len(shown) == 2
    (with_tools,) = (text for text in shown if text.startswith('[{"type": "function", "function": {"name": "add"'))
    assert with_tools.endswith("user: 1+1? ;: ")
    assert 'user: 1+1? ;assistant:  add({"a": 1});tool: 2 ;: ' in shown
