"""Every template × every shape of conversation: trained is what the assistant said with its end, or it is refused."""

from __future__ import annotations

from collections import Counter
from itertools import groupby
from typing import Any

import pytest

from baton.data.encoding import ChatEncoder
from baton.errors import RowError
from baton.models.chat import Conversation
from baton.models.train_rows import IGNORED
from tests.data.masks.said import said, without_silent_calls
from tests.data.masks.shapes import AWKWARD, CONVERSATIONS, templates, tokenizer_of

Row = dict[str, Any]

PICTURES = {"idefics3", "smolvlm", "llava_next"}
"""They read a picture processor's lists of parts, and leave texts out."""
REFUSED_BY_THE_TEMPLATE = "the chat template refuses it"
MERGED = "cannot tell where to begin with message 3"
INSIDE = "cannot tell where to end with message 3"
LEFT_OUT = "the chat template omits the part that counts"
GEMMA4 = ("gemma4", "gemma4_v3", "gemma4_v4", "gemma4_v5", "diffusion_gemma")
NOT_LOCATED: dict[tuple[str, str], str] = {
    # One model turn holds the call, its result and what was said with the call, in this order.
    **{(name, "call with content"): INSIDE for name in GEMMA4},
    **{(name, "two answers in a row"): MERGED for name in GEMMA4},
    # The second call of a conversation has no header.
    ("deepseekv3", "call with content"): "cannot tell where to begin with message 7",
    **{
        (name, "tool call"): LEFT_OUT
        for name in ("cohere", "cohere2", "deepseek_r1_distill", "gemma", "gemma3", "lfm2", "llama3", "phi3", "phi3_5",
                     "qwen2_5_vl", "no system role", "trailing white space")
    },
}  # fmt: skip
"""Template and shape → why it is refused, where the template itself writes it."""

MARKED = "markers in the text"


def trained(talk: ChatEncoder, row: Row, tokenizer: Any) -> list[str] | str:
    """Returns the runs of trained tokens in words, or why there are none; checks that the tokens are the template's."""
    (made,) = talk.sequences([row])
    if isinstance(made, RowError):
        return str(made)
    messages, tools = row["messages"], row.get("tools")
    try:
        ids = tokenizer.apply_chat_template(messages, tools=tools, tokenize=True, return_dict=False)
    except TypeError:  # it asks for arguments as text
        messages = Conversation(messages).with_text_arguments().messages
        ids = tokenizer.apply_chat_template(messages, tools=tools, tokenize=True, return_dict=False)
    assert made["input_ids"] == ids
    assert all(label in (IGNORED, token) for token, label in zip(ids, made["labels"], strict=True))
    runs = groupby(zip(ids, made["labels"], strict=True), key=lambda pair: pair[1] != IGNORED)
    return [tokenizer.decode([token for token, _ in run]) for is_trained, run in runs if is_trained]


def expected(template: str, row: Row, tokenizer: Any, shape: str) -> list[str]:
    """Returns what should be trained, by the family's grammar; markers in texts are put in afterwards."""
    words = {}
    if shape == MARKED:
        for number, message in enumerate(row["messages"]):
            words[f"Word{number}"] = message["content"]
        row = {"messages": [{**m, "content": word} for m, word in zip(row["messages"], words, strict=True)]}
    try:
        text = tokenizer.apply_chat_template(row["messages"], tools=row.get("tools"), tokenize=False)
    except TypeError:
        messages = Conversation(row["messages"]).with_text_arguments().messages
        text = tokenizer.apply_chat_template(messages, tools=row.get("tools"), tokenize=False)
    turns = without_silent_calls(said(template, text), row["messages"])
    for word, content in words.items():
        turns = [turn.replace(word, content) for turn in turns]
    return turns


def test_what_is_trained_is_what_the_assistant_said(capsys: pytest.CaptureFixture[str]) -> None:
    counts: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    wrong: list[str] = []
    names = [name for name in templates() if name.removesuffix("_training") not in PICTURES]
    for name in names:
        tokenizer = tokenizer_of(templates()[name])
        talk = ChatEncoder(tokenizer, "assistant")
        for shape, row in CONVERSATIONS.items():
            found = trained(talk, row, tokenizer)
            if isinstance(found, str):
                reason = NOT_LOCATED.get((name.removesuffix("_training"), shape), REFUSED_BY_THE_TEMPLATE)
                counts["refused"] += 1
                refused[found if reason == REFUSED_BY_THE_TEMPLATE else f"{name}, {shape}: {found}"] += 1
                if not found.startswith(reason):
                    wrong.append(f"{name}, {shape}: {found}")
                continue
            right = found == expected(name, row, tokenizer, shape)
            counts["right" if right else "wrong"] += 1
            if not right:
                wrong.append(f"{name}, {shape}: {found} != {expected(name, row, tokenizer, shape)}")
    with capsys.disabled():
        print(f"\n{len(names)} templates × {len(CONVERSATIONS)} shapes: {dict(counts)}")
        print("\n".join(f"  refused {count:3} {reason}" for reason, count in refused.most_common()))
    assert not wrong, "\n".join(wrong)
    assert len(CONVERSATIONS) >= 20
    assert len(names) == len(templates()) - 2 * len(PICTURES)
    assert counts["right"] > 0.9 * counts.total()


OTHERWISE = {
    "calls otherwise when last": ("call and result", "arguments"),
    "no end when last": ("several turns", "<|end|>"),
    "a prompt after everything": ("several turns", "<|START_RESPONSE|>"),
    "a prompt after everything, plain": ("several turns", "<|START_OF_TURN_TOKEN|>"),
}
"""Templates that are followed otherwise than by the first number of tokens: a conversation, and what differs in it."""


@pytest.mark.parametrize("name", [*AWKWARD, "cohere", "glm4moe", "gptoss", "qwen3", "llama3", "deepseekv3"])
def test_tokens_of_before_are_what_they_were(name: str) -> None:
    tokenizer = tokenizer_of(templates()[name])
    before, now = ChatEncoder(tokenizer, "assistant", 1), ChatEncoder(tokenizer, "assistant")
    made = {shape: [trained(talk, row, tokenizer) for talk in (before, now)] for shape, row in CONVERSATIONS.items()}
    other = {shape for shape, (old, new) in made.items() if old != new}
    if name not in OTHERWISE:
        assert other == set()
        return
    shape, part = OTHERWISE[name]
    assert shape in other
    old, new = ("".join(turns) for turns in made[shape])
    assert old.count(part) != new.count(part) or part == "arguments"
    assert all(turn.rstrip().endswith(">") for turn in made[shape][1][:-1])


def test_a_template_that_wants_tools_says_so() -> None:
    template = "{% for t in tools %}{{ t.function.name }}{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer = tokenizer_of(template)
    row = CONVERSATIONS["single"]
    wanted = "the chat template refuses it: it wants tools, and the row declares none; give them in a column tools"
    assert list(map(str, ChatEncoder(tokenizer, "all").sequences([row]))) == [wanted]
    (found,) = ChatEncoder(tokenizer, "all").sequences([{**row, "tools": CONVERSATIONS["tool call"]["tools"]}])
    assert not isinstance(found, RowError)
