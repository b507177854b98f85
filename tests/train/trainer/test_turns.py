"""Methods whose model generates, on prompts that are texts: the model sees a conversation, functions see the text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pytest
import torch

from baton.evaluate import evaluate
from baton.models import chat, loading
from baton.models.rewards import InformationGain, JudgedModel
from baton.recipe.recipe import Recipe
from tests.support import tiny
from tests.train.trainer import judged

Row = dict[str, Any]

TEXTS: list[Row] = [{"prompt": f"What is {n}?", "answer": f"{n}"} for n in range(8)]
TALKS: list[Row] = [{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in TEXTS]
SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.fixture(autouse=True)
def _nothing_noted() -> None:
    judged.calls.clear()


def recipe(base: str, method: str, function: str = "noted", **data: Any) -> Recipe:
    """A recipe with the function that notes."""
    own: Row = {"num_generations": 4, "max_completion_length": 6, "beta": 0.0}
    own["rewards"] = [f"tests.train.trainer.judged:{function}"]
    training = {"method": method, method: own, "batch_size": 8, "max_steps": 1, "learning_rate": 1e-3}
    return tiny.recipe(base, training=training, data=data)


def trained(given: Recipe, rows: list[Row], folder: Path) -> Any:
    """Trains for a step."""
    trainer = tiny.trainer(given, tiny.tokens(given, rows), folder)
    trainer.train()
    return trainer


@pytest.mark.parametrize("method", ["grpo", "rloo"])
@pytest.mark.parametrize("function", ["noted", "awaited"])
def test_the_model_sees_the_chat_and_the_function_the_text(
    method: str, function: str, chat_base: str, tmp_path: Path
) -> None:
    trainer = trained(recipe(chat_base, method, function, system="Be brief."), TEXTS, tmp_path)
    (call,) = judged.calls
    texts = {f"{row['prompt']}\n": row["answer"] for row in TEXTS}
    assert set(call["prompts"]) <= texts.keys()
    assert call["answer"] == [texts[prompt] for prompt in call["prompts"]]
    tokenizer = trainer.processing_class
    assert call["completions"] == tokenizer.batch_decode(call["completion_ids"], skip_special_tokens=True)
    assert chat.PROMPT_TEXT not in call
    for prompt, messages in zip(call["prompts"], call["prompt_messages"], strict=True):
        assert messages == [SYSTEM, {"role": "user", "content": prompt.removesuffix("\n")}]
        seen = trainer._tokenize_prompts([messages])[0][0]
        options = {"tokenize": True, "return_dict": True, "add_generation_prompt": True}
        assert seen == tokenizer.apply_chat_template(messages, **options)["input_ids"]
        assert seen.count(tokenizer.bos_token_id) == 1, "the template begins the text, and the tokenizer does too"
    assert tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id


@pytest.mark.parametrize("method", ["grpo", "rloo"])
def test_of_conversations_the_function_sees_messages(method: str, chat_base: str, tmp_path: Path) -> None:
    trained(recipe(chat_base, method), TALKS, tmp_path)
    (call,) = judged.calls
    assert all(messages in [row["prompt"] for row in TALKS] for messages in call["prompts"])
    assert all(message["role"] == "assistant" for (message,) in call["completions"])
    assert "prompt_messages" not in call


@pytest.mark.parametrize("method", ["grpo", "rloo"])
def test_rendered_as_text_model_and_function_see_the_same_text(method: str, chat_base: str, tmp_path: Path) -> None:
    trainer = trained(recipe(chat_base, method, render_as="text"), TEXTS, tmp_path)
    (call,) = judged.calls
    assert set(call["prompts"]) <= {f"{row['prompt']}\n" for row in TEXTS}
    assert all(isinstance(text, str) for text in call["completions"])
    assert trainer.eos_token_ids == [trainer.processing_class.eos_token_id]


@pytest.mark.parametrize("rows", [TEXTS, TALKS])
def test_texts_and_conversations_are_trained_alike(rows: list[Row], chat_base: str, tmp_path: Path) -> None:
    """The same bits, as the model sees the same; a text rendered as text gives others."""

    def weights(rows: list[Row], folder: str, **data: Any) -> dict[str, torch.Tensor]:
        return tiny.weights(trained(recipe(chat_base, "grpo", **data), rows, tmp_path / folder))

    one, other, text = weights(rows, "one"), weights(TALKS, "other"), weights(TEXTS, "text", render_as="text")
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert not all(torch.equal(one[name], text[name]) for name in one)


@pytest.mark.parametrize("method", ["grpo", "rloo", "distillation"])
@pytest.mark.parametrize("ends", [True, False])
def test_a_completion_ends_with_its_turn(method: str, ends: bool, chat_base: str, tmp_path: Path) -> None:
    given = recipe(chat_base, "grpo", render_as="auto" if ends else "text")
    if method != "grpo":
        own = {"teacher": chat_base} if method == "distillation" else {"rewards": ["length"], "num_generations": 4}
        training = {"method": method, method: {**own, "max_completion_length": 6}, "batch_size": 8, "max_steps": 1}
        given = tiny.recipe(chat_base, training=training, data={"render_as": "auto" if ends else "text"})
    trainer = tiny.trainer(given, tiny.tokens(given, TEXTS), tmp_path)
    tokenizer = trainer.processing_class
    end = tokenizer.convert_tokens_to_ids("<|eot|>")
    assert (end in trainer.eos_token_ids) is ends
    trainer.generation_config.suppress_tokens = [n for n in range(len(tokenizer)) if n != end]  # nothing else is said
    prompt_ids = trainer._tokenize_prompts([trainer.train_dataset[0]["prompt"]] * 4)[0]
    made = trainer._generate_single_turn(prompt_ids, None, {}, *([4] if method == "grpo" else []))
    assert (made[0] if method == "grpo" else made) == [[end] * (1 if ends else 6)] * 4


def test_the_held_out_reward_goes_by_the_row_s_own_shape(chat_base: str) -> None:
    model, tokenizer = loading.load_model(chat_base).eval(), loading.load_tokenizer(chat_base)
    for rows, kind in ((TEXTS, str), (TALKS, list)):
        given = recipe(chat_base, "grpo")
        tokens = tiny.tokens(given, rows)
        measured = evaluate.measure(model, tokenizer, tokens, given)
        call = judged.calls.pop()
        assert "reward" in measured.figures
        assert {type(value) for name in ("prompts", "completions") for value in call[name]} == {kind}
        assert call["answer"] == tokens["answer"]
        assert chat.PROMPT_TEXT not in call
        assert ("prompt_messages" in call) is (kind is str)


def test_a_ready_function_that_reads_the_prompt_reads_what_the_model_saw(chat_base: str) -> None:
    model, tokenizer = loading.load_model(chat_base).eval(), loading.load_tokenizer(chat_base)
    gain = InformationGain()
    gain.bind(JudgedModel(model, tokenizer))
    thoughts = [tokenizer("so", add_special_tokens=False)["input_ids"]]
    messages = [TALKS[3]["prompt"]]
    of_text = gain(["What is 3?\n"], thoughts, ["3"], prompt_messages=messages)
    assert of_text == gain(messages, thoughts, ["3"])
    assert of_text != gain(["What is 3?\n"], thoughts, ["3"])


def test_columns_of_a_prompt_are_those_of_its_tokens(chat_base: str) -> None:
    rows = tiny.tokens(recipe(chat_base, "grpo"), TEXTS)
    assert isinstance(rows, datasets.Dataset)
    assert set(rows.column_names) == {"prompt", "prompt_text", "answer", "length"}
