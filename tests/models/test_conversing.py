"""Rows as conversations: which become turns, what the user asks in them, and what an answer ends with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from baton.data import normalize
from baton.data.schema import ColumnMapping
from baton.errors import UserError
from baton.models import chat as chat_templates
from baton.models import chat as conversing
from baton.models import loading
from baton.models.chat import ChatTemplate
from baton.recipe import load
from baton.recipe.recipe import Recipe
from tests.support import tiny

Row = dict[str, Any]
TEXTS = st.text(st.characters(codec="utf-8"), max_size=40) | st.lists(
    st.sampled_from(["a", "\n", "\n\n", "### Input:", "### Response:", "### Instruction:", " ", "Below is"]), max_size=8
).map("".join)
INSTRUCTION = ColumnMapping(format="instruction", columns={})


def user(content: str) -> Row:
    """A turn of the user."""
    return {"role": "user", "content": content}


def said(content: str) -> Row:
    """A turn of the assistant."""
    return {"role": "assistant", "content": content}


@given(TEXTS, TEXTS)
@example("Add.", "1 and 2")
@example("Add.", "")
@example("Add.", "\n### Input:\n3\n\n### Input:\n4\n\n### Response:")
@example("### Input:\n\n### Response:", "x")
@example("\n\n### Response:", "")
def test_what_the_split_writes_of_an_instruction_is_taken_apart_again(instruction: str, context: str) -> None:
    assume(not context or (instruction + conversing.INPUT).find(conversing.INPUT) == len(instruction))
    row = normalize.normalize_row({"instruction": instruction, "input": context, "output": "3"}, INSTRUCTION)
    assert isinstance(row, dict)
    assert conversing.strip_alpaca(row["prompt"]) == (f"{instruction}\n\n{context}" if context else instruction)


@given(st.text())
@example("Below is an instruction that describes a task. Write a response that appropriately completes the request.")
@example(conversing.alpaca("Add.", "1").removesuffix(":"))
def test_any_other_prompt_is_what_the_user_asks(prompt: str) -> None:
    assert conversing.strip_alpaca(prompt) == prompt


def test_an_instruction_that_holds_the_mark_of_an_input_is_cut_at_the_first() -> None:
    prompt = conversing.alpaca(f"a{conversing.INPUT}b", "c")
    assert conversing.strip_alpaca(prompt) == f"a\n\nb{conversing.INPUT}c", (
        "the text does not say which of the two it is"
    )


def recipe(base: str, method: str = "sft", model: Row | None = None, **data: Any) -> Recipe:
    """A recipe for a base."""
    own = {"grpo": {"rewards": ["length"], "num_generations": 8}} if method == "grpo" else {}
    return tiny.recipe(base, training={"method": method, **own}, data=data, model=model or {})


def test_turns_are_for_a_base_that_has_a_template(chat_base: str, tiny_base: str, tmp_path: Path) -> None:
    chat, own = loading.load_tokenizer(chat_base), loading.load_tokenizer(tiny_base)
    assert conversing.uses_chat(recipe(chat_base), chat)
    assert conversing.uses_chat(recipe(chat_base, render_as="chat"), chat)
    assert not conversing.uses_chat(recipe(chat_base, render_as="text"), chat)
    assert not conversing.uses_chat(recipe(chat_base, "pretrain"), chat)
    assert not conversing.uses_chat(recipe(chat_base, "pretrain", render_as="chat"), chat)
    assert own.chat_template
    assert not conversing.uses_chat(recipe(tiny_base), own), "the tokenizer is one that Baton trained"
    assert conversing.uses_chat(recipe(tiny_base, render_as="chat"), own)
    scratch = {"base": None, "from_scratch": {}, "tokenizer": {"base": chat_base}}
    assert not conversing.uses_chat(recipe(chat_base, model=scratch), chat), "there is no base"
    plain = loading.load_tokenizer(tiny.make_chat_base(tmp_path / "plain", template=None))
    assert not conversing.uses_chat(recipe(chat_base), plain)
    assert not conversing.uses_chat(recipe(chat_base, render_as="chat"), plain)
    conversing.require_template(recipe(chat_base), plain)
    with pytest.raises(UserError, match=r"render_as: chat.*no chat template.*Set model\.chat_template"):
        conversing.require_template(recipe(chat_base, render_as="chat"), plain)


ROWS: dict[str, tuple[str, Row, Row]] = {
    "prompt and completion": (
        "sft",
        {"prompt": "Add.", "completion": " 3"},
        {"prompt": [user("Add.")], "completion": [said(" 3")]},
    ),
    "instruction": (
        "sft",
        {"prompt": conversing.alpaca("Add.", "1 and 2"), "completion": "3"},
        {"prompt": [user("Add.\n\n1 and 2")], "completion": [said("3")]},
    ),
    "preference": (
        "dpo",
        {"prompt": "Add.", "chosen": "3", "rejected": "4"},
        {"prompt": [user("Add.")], "chosen": [said("3")], "rejected": [said("4")]},
    ),
    "rated": (
        "kto",
        {"prompt": "Add.", "completion": "3", "label": True},
        {"prompt": [user("Add.")], "completion": [said("3")], "label": True},
    ),
    "prompt": (
        "grpo",
        {"prompt": "Add.", "answer": "3"},
        {"prompt": [user("Add.")], "answer": "3", conversing.PROMPT_TEXT: "Add.\n"},
    ),
    "prompt with further columns": (
        "grpo",
        {"prompt": "Add.", "completion": "3", "chosen": "x"},
        {"prompt": [user("Add.")], "completion": "3", "chosen": "x", conversing.PROMPT_TEXT: "Add.\n"},
    ),
    "text": ("sft", {"text": "Add."}, {"text": "Add."}),
    "text beside a prompt": ("sft", {"text": "Add.", "prompt": "x"}, {"text": "Add.", "prompt": "x"}),
    "messages": ("sft", {"messages": [user("a"), said("b")]}, {"messages": [user("a"), said("b")]}),
    "a prompt of messages": (
        "dpo",
        {"prompt": [user("a")], "chosen": [said("b")], "rejected": [said("c")]},
        {"prompt": [user("a")], "chosen": [said("b")], "rejected": [said("c")]},
    ),
}


@pytest.mark.parametrize(("method", "row", "expected"), ROWS.values(), ids=ROWS)
def test_texts_become_turns(method: str, row: Row, expected: Row, chat_base: str) -> None:
    before = dict(row)
    assert conversing.as_turns(row, recipe(chat_base, method)) == expected
    assert row == before
    turned = "messages" in expected or isinstance(expected.get("prompt"), list)
    with_system = conversing.as_turns(row, recipe(chat_base, method, system="Be brief."))
    name = "messages" if "messages" in expected else "prompt"
    if turned and "text" not in row:
        assert with_system[name] == [{"role": "system", "content": "Be brief."}, *expected[name]]
        del with_system[name]
    assert with_system == {key: value for key, value in expected.items() if key in with_system}


@pytest.mark.parametrize("role", ["system", "developer"])
def test_a_system_message_of_its_own_stays_alone(role: str, chat_base: str) -> None:
    row = {"messages": [{"role": role, "content": "Be long."}, user("a"), said("b")]}
    assert conversing.with_system(row, recipe(chat_base, system="Be brief.")) == row


def test_a_system_message_is_for_conversations_that_are_not_made_of_texts_too(tiny_base: str) -> None:
    own = loading.load_tokenizer(tiny_base)
    rows: list[Row] = [{"messages": [user("a"), said("b")]}]
    (row,) = conversing.apply_chat(rows, recipe(tiny_base, system="Be brief."), own)
    assert [message["role"] for message in row["messages"]] == ["system", "user", "assistant"]
    assert conversing.apply_chat(rows, recipe(tiny_base), own) == rows


def test_what_gives_other_tokens_than_before(chat_base: str) -> None:
    texts, talk = {"prompt": "a", "completion": "b"}, {"messages": [user("a"), said("b")]}
    plain, system = recipe(chat_base), recipe(chat_base, system="Be brief.")
    assert conversing.rendering_changes(texts, plain, chat=True)
    assert not conversing.rendering_changes(texts, plain, chat=False)
    assert not conversing.rendering_changes(talk, plain, chat=True)
    assert not conversing.rendering_changes({"text": "a"}, system, chat=True)
    assert conversing.rendering_changes(talk, system, chat=False)
    with pytest.raises(UserError, match=r"data\.system: prompts are trained as text.*render_as to chat"):
        conversing.rendering_changes(texts, system, chat=False)


ENDS = {"chatml": "<|im_end|>", "zephyr": "<|end|>", "alpaca": "<|end|>", "llama3": None}


@pytest.mark.parametrize(("name", "token"), ENDS.items())
def test_an_answer_ends_with_the_token_that_the_template_writes(name: str, token: str | None, tiny_base: str) -> None:
    tokenizer = loading.load_tokenizer(tiny_base)
    tokenizer.chat_template = chat_templates.TEMPLATES[name]
    end = ChatTemplate(tokenizer).end_of_turn
    assert (end is not None and tokenizer.convert_ids_to_tokens(end)) == (token or False), "it knows no <|eot_id|>"


def test_a_template_that_refuses_ends_with_nothing(chat_base: str) -> None:
    tokenizer = loading.load_tokenizer(chat_base)
    assert tokenizer.convert_ids_to_tokens(ChatTemplate(tokenizer).end_of_turn) == "<|eot|>"
    tokenizer.chat_template = "{{ raise_exception('no') }}"
    assert ChatTemplate(tokenizer).end_of_turn is None
    tokenizer.chat_template = None
    assert ChatTemplate(tokenizer).end_of_turn is None


def test_the_settings_are_read() -> None:
    document = {"name": "t", "model": {"base": "org/m"}, "data": {"source": "r.jsonl", "render_as": "always"}}
    with pytest.raises(UserError, match=r"data\.render_as.*'auto', 'chat' or 'text'"):
        load.validate(document, origin="r.yaml")
