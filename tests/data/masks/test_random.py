"""Random conversations: whatever stands in their texts, what is trained is the assistant's and ends with its end."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton.data.encoding import ChatEncoder
from baton.errors import RowError
from tests.data.masks.shapes import WEATHER, call, templates, tokenizer_of
from tests.data.masks.test_masks import trained

Row = dict[str, Any]

ENDS = {
    "qwen3": ("<|im_end|>",),
    "qwen3_5_think": ("<|im_end|>",),
    "nemotron_3_nano": ("<|im_end|>",),
    "gptoss": ("<|return|>", "<|end|>", "<|call|>"),
    "llama3_1": ("<|eot_id|>", "<|eom_id|>"),
    "gemma3": ("<end_of_turn>",),
    "gemma4": ("<turn|>", "<|tool_response>"),
    "deepseekv3": ("<｜end▁of▁sentence｜>",),
    "cohere2": ("<|END_OF_TURN_TOKEN|>",),
    "phi3": ("<|end|>",),
    "drops earlier reasoning": ("<|im_end|>",),
    "a prompt with text": ("<|im_end|>",),
    "tools in the system turn": ("</s>",),
    "no system role": ("</s>",),
    "trailing white space": ("</s>",),
}
PIECES = [
    " ", "\n", "\n\n", "\t", "<think>", "</think>", "<|im_end|>", "<|im_start|>assistant\n", "</s>", "[/INST]", "é",
    "🙂", "日本", '"', "'", "\\", "{}", "a b", "<tool_response>", "</tool_response>", "[b]", "<|end|>", "\r\n",
]  # fmt: skip
WORD = re.compile(r"[UA]\d{3}q")


@cache
def prepared(name: str) -> tuple[Any, ChatEncoder]:
    tokenizer = tokenizer_of(templates()[name])
    return tokenizer, ChatEncoder(tokenizer, "assistant")


@st.composite
def conversations(draw: st.DrawFn) -> Row:
    """Turns whose every text holds a word of its own: U for what is not the assistant's, A for what is."""
    text = st.lists(st.sampled_from(PIECES), max_size=4).map("".join)
    number = iter(range(1000))

    def written(kind: str) -> str:
        return f"{draw(text)}{kind}{next(number):03d}q{draw(text)}"

    messages: list[Row] = [{"role": "system", "content": written("U")}] if draw(st.booleans()) else []
    has_tools = draw(st.booleans())
    for _ in range(draw(st.integers(1, 4))):
        messages.append({"role": "user", "content": written("U")})
        if has_tools and draw(st.booleans()):
            calls = [call("weather", n, place=written("A")) for n in range(draw(st.integers(1, 2)))]
            messages.append({"role": "assistant", "content": "", "tool_calls": calls})
            messages += [{"role": "tool", "content": written("U"), "tool_call_id": x["id"]} for x in calls]
        answer: Row = {"role": "assistant", "content": written("A") if draw(st.integers(0, 9)) else ""}
        if draw(st.booleans()):
            answer["reasoning_content"] = written("A")
        messages.append(answer)
    return {"messages": messages, **({"tools": WEATHER} if has_tools else {})}


@pytest.mark.parametrize("name", ENDS)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(row=conversations())
def test_nothing_but_what_the_assistant_said_is_trained(name: str, row: Row) -> None:
    tokenizer, talk = prepared(name)
    runs = trained(talk, row, tokenizer)
    if isinstance(runs, str):
        return
    trained_words = WORD.findall(" ".join(runs))
    (made,) = talk.sequences([row])
    assert not isinstance(made, RowError)
    rendering = tokenizer.decode(made["input_ids"])
    assert trained_words == [word for word in WORD.findall(rendering) if word[0] == "A"]
    assert all(run.endswith(ENDS[name]) for run in runs)
    assert not any(run.endswith("\n") for run in runs)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(ENDS.keys() - {"deepseekv3"}))  # it writes a second call without a header
def test_most_random_conversations_are_not_refused(name: str) -> None:
    """What the template itself takes is located, but for what is named."""
    tokenizer, talk = prepared(name)
    counts = {"refused": 0, "trained": 0}

    @settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
    @given(row=conversations())
    def count(row: Row) -> None:
        made = trained(talk, row, tokenizer)
        if isinstance(made, str) and made.startswith("the chat template refuses it"):
            return
        counts["refused" if isinstance(made, str) else "trained"] += 1

    count()
    assert counts["refused"] <= 0.1 * counts["trained"], counts
