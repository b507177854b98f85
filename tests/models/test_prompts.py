"""Held-out rows as prompts and references, for each shape of row and either side."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from baton.models import loading, metrics
from baton.models.prompts import held_out_prompts, judged_side
from baton.runs.run import Run
from baton.store import bundle
from baton.store.storage import Storage
from tests.support import tiny

ROOT = Path(__file__).parents[2]
RECIPES, BUILTIN = ROOT / "pipelines/recipes", ROOT / "baton/data/builtin"
CHAT = [{"role": "user", "content": "2 and 2?"}, {"role": "assistant", "content": "4"}]
ASKED = "<|im_start|>user\n2 and 2?<|im_end|>\n<|im_start|>assistant\n"

SHAPES: dict[str, tuple[str, dict[str, Any], tuple[str, str]]] = {
    "completion": ("sft", {"prompt": "2 and 2?", "completion": "4"}, ("2 and 2?|", "4")),
    "text": ("sft", {"text": "abcdef"}, ("ab", "cdef")),
    "messages": ("sft", {"messages": CHAT}, (ASKED, "4")),
    "pair": ("dpo", {"prompt": "2 and 2?", "chosen": "4", "rejected": "5"}, ("2 and 2?|", "4")),
    "chat pair": ("dpo", {"prompt": CHAT[:1], "chosen": CHAT[1:], "rejected": CHAT[1:]}, (ASKED, "4")),
    "good answer": ("kto", {"prompt": "2 and 2?", "completion": "4", "label": True}, ("2 and 2?|", "4")),
    "bad answer": ("kto", {"prompt": "2 and 2?", "completion": "5", "label": False}, ("2 and 2?|", "")),
    "bare prompt": ("grpo", {"prompt": "2 and 2?"}, ("2 and 2?|", "")),
    "prompt with an answer": ("grpo", {"prompt": CHAT[:1], "answer": "4"}, (ASKED, "4")),
}


def run_with(folder: Path, **sides: list[dict[str, Any]]) -> Run:
    """Makes a run with a split of given rows."""
    storage, files = Storage(str(folder / "store")), folder / "files"
    files.mkdir(parents=True)
    for side, rows in sides.items():
        (files / f"{side}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    bundle.publish(storage, "data/d/split", str(files), kind="split", meta={})
    run = Run(storage, "r")
    run.put("data.json", {"digest": "d"})
    return run


def recipe_of(base: str, method: str) -> Any:
    """Returns a recipe of a method, with a separator that shows."""
    writes = {"rewards": ["length"], "num_generations": 2, "max_completion_length": 6}
    own = {method: writes} if method == "grpo" else {}
    return tiny.recipe(base, training={"method": method, **own}, data={"separator": "|"})


@pytest.mark.parametrize(("method", "row", "expected"), SHAPES.values(), ids=SHAPES)
def test_rows_as_prompt_and_reference(
    method: str, row: dict[str, Any], expected: tuple[str, str], tiny_base: str, tmp_path: Path
) -> None:
    recipe, tokenizer = recipe_of(tiny_base, method), loading.load_tokenizer(tiny_base)
    assert held_out_prompts(run_with(tmp_path, eval=[row]), recipe, tokenizer, 3) == [expected]


SYSTEM = "<s><|system|>\nBe brief.<|eot|>"
TURN = f"{SYSTEM}<|user|>\n2 and 2?<|eot|><|assistant|>\n"


@pytest.mark.parametrize(("method", "row", "expected"), SHAPES.values(), ids=SHAPES)
def test_a_chat_model_is_asked_as_it_was_trained(
    method: str, row: dict[str, Any], expected: tuple[str, str], chat_base: str, tmp_path: Path
) -> None:
    given = recipe_of(chat_base, method)
    given = given.model_copy(update={"data": given.data.model_copy(update={"system": "Be brief."})})
    prompt = expected[0] if "text" in row else TURN
    asked = held_out_prompts(run_with(tmp_path, eval=[row]), given, loading.load_tokenizer(chat_base), 3)
    assert asked == [(prompt, expected[1])]


def test_tools_are_rendered_before_the_prompt(chat_base: str, tmp_path: Path) -> None:
    tokenizer = loading.load_tokenizer(chat_base)
    tokenizer.chat_template = "{{ tools | map(attribute='function') | map(attribute='name') | join }}" + tiny.CHAT
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    for row in ({"messages": CHAT, "tools": tools}, {"prompt": CHAT[:1], "tools": tools, "answer": "4"}):
        method = "sft" if "messages" in row else "grpo"
        ((prompt, reference),) = held_out_prompts(
            run_with(tmp_path / method, eval=[row]), recipe_of(chat_base, method), tokenizer, 3
        )
        assert prompt.startswith("add<s><|user|>")
        assert reference == "4"


def test_exact_match_counts_tool_calls(chat_base: str, tmp_path: Path) -> None:
    """The reference is the call as the template writes it; other arguments and words in its place do not match."""
    tokenizer = loading.load_tokenizer(chat_base)
    template = (RECIPES / "smollm2-tools.jinja").read_text(encoding="utf-8")
    tokenizer.chat_template = template.replace("<|im_end|>", "<|eot|>")  # special in this tokenizer
    row = json.loads((BUILTIN / "tools.jsonl").read_text(encoding="utf-8").splitlines()[0])
    ((prompt, call),) = held_out_prompts(run_with(tmp_path, eval=[row]), recipe_of(chat_base, "sft"), tokenizer, 3)
    assert prompt.endswith("What is the weather like in Lisbon?<|eot|>\n<|im_start|>assistant\n")
    assert json.loads(call.removeprefix("<tool_call>").removesuffix("</tool_call>")) == {
        "name": "get_weather", "arguments": {"city": "Lisbon"},
    }  # fmt: skip
    written = [call, call.replace("Lisbon", "Porto"), "It is sunny in Lisbon.", ""]
    assert metrics.exact_match(written, [call] * 4).figures["exact_match"].each == [1.0, 0.0, 0.0, 0.0]


def test_the_first_rows_of_the_side_that_is_asked_for(tiny_base: str, tmp_path: Path) -> None:
    sides = {side: [{"text": f"{side[0]}{n}{side}"} for n in range(4)] for side in ("eval", "test")}
    run, recipe, tokenizer = run_with(tmp_path, **sides), recipe_of(tiny_base, "sft"), loading.load_tokenizer(tiny_base)
    assert held_out_prompts(run, recipe, tokenizer, 2) == [("e0", "eval"), ("e1", "eval")]
    assert held_out_prompts(run, recipe, tokenizer, 1, "test") == [("t0", "test")]
    assert held_out_prompts(run, recipe, tokenizer, 0) == []
    assert held_out_prompts(run, recipe_of(tiny_base, "reward"), tokenizer, 2) == []


SIDES = {
    "without": ({"eval": [{"text": "abc"}]}, "eval"),
    "empty": ({"eval": [{"text": "abc"}], "test": []}, "eval"),
    "with": ({"eval": [{"text": "abc"}], "test": [{"text": "abc"}]}, "test"),
}


@pytest.mark.parametrize(("sides", "expected"), SIDES.values(), ids=SIDES)
def test_the_result_is_judged_on_test_rows_where_there_are_any(sides: Any, expected: str, tmp_path: Path) -> None:
    assert judged_side(run_with(tmp_path, **sides)) == expected


def test_a_side_without_rows_gives_no_prompts(tiny_base: str, tmp_path: Path) -> None:
    run = run_with(tmp_path, eval=[], test=[])
    assert held_out_prompts(run, recipe_of(tiny_base, "sft"), loading.load_tokenizer(tiny_base), 3, "test") == []


def test_no_more_of_a_side_is_read_than_the_rows_that_are_asked_for(tiny_base: str, tmp_path: Path) -> None:
    rows = [{"text": f"{n:0256d}" * 4096} for n in range(64)]
    run, tokenizer = run_with(tmp_path, eval=rows), loading.load_tokenizer(tiny_base)
    recipe = recipe_of(tiny_base, "sft")
    tracemalloc.start()
    few = held_out_prompts(run, recipe, tokenizer, 1)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(few) == 1
    assert most < 2**25, "of a file of 64 MiB"
    assert len(held_out_prompts(run, recipe, tokenizer, 100)) == 64
