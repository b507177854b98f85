"""Reward functions: judged by hand, and a language model's own likelihoods computed another way."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from baton.errors import UserError
from baton.models import loading, rewards
from baton.models.rewards import InformationGain, JudgedModel
from baton.recipe.methods import RewardFunction

GSM8K = (
    "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\n"
    "Natalia sold 48+24 = <<48+24=72>>72 clips altogether in April and May.\n#### 72"
)
NUMBERS = {
    "an answer of GSM8K": (GSM8K, "72"),
    "behind the mark": ("#### 18", "18"),
    "the first behind the mark": ("#### 18 apples, not 3", "18"),
    "after the last mark": ("#### 5\nNo.\n#### 6", "6"),
    "money": ("It costs $1,234.50", "1234.50"),
    "money behind the mark": ("#### $1,234.50", "1234.5"),
    "negative": ("x = -5", "-5"),
    "negative money": ("He owes -$5.25.", "-5.25"),
    "at a sentence's end": ("The answer is 42.", "42"),
    "the last one": ("3 and 4 make 7", "7"),
    "thousands": ("1,000,000 people", "1000000"),
    "in a list": ("2, 4, 6", "6"),
    "per cent": ("about 12.5%", "12.5"),
    "a difference": ("10-3", "3"),
    "a range": ("pages 10-18", "18"),
    "a name": ("says GPT-4", "4"),
    "in brackets": ("f(2)-3", "3"),
    "leading zeros": ("007", "7"),
    "no number": ("none at all", None),
    "no number behind the mark": ("7 apples\n#### seven", None),
    "nothing": ("", None),
}


@pytest.mark.parametrize(("text", "expected"), NUMBERS.values(), ids=NUMBERS)
def test_the_number_a_text_ends_on(text: str, expected: str | None) -> None:
    assert rewards.final_number(text) == (None if expected is None else Decimal(expected))


@given(value=st.decimals(-(10**9), 10**9, allow_nan=False, places=2), words=st.text("abc .\n", max_size=20))
def test_a_number_is_found_as_it_is_written(value: Decimal, words: str) -> None:
    for written in (f"{value}", f"{value:,}", f"{value:f}0", f"${value}" if value >= 0 else f"-${-value}"):
        assert rewards.final_number(f"{words} {written} {words}") == value
        assert rewards.final_number(f"1 {words}#### {written} {words} 2") == value


def build(use: str, **options: Any) -> Any:
    """Returns one reward function."""
    return rewards.build([RewardFunction(use=use, options=options)])[0]


def talk(text: str) -> list[dict[str, str]]:
    """A completion as messages."""
    return [{"role": "assistant", "content": text}]


JUDGED = {
    "numeric": ("numeric", {}, ["#### 72", "72.0", "so 71", "none"], [1.0, 1.0, 0.0, 0.0]),
    "numeric with values": ("numeric", {"right": 2.0, "wrong": -1.0}, ["72", "71", "", "$72"], [2.0, -1.0, -1.0, 2.0]),
    "numeric with a mark": ("numeric", {"mark": "A:"}, ["A: 72 of 5", "#### 5 A: 72", "5", "72"], [1, 1, 0, 1]),
    "exact": ("exact", {}, [GSM8K, f" {GSM8K}\n", "72", GSM8K.upper()], [1.0, 1.0, 0.0, 0.0]),
    "exact whatever the case": ("exact", {"ignore_case": True}, [GSM8K.upper(), GSM8K, "", "72"], [1, 1, 0, 0]),
    "format": (
        "format",
        {},
        ["<think>a\nb</think> yes", "<think></think>x", "<think>a</think>  ", "yes <think>a</think> b"],
        [1.0, 1.0, 0.0, 0.0],
    ),
    "format of one's own": (
        "format",
        {"pattern": r"\d+", "right": 3, "wrong": -3},
        ["72", " 7\n", "7a", ""],
        [3, 3, -3, -3],
    ),
}


@pytest.mark.parametrize("wrap", [str, talk], ids=["texts", "messages"])
@pytest.mark.parametrize(("use", "options", "completions", "expected"), JUDGED.values(), ids=JUDGED)
def test_completions_are_judged(
    use: str, options: dict[str, Any], completions: list[str], expected: list[float], wrap: Any
) -> None:
    judge = build(use, **options)
    said = [wrap(text) for text in completions]
    answer = [GSM8K] * 4
    assert judge(prompts=["?"] * 4, completions=said, completion_ids=[[1]] * 4, answer=answer) == expected
    assert judge.__name__ == use


@pytest.mark.parametrize(
    ("options", "expected"),
    [({"target": 4}, [0.0, 0.5, 1.0, 0.5, 0.0]), ({"target": 4, "width": 8}, [0.5, 0.75, 1.0, 0.75, 0.0])],
    ids=["target", "width"],
)
def test_length_counts_tokens(options: dict[str, int], expected: list[float]) -> None:
    lengths = [0, 2, 4, 6, 12]
    assert build("length", **options)(completion_ids=[[7] * count for count in lengths]) == expected


@pytest.mark.parametrize("use", ["numeric", "exact", "format", "length", "information_gain"])
def test_an_option_that_is_not_taken_is_the_users_mistake(use: str) -> None:
    with pytest.raises(UserError, match=f"reward '{use}' does not take these options: .*'colour'"):
        build(use, colour="red")


def test_a_pattern_that_is_none_is_the_users_mistake() -> None:
    with pytest.raises(UserError, match=r"reward 'format': pattern '\(' is not a regular expression"):
        build("format", pattern="(")
    with pytest.raises(UserError, match="is not a regular expression: maximum recursion depth exceeded"):
        build("format", pattern="(" * 2000)


def test_ones_own_function_is_called_with_its_options() -> None:
    first, second = rewards.build(
        [
            RewardFunction(use="tests.resume.own:shortness"),
            RewardFunction(use="baton.models.rewards:exact_reward", options={"right": 5}),
        ]
    )
    assert first(completion_ids=[[3, 3, 4]], completions=["ab"]) == [0.22]
    assert second().__name__ == "exact"
    assert [judge.__name__ for judge in (first, second)] == ["shortness", "exact_reward"]


@pytest.fixture(scope="module")
def judged(tiny_base: str) -> JudgedModel:
    """A tiny model and its tokenizer."""
    return JudgedModel(loading.load_model(tiny_base).eval(), loading.load_tokenizer(tiny_base))


def token_by_token(model: PreTrainedModel, context: list[int], tail: list[int]) -> float:
    """Mean log-probability of a tail, each token predicted from a pass of its own, in double precision."""
    found = []
    for at in range(len(tail)):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([context + tail[:at]])).logits[0, -1].double()
        found.append(float(logits[tail[at]] - logits.logsumexp(0)))
    return sum(found) / len(found)


THOUGHTS = ["the value of", " is here", "the fox jumps", ""]
QUESTION = "What is 3 and 4?"


def gain(judged: JudgedModel, prompt: Any, thought: list[int], answer: str, **options: Any) -> float:
    """What the reward function says."""
    judge = InformationGain(**options)
    rewards.bind([judge, print], judged)
    return judge(prompts=[prompt], completion_ids=[thought], answer=[answer])[0]


def ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Tokens of a text."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize("ended", [False, True], ids=["cut off", "ended"])
@pytest.mark.parametrize("thought", THOUGHTS)
def test_information_gain_is_the_difference_of_log_likelihoods(thought: str, ended: bool, judged: JudgedModel) -> None:
    model, tokenizer = judged.model, judged.processing_class
    prompt, tail = ids(tokenizer, QUESTION), ids(tokenizer, "the value of 7")
    thinking = ids(tokenizer, thought)
    expected = token_by_token(model, prompt + thinking, tail) - token_by_token(model, prompt, tail)
    given_ids = [*thinking, tokenizer.eos_token_id] if ended else thinking
    assert gain(judged, QUESTION, given_ids, "the value of 7") == pytest.approx(expected, abs=1e-5)
    assert (abs(expected) > 1e-3) == bool(thought), "an empty thought gains nothing, others something"


def test_the_prompt_of_information_gain_may_be_a_conversation(judged: JudgedModel) -> None:
    tokenizer = judged.processing_class
    rendered = f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
    prompt, thinking, tail = (ids(tokenizer, text) for text in (rendered, "the fox", "7"))
    expected = token_by_token(judged.model, prompt + thinking, tail) - token_by_token(judged.model, prompt, tail)
    talked = [{"role": "user", "content": QUESTION}]
    assert gain(judged, talked, thinking, "7") == pytest.approx(expected, abs=1e-5)


def test_a_gain_is_clipped_and_then_scaled(judged: JudgedModel) -> None:
    thought = ids(judged.processing_class, "the fox jumps")
    plain = gain(judged, QUESTION, thought, "the value of 7")
    limit = abs(plain) / 2
    assert gain(judged, QUESTION, thought, "the value of 7", scale=3.0) == pytest.approx(3 * plain)
    sign = 1 if plain > 0 else -1
    assert gain(judged, QUESTION, thought, "the value of 7", scale=3.0, clip=limit) == pytest.approx(3 * sign * limit)
    assert gain(judged, QUESTION, thought, "the value of 7", clip=10 * limit) == pytest.approx(plain)


def test_an_answer_of_nothing_gains_nothing(judged: JudgedModel) -> None:
    assert gain(judged, QUESTION, ids(judged.processing_class, "the fox"), "") == 0.0


@pytest.mark.parametrize("training", [True, False])
def test_judging_leaves_the_model_in_its_mode(training: bool, judged: JudgedModel) -> None:
    judged.model.train(training)
    try:
        gain(judged, QUESTION, ids(judged.processing_class, "the fox"), "7")
        assert judged.model.training is training
        assert all(parameter.grad is None for parameter in judged.model.parameters())
    finally:
        judged.model.eval()
