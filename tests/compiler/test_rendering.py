"""What is said before a run of how rows that are texts reach the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from baton.errors import UserError
from baton.local import preview
from baton.recipe import load
from baton.recipe.recipe import Recipe
from baton.source import prepare
from baton.source.origin import RecipeSource
from tests.support import tiny

AUTO = "(data.render_as: auto)"
TURNS = "prompts and answers that are texts become user and assistant turns"
TEXT = "prompts and answers that are texts are trained as text"


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A chat model, one without a template, and one whose tokenizer Baton trained."""
    folder = Path(tmp_path_factory.mktemp("bases"))
    return {
        "chat": tiny.make_chat_base(folder / "chat"),
        "plain": tiny.make_chat_base(folder / "plain", template=None),
        "own": tiny.make_base(folder / "own"),
    }


def recipe(model: dict[str, Any], method: str = "sft", **data: Any) -> Recipe:
    """A recipe of a model."""
    document = {"name": "t", "model": model, "data": {"source": "r.jsonl", **data}, "training": {"method": method}}
    return load.validate(document, origin="r.yaml")


SCRATCH: dict[str, Any] = {"from_scratch": {}, "tokenizer": {"train": {"vocab_size": 300}}}


def test_what_is_known_of_a_base_is_said(bases: dict[str, str]) -> None:
    def said(base: str, **data: Any) -> list[str]:
        return list(prepare.rendering_report(recipe({"base": bases[base]}, **data)))

    assert said("chat") == [f"{TURNS} in the chat template of {bases['chat']} {AUTO}"]
    assert said("chat", system="Be brief.") == [
        f"{TURNS} in the chat template of {bases['chat']}, with data.system {AUTO}"
    ]
    assert said("chat", render_as="text") == [f"{TEXT} (data.render_as: text)"]
    assert said("plain") == said("own") == [f"{TEXT} {AUTO}"]
    assert said("own", render_as="chat") == [f"{TURNS} in the chat template of {bases['own']} (data.render_as: chat)"]
    assert said("chat", format="messages") == said("chat", format="text") == []
    given = recipe({"base": bases["plain"], "chat_template": "zephyr"})
    assert list(prepare.rendering_report(given)) == [f"{TURNS} in the chat template zephyr {AUTO}"]
    assert list(prepare.rendering_report(recipe({"base": bases["chat"]}, "pretrain"))) == []


def test_what_is_elsewhere_is_said_to_be_unknown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    for base in ("s3://models/chat", "an-org/a-model-that-is-not-here"):
        (line,) = prepare.rendering_report(recipe({"base": base}))
        assert line == f"{TURNS} if {base} has a chat template, which cannot be seen from here {AUTO}"
        prepare.check_rendering(recipe({"base": base}, render_as="chat"))


def test_of_a_tokenizer_that_baton_trains_nothing_is_said_unless_it_is_asked_for() -> None:
    assert list(prepare.rendering_report(recipe(SCRATCH))) == []
    assert list(prepare.rendering_report(recipe(SCRATCH, render_as="chat"))) == [
        f"{TURNS} in the chat template of the tokenizer (data.render_as: chat)"
    ]


def test_phases_have_the_tokenizer_of_the_first(bases: dict[str, str]) -> None:
    def said(model: dict[str, Any]) -> list[str]:
        document = {"name": "t", "model": model, "data": {"source": "r.jsonl"}, "phases": ["pretrain", "sft", "dpo"]}
        return list(prepare.rendering_report(load.validate(document, origin="r.yaml")))

    assert said({"base": bases["chat"]}) == [
        f"t-{name}: {TURNS} in the chat template of {bases['chat']} {AUTO}" for name in ("sft", "dpo")
    ]
    assert said(SCRATCH) == [f"t-{name}: {TEXT} {AUTO}" for name in ("sft", "dpo")]


def test_a_template_that_is_missing_is_told_before_a_run(bases: dict[str, str]) -> None:
    with pytest.raises(UserError, match=r"render_as: chat, and the tokenizer of .* no chat template.*chat_template"):
        prepare.check_model(recipe({"base": bases["plain"]}, render_as="chat"))
    prepare.check_model(recipe({"base": bases["plain"], "chat_template": "chatml"}, render_as="chat"))
    prepare.check_model(recipe({"base": bases["plain"]}))
    prepare.check_model(recipe({"base": bases["chat"]}, render_as="chat"))


def test_an_older_key_is_understood_with_a_note(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("name: t\nmodel: {base: x}\ndata: {source: r.jsonl, assistant_only_loss: true}\n")
    assert prepare.load(str(path)).recipe.data.train_on == "assistant"
    assert "data.assistant_only_loss is read as data.train_on" in caplog.text
    caplog.clear()
    path.write_text("name: t\nmodel: {base: x}\ndata: {source: r.jsonl, train_on: assistant}\n")
    prepare.load(str(path))
    assert not caplog.text


PAIR = {"prompt": "Hello", "completion": "Hi."}
TALK = {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi."}]}
CHOICE = {"prompt": "Hello", "chosen": "Hi.", "rejected": "No."}
SYSTEM = {
    "texts, no template": ("plain", "sft", {}, PAIR, False),
    "texts, own tokenizer": ("own", "sft", {}, PAIR, False),
    "texts as text": ("chat", "sft", {"render_as": "text"}, PAIR, False),
    "texts as turns": ("chat", "sft", {}, PAIR, True),
    "pairs, no template": ("plain", "dpo", {}, CHOICE, False),
    "pairs as turns": ("chat", "dpo", {}, CHOICE, True),
    "conversations as text": ("chat", "sft", {"render_as": "text"}, TALK, True),
    "a model that is not here": ("org/elsewhere", "sft", {}, PAIR, True),
}
"""Name → base, method, settings and a row; whether nothing is against a system message."""


@pytest.mark.parametrize(("base", "method", "data", "row", "is_fine"), SYSTEM.values(), ids=SYSTEM)
def test_a_system_message_that_rows_cannot_have_is_refused_before_a_pod(
    base: str, method: str, data: dict[str, Any], row: dict[str, Any], is_fine: bool, bases: dict[str, str],
    tmp_path: Path,
) -> None:  # fmt: skip
    (tmp_path / "r.jsonl").write_text(f"{json.dumps(row)}\n" * 3, encoding="utf-8")
    made = recipe({"base": bases.get(base, base)}, method, system="Be kind.", **data)
    asked = prepare.LoadedRecipe(made, RecipeSource("r", "", str(tmp_path))).localised() if base in bases else made
    document = asked.model_dump(mode="json")
    document["data"]["source"] = [str(tmp_path / "r.jsonl")]
    asked = load.validate(document, origin="r.yaml")
    if is_fine:
        list(preview.describe_rows(asked))
        return
    with pytest.raises(
        UserError, match=r"data\.system: prompts are trained as text here.* Set data\.render_as to chat"
    ):
        list(preview.describe_rows(asked))
    without = asked.model_copy(update={"data": asked.data.model_copy(update={"system": None})})
    list(preview.describe_rows(without))
