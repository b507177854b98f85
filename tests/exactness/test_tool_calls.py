"""Rows with tools and tool calls are trained by methods of each kind, and chunks end on the bits of one run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest

from baton.models import loading, train_rows, trained
from baton.models.train_rows import IGNORED
from baton.recipe import load
from baton.recipe.recipe import Recipe
from baton.runs.run import Run

TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{% for tool in tools %}{{ tool.function.name }}({{ tool.function.parameters | "
    "tojson }})\n{% endfor %}<|im_end|>\n{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.reasoning_content or '' }}{{ message.content }}{% for call in message.tool_calls or [] %}"
    "<call>{{ call.function.name }} {{ call.function.arguments | tojson }}</call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ADD = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
FIND = {"type": "function", "function": {"name": "find", "parameters": {"properties": {"what": {"type": "string"}}}}}


def call(name: str, **arguments: Any) -> dict[str, Any]:
    """An assistant's turn that says nothing and calls a tool, as OpenAI writes it."""
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": function}],
    }


def question(number: int) -> list[dict[str, Any]]:
    """A conversation up to where the assistant is to answer; in every other one a tool was called before."""
    asked: list[dict[str, Any]] = [{"role": "user", "content": f"What is {number} and {number % 7}?"}]
    if number % 2:
        asked += [
            call("find", what=f"the value of {number}"),
            {"role": "tool", "tool_call_id": "c1", "content": "here"},
        ]
    return asked


def tools(number: int) -> dict[str, Any]:
    """Every third row declares none, the others as JSON text."""
    return {"tools": json.dumps([ADD, FIND] if number % 2 else [ADD])} if number % 3 else {}


ROWS: dict[str, Callable[[int], dict[str, Any]]] = {
    "sft": lambda n: {"messages": [*question(n), call("add", a=n)], **tools(n)},
    "dpo": lambda n: {
        "prompt": question(n),
        "chosen": [call("add", a=n)],
        "rejected": [call("add", a="fox")],
        **tools(n),
    },
    "grpo": lambda n: {"prompt": question(n), "answer": str(n), **tools(n)},
}
WRITES = {"rewards": ["length", "tests.resume.own:shortness"], "num_generations": 2, "max_completion_length": 6}
STEPS = 4


def recipe(method: str, folder: Path, base: str) -> Recipe:
    """A recipe of two chunks for rows of its method."""
    source = folder / f"{method}.jsonl"
    source.write_text("".join(json.dumps(ROWS[method](number)) + "\n" for number in range(16)), encoding="utf-8")
    own = {"grpo": WRITES} if method == "grpo" else {}
    document = {
        "name": "calls",
        "seed": 7,
        "store": str(folder / "store"),
        "model": {"base": base, "chat_template": TEMPLATE},
        "data": {"source": str(source), "max_length": 512, "train_on": "assistant", "split": {"eval": 0.2}},
        "training": {
            "method": method,
            "batch_size": 2,
            "max_steps": STEPS,
            "learning_rate": 5e-3,
            "threads": 1,
            **own,
        },
        "chunks": {"wait_for_commit": True, "keep": {"last": 99}, "count": 2},
        "evaluation": {"samples": 0},
        "tracking": {"mlflow": None},
    }
    return load.validate(document, origin=method)


def seen(run: Run, folder: Path) -> tuple[datasets.Dataset, Any]:
    """What the trainer reads of a run's rows, and the tokenizer."""
    tokens = trained.tokens_folder(run, str(folder), parts=("tokenizer", "train"))
    rows = train_rows.readable(datasets.load_from_disk(f"{tokens}/train"))
    return rows, loading.load_tokenizer(f"{tokens}/tokenizer")


@pytest.mark.parametrize("method", ROWS)
def test_chunks_of_rows_with_tool_calls_end_on_the_bits_of_one_run(
    method: str, tmp_path: Path, base_model: str, legs: Any
) -> None:
    given = recipe(method, tmp_path, base_model)
    runs = {name: legs.prepare(given, name) for name in ("whole", "parts")}
    legs.cut(runs["whole"], [STEPS])
    for run in runs.values():
        legs.train(run)

    states = {name: legs.final(run).meta.state for name, run in runs.items()}
    assert legs.steps(runs["parts"]) == [4, 2]
    assert states["parts"] == states["whole"]
    assert legs.losses(runs["parts"]) == legs.losses(runs["whole"])
    _check_rows(method, *seen(runs["whole"], tmp_path))


def _check_rows(method: str, rows: datasets.Dataset, tokenizer: Any) -> None:
    """What is trained is the call, and tools stand before the conversation where the row has some."""
    if method == "grpo":
        assert {row["tools"] and row["tools"][0]["function"]["name"] for row in rows} == {None, "add"}
        called = [message for row in rows for message in row["prompt"] if "tool_calls" in message]
        assert called
        assert all(message["tool_calls"][0]["function"]["arguments"].keys() == {"what"} for message in called)
        assert all(None not in message.values() for row in rows for message in row["prompt"])
        return
    column = "input_ids" if method == "sft" else "prompt_ids"
    texts = [tokenizer.decode(row[column]) for row in rows]
    assert any(text.startswith("<|im_start|>tools\nadd(") for text in texts)
    for row in rows:
        learned = row["chosen_ids"] if method == "dpo" else [label for label in row["labels"] if label != IGNORED]
        assert '<call>add {"a": ' in tokenizer.decode(learned)
