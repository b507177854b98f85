"""How a model was asked in training is known to those who ask it later."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from baton.errors import UserError
from baton.models import chat, loading, prompts
from baton.models.prompts import PromptFormat
from baton.recipe.recipe import Recipe
from baton.runs.run import Run
from baton.store import bundle
from baton.store.storage import Storage
from tests.support import tiny

USER = [{"role": "user", "content": "Who?"}]
ROWS: dict[str, dict[str, Any]] = {
    "text": {"text": "some"},
    "prompt": {"prompt": "Who?", "completion": "I"},
    "pair": {"prompt": "Who?", "chosen": "I", "rejected": "no"},
    "instruction": {"prompt": chat.alpaca("Who?", "here"), "completion": "I"},
    "messages": {"messages": [*USER, {"role": "assistant", "content": "I"}]},
    "turns": {"prompt": USER, "answer": "3"},
}
AS_TEXT = {"text": "text", "prompt": "prompt", "pair": "prompt", "instruction": "instruction"}


def recipe_of(base: str, **data: Any) -> Recipe:
    return tiny.recipe(base, data=data)


@pytest.mark.parametrize("shape", ROWS)
def test_the_row_and_the_recipe_say_how_prompts_are_written(shape: str, tiny_base: str) -> None:
    tokenizer = loading.load_tokenizer(tiny_base)
    plain = prompts.format_of_row(ROWS[shape], recipe_of(tiny_base, separator=" ->"), tokenizer)
    assert plain.prompts == AS_TEXT.get(shape, "chat")
    assert plain.separator == (" ->" if plain.prompts in ("prompt", "instruction") else "")
    turned = prompts.format_of_row(ROWS[shape], recipe_of(tiny_base, render_as="chat", system="Be brief."), tokenizer)
    assert turned.prompts == ("text" if shape == "text" else "chat")
    assert turned.system == (None if shape == "text" else "Be brief.")


def test_texts_are_what_a_completion_followed() -> None:
    assert PromptFormat(prompts="text").as_text("Once") == "Once"
    prompt = PromptFormat(prompts="prompt", separator="\n")
    assert prompt.as_text("Who?") == prompt.as_text("Who?\n") == "Who?\n"
    instruction = PromptFormat(prompts="instruction", separator="\n")
    assert instruction.as_text("Who?") == chat.alpaca("Who?", None) + "\n"
    assert PromptFormat.read(json.dumps(instruction.to_json()).encode(), "x") == instruction


def test_a_conversation_begins_with_the_system_message_where_it_has_none() -> None:
    own = [{"role": "system", "content": "Mine."}, *USER]
    assert prompts.with_system_turn(USER, "Be brief.") == [{"role": "system", "content": "Be brief."}, *USER]
    assert prompts.with_system_turn(own, "Be brief.") == own


def test_what_the_template_closes_an_answer_with_ends_it(tiny_base: str, tmp_path: Path) -> None:
    folder = str(tmp_path / "model")
    shutil.copytree(tiny_base, folder)
    tokenizer = loading.load_tokenizer(folder)
    both = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>")]
    assert prompts.end_tokens(folder, tokenizer) == both
    prompts.write_ends(folder, tokenizer)
    assert prompts.end_tokens(folder, tokenizer) is None
    before = json.loads(Path(tiny_base, prompts.SETTINGS).read_text("utf-8"))
    assert json.loads(Path(folder, prompts.SETTINGS).read_text("utf-8")) == before | {"eos_token_id": both}
    assert loading.load_model(folder).generation_config.eos_token_id == both
    tokenizer.chat_template = None
    assert prompts.end_tokens(tiny_base, tokenizer) is None


TASKS = {
    # shape, data.render_as, tasks.render_as → whether tasks are conversations
    ("messages", "auto", "auto"): True,
    ("messages", "auto", "text"): False,
    ("prompt", "auto", "auto"): False,  # the tokenizer is one of Baton's own
    ("prompt", "auto", "chat"): True,
    ("prompt", "chat", "auto"): True,
    ("text", "auto", "auto"): False,
    ("text", "chat", "auto"): True,
}


@pytest.mark.parametrize("case", TASKS)
def test_tasks_are_put_as_training_was(case: tuple[str, str, str], tiny_base: str, tmp_path: Path) -> None:
    shape, data, tasks = case
    evaluation = {"tasks": {"names": ["gsm8k"], "render_as": tasks}}
    recipe = tiny.recipe(tiny_base, data={"render_as": data}, evaluation=evaluation)
    run = Run(Storage(str(tmp_path / "store")), "r")
    (tmp_path / "split").mkdir()
    (tmp_path / "split/eval.jsonl").write_text(json.dumps(ROWS[shape]) + "\n", encoding="utf-8")
    bundle.publish(run.storage, "data/d/split", str(tmp_path / "split"), kind="split", meta={})
    run.put("data.json", {"digest": "d"})
    tokenizer = loading.load_tokenizer(tiny_base)
    assert prompts.asks_in_turns(run, recipe, tokenizer) is TASKS[case]
    assert not prompts.asks_in_turns(run, tiny.recipe(tiny_base), tokenizer)
    tokenizer.chat_template = None
    if tasks == "chat":
        with pytest.raises(UserError, match=r"evaluation.tasks.render_as: chat, and the tokenizer has no chat templ"):
            prompts.asks_in_turns(run, recipe, tokenizer)


def test_a_model_says_it_itself_or_its_run_does(tiny_base: str, tmp_path: Path) -> None:
    tokenizer = loading.load_tokenizer(tiny_base)
    run = Run(Storage(str(tmp_path / "store")), "r")
    run.create(recipe_of(tiny_base, separator="\n\n"))
    (tmp_path / "split").mkdir()
    (tmp_path / "split/eval.jsonl").write_text(json.dumps(ROWS["prompt"]) + "\n", encoding="utf-8")
    bundle.publish(run.storage, "data/d/split", str(tmp_path / "split"), kind="split", meta={})
    checkpoint = f"{run.uri}/checkpoints/step-00000003/files-1"
    assert prompts.format_of_model(checkpoint, tiny_base, tokenizer) is None
    run.put("data.json", {"digest": "d"})
    trained = PromptFormat(prompts="prompt", separator="\n\n")
    assert prompts.format_of_model(checkpoint, tiny_base, tokenizer) == trained
    assert prompts.format_of_model(f"{run.uri}/export/files-1", tiny_base, tokenizer) == trained
    assert prompts.format_of_model(tiny_base, tiny_base, tokenizer) is None

    folder = tmp_path / "own"
    folder.mkdir()
    own = PromptFormat(prompts="chat", system="Be brief.")
    (folder / prompts.FILE).write_text(json.dumps(own.to_json()), encoding="utf-8")
    assert prompts.format_of_model(checkpoint, str(folder), tokenizer) == own
