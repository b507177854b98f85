"""Layouts: which columns hold what, by the method, the names and the recipe's word."""

from typing import Any

import pytest

from baton.data import schema
from baton.data.schema import ColumnMapping
from baton.errors import UserError
from baton.recipe import load
from baton.recipe.data import DataSource

GSM8K = {"prompt": "question", "completion": "answer"}


def layout(method: str, present: list[str], source: dict[str, Any] | None = None, **settings: Any) -> ColumnMapping:
    """The layout of a source with these columns."""
    own = {method: {"rewards": ["exact"]}} if method in ("grpo", "rloo") else {}
    document = {
        "name": "tiny",
        "model": {"base": "org/model"},
        "data": {"source": "rows.jsonl", **settings},
        "training": {"method": method, **own},
    }
    recipe = load.validate(document, origin="r.yaml")
    return schema.infer_mapping(DataSource(uri="rows.jsonl", **(source or {})), recipe, present)


BY_OWN_NAMES = {
    "text": ("sft", ["text", "id"], {}, "text"),
    "prompt-completion": ("sft", ["prompt", "completion"], {}, "prompt-completion"),
    "instruction": ("sft", ["instruction", "output", "input"], {}, "instruction"),
    "messages": ("sft", ["messages", "prompt", "completion"], {}, "messages"),
    "ShareGPT": ("sft", ["conversations", "id"], {}, "sharegpt"),
    "mapped": ("sft", ["question", "answer"], GSM8K, "prompt-completion"),
    "mapped text": ("sft", ["body"], {"text": "body"}, "text"),
    "joined": ("sft", ["body", "reply"], {"prompt": ["title", "body"], "completion": "reply"}, "prompt-completion"),
    "more beats less": ("sft", ["text", "prompt", "completion"], {}, "prompt-completion"),
    "own names beat common ones": ("sft", ["text", "question", "answer"], {}, "text"),
    "pretraining takes text alone": ("pretrain", ["text", "prompt", "completion"], {}, "text"),
    "pairs": ("dpo", ["prompt", "chosen", "rejected"], {}, "preference"),
    "pairs without a prompt": ("reward", ["chosen", "rejected", "score"], {}, "preference"),
    "pairs beside messages": ("orpo", ["messages", "chosen", "rejected"], {}, "preference"),
    "pairs by other names": ("cpo", ["good", "bad"], {"chosen": "good", "rejected": "bad"}, "preference"),
    "ranked": ("dpo", ["prompt", "responses", "scores"], {}, "ranked"),
    "ratings": ("kto", ["prompt", "completion", "label"], {}, "rated"),
    "pairs to be rated": ("kto", ["prompt", "chosen", "rejected"], {}, "preference"),
    "ratings beat pairs": ("kto", ["prompt", "completion", "label", "chosen", "rejected"], {}, "rated"),
    "prompts": ("grpo", ["prompt", "completion", "text"], {}, "prompt"),
    "mapped prompts": ("rloo", ["question", "answer"], {"prompt": "question"}, "prompt"),
}


@pytest.mark.parametrize(("method", "present", "mapping", "expected"), BY_OWN_NAMES.values(), ids=BY_OWN_NAMES)
def test_the_format(method: str, present: list[str], mapping: dict[str, Any], expected: str):
    assert layout(method, present, columns=mapping).format == expected


COMMON: dict[str, tuple[str, list[str], str, dict[str, str]]] = {
    "prompt and response": ("sft", ["prompt", "response"], "prompt-completion", {"prompt": "prompt"}),
    "question and answer": ("sft", ["question", "answer", "id"], "prompt-completion", {"prompt": "question"}),
    "query and response": ("sft", ["query", "response"], "prompt-completion", {"completion": "response"}),
    "input and output": ("sft", ["input", "output"], "prompt-completion", {"prompt": "input", "completion": "output"}),
    "instruction and response": (
        "sft",
        ["instruction", "context", "response", "category"],
        "instruction",
        {"instruction": "instruction", "input": "context", "output": "response"},
    ),
    "input beside an instruction": ("sft", ["instruction", "input", "response"], "instruction", {"input": "input"}),
    "content": ("pretrain", ["content", "url"], "text", {"text": "content"}),
    "a conversation": ("sft", ["conversation"], "sharegpt", {"conversations": "conversation"}),
    "a question to pairs": ("dpo", ["question", "chosen", "rejected"], "preference", {"prompt": "question"}),
    "an instruction to pairs": ("dpo", ["instruction", "chosen", "rejected"], "preference", {"prompt": "instruction"}),
    "completions": ("dpo", ["prompt", "completions", "ratings"], "ranked", {"scores": "ratings"}),
    "rated response": ("kto", ["prompt", "response", "label"], "rated", {"completion": "response"}),
    "question and answer to reward": ("grpo", ["question", "answer"], "prompt", {"prompt": "question"}),
    "problem and solution": ("grpo", ["problem", "solution"], "prompt", {"prompt": "problem", "answer": "solution"}),
}


@pytest.mark.parametrize(("method", "present", "expected", "columns"), COMMON.values(), ids=COMMON)
def test_common_names(method: str, present: list[str], expected: str, columns: dict[str, str]):
    found = layout(method, present)

    assert found.format == expected
    assert found.columns.items() >= columns.items()


def test_a_format_that_is_named_is_taken():
    assert layout("sft", ["messages", "text"], format="text").format == "text"


def test_a_source_has_a_format_and_columns_of_its_own():
    found = layout("sft", ["q", "a", "text"], {"columns": {"prompt": "q", "completion": "a"}}, format="text")
    own = layout("sft", ["q", "a", "text"], {"format": "auto", "columns": {"prompt": "q", "completion": "a"}})

    assert (found.format, found.columns) == ("text", {"text": "text"})
    assert (own.format, own.columns) == ("prompt-completion", {"prompt": "q", "completion": "a"})


def test_a_column_that_is_mapped_may_come_later():
    found = layout("sft", ["instruction", "output"], columns={"input": "context"})

    assert found.columns == {"instruction": "instruction", "output": "output", "input": "context"}


UNFIT = {
    "unknown": (
        "pretrain",
        ["question", "answer"],
        "no format that pretrain learns from (text: text)",
        "text: map what holds it with data.columns, for example {text: …}",
    ),
    "half": (
        "dpo",
        ["prompt", "chosen"],
        "no format that dpo learns from (preference: chosen, rejected; ranked: prompt, responses)",
        "preference: map what holds it with data.columns, for example {chosen: chosen, rejected: …}",
    ),
    "of another method": (
        "grpo",
        ["text", "messages"],
        "no format that grpo learns from (prompt: prompt)",
        "prompt: map what holds it with data.columns, for example {prompt: messages}",
    ),
    "supervised": (
        "sft",
        ["prompt", "chosen", "rejected"],
        "no format that sft learns from (text: text; prompt-completion: prompt, completion; instruction: instruction, "
        "output; messages: messages; sharegpt: conversations; tool-calls: prompt, calls, tools)",
        "prompt-completion: map what holds it with data.columns, for example {prompt: prompt, completion: chosen}",
    ),
}


HINTS = {
    "question and answer in one letter": ("sft", ["Q", "A"], "{prompt: Q, completion: A}"),
    "the answer first": ("sft", ["A", "Q"], "{prompt: Q, completion: A}"),
    "two of another language": ("sft", ["Frage", "Antwort"], "{prompt: Frage, completion: Antwort}"),
    "another language, beside an index": (
        "sft",
        ["row_id", "Frage", "Antwort", "lang"],
        "{prompt: Frage, completion: Antwort}",
    ),
    "more than two": ("sft", ["Thema", "Frage", "Antwort"], "{prompt: …, completion: …}"),
    "one by its name": ("sft", ["notes", "reply_text", "user_text"], "{prompt: user_text, completion: reply_text}"),
    "one of two by its name": ("sft", ["b", "my_prompt"], "{prompt: my_prompt, completion: b}"),
    "sides by their names": ("dpo", ["bad_reply", "good_reply"], "{chosen: good_reply, rejected: bad_reply}"),
    "sides that nothing tells apart": ("dpo", ["left", "right"], "{chosen: …, rejected: …}"),
    "a label that nothing tells": (
        "kto",
        ["prompt", "completion", "x"],
        "{prompt: prompt, completion: completion, label: …}",
    ),
    "a tree of OpenAssistant": (
        "sft",
        [
            "message_tree_id",
            "prompt",
            "prompt.lang",
            "prompt.replies",
            "prompt.replies.0",
            "prompt.replies.0.text",
            "prompt.text",
        ],
        "{prompt: prompt.text, completion: …}",
    ),
    "lists of distilabel": (
        "dpo",
        ["instruction", "generations", "generations.0", "generations.1", "labels", "labels.0"],
        "{prompt: instruction, responses: generations}",
    ),
    "steps with labels": (
        "sft",
        ["prompt", "completions", "completions.0", "completions.1", "labels", "labels.0"],
        "{prompt: prompt, completion: …}",
    ),
}


@pytest.mark.parametrize("name", HINTS)
def test_a_hint_swaps_no_columns(name: str):
    method, present, example = HINTS[name]
    with pytest.raises(UserError) as caught:
        layout(method, present)
    assert f"for example {example}." in str(caught.value.remedy)


def test_a_table_without_names_is_told_so():
    with pytest.raises(UserError) as caught:
        layout("sft", ["Where is lamp 0?", "In room 0, on the left."])
    assert caught.value.remedy == (
        "The first line seems to be a row; put one with names before it, such as prompt,completion."
    )


MESSAGES = ["message_id", "parent_id", "text", "role", "lang"]


def test_messages_that_are_rows_are_no_texts():
    with pytest.raises(UserError, match=r"one message a row \(role, parent_id\), and not whole conversations"):
        layout("sft", MESSAGES)
    for found in (
        layout("sft", MESSAGES, format="text"),
        layout("sft", MESSAGES, columns={"text": "text"}),
        layout("pretrain", MESSAGES),
    ):
        assert found.columns == {"text": "text"}


FOR_OTHERS = {
    ("pretrain", "question", "answer"): (
        "Rows of prompt-completion are for sft: set training.method: sft. Or keep pretrain:"
    ),
    ("grpo", "text", "messages"): "Rows of messages are for sft: set training.method: sft. Or keep grpo:",
    ("sft", "prompt", "chosen", "rejected"): (
        "Rows of preference are for dpo, kto, reward, orpo and cpo: set training.method: dpo. Or keep sft:"
    ),
}
"""Method and columns → which methods learn from such rows, where others do."""


@pytest.mark.parametrize(("method", "present", "message", "nearest"), UNFIT.values(), ids=UNFIT)
def test_columns_that_fit_nothing(method: str, present: list[str], message: str, nearest: str):
    with pytest.raises(UserError) as caught:
        layout(method, sorted(present))

    assert caught.value.message == (
        f"data.source 'rows.jsonl' has columns {', '.join(sorted(present))}, which fit {message}."
    )
    others = FOR_OTHERS.get((method, *present))
    assert caught.value.remedy == (f"{others} the nearest is {nearest}." if others else f"The nearest is {nearest}.")


def test_what_lies_within_a_column_is_not_named_beside_it():
    with pytest.raises(UserError) as caught:
        layout("sft", ["id", "pair", "pair.de", "pair.en"])

    assert caught.value.message.startswith("data.source 'rows.jsonl' has columns id, pair, which fit no format")
    assert caught.value.remedy is not None
    assert "{prompt: pair.de, completion: pair.en}" in caught.value.remedy


def test_names_of_any_case_come_last():
    upper = layout("sft", ["Question", "Answer"])
    both = layout("sft", ["Question", "Answer", "content"])

    assert upper.columns == {"prompt": "Question", "completion": "Answer"}
    assert both.columns == {"text": "content"}


SIDE_BY_SIDE = {
    "scores": (["answer_0", "answer_1", "score_0", "score_1"], {"scores": ["score_0", "score_1"]}),
    "ranks": (["answer_0", "answer_1", "rank_0", "rank_1"], {"ranks": ["rank_0", "rank_1"]}),
    "a name": (["answer_0", "answer_1", "winner"], {"preferred": "winner"}),
    "a margin": (["answer_0", "answer_1", "margin"], {"margin": "margin"}),
    "scores of their own": (
        ["answer_0", "answer_1", "answer_0_score", "answer_1_score"],
        {"scores": ["answer_0_score", "answer_1_score"]},
    ),
}


@pytest.mark.parametrize(("present", "judged"), SIDE_BY_SIDE.values(), ids=SIDE_BY_SIDE)
def test_answers_side_by_side(present: list[str], judged: dict[str, Any]):
    found = layout("dpo", ["prompt", *present])

    assert (found.format, found.whole) == ("ranked", False)
    assert found.columns == {"prompt": "prompt", "responses": ["answer_0", "answer_1"], **judged}


@pytest.mark.parametrize(
    "present",
    [["prompt", "answer_0", "answer_1"], ["prompt", "answer_0", "score_0"], ["answer_0", "answer_1", "winner"]],
    ids=["nothing says which is better", "one answer", "no prompt"],
)
def test_answers_side_by_side_that_are_no_pair(present: list[str]):
    with pytest.raises(UserError):
        layout("dpo", present)


def test_answers_side_by_side_of_which_the_recipe_says_the_better():
    with pytest.raises(UserError) as caught:
        layout("dpo", ["best", "prompt", "response1", "response2"])
    assert caught.value.remedy == (
        "The nearest is ranked: map what holds it with data.columns, for example "
        "{responses: [response1, response2], preferred: …}."
    )

    found = layout("dpo", ["best", "prompt", "response1", "response2"], columns={"preferred": "best"})
    whole = layout("dpo", ["best", "x", "y"], columns={"responses": ["x", "y"], "preferred": "best"})

    assert found.columns == {"prompt": "prompt", "responses": ["response1", "response2"], "preferred": "best"}
    assert (whole.columns, whole.whole) == ({"responses": ["x", "y"], "preferred": "best"}, True)


def test_what_the_recipe_maps_goes_before_what_is_joined():
    squad = ["context", "question", "answers", "answers.text", "answers.text.0"]

    assert layout("sft", squad).columns["prompt"] == ["context", "question"]
    assert layout("sft", squad, columns={"prompt": "question"}).columns["prompt"] == "question"


def test_steps_with_labels_are_not_ranked():
    with pytest.raises(UserError):
        layout("reward", ["prompt", "completions", "labels"])


WRONG: dict[str, tuple[list[str], dict[str, Any], dict[str, Any], str]] = {
    "a format that is not there": (
        ["body"],
        {},
        {"format": "text"},
        "data.source 'rows.jsonl' has columns body, which fit not the configured format (text: text).",
    ),
    "a source's format that the method does not learn from": (
        ["prompt"],
        {"format": "preference"},
        {},
        "data.source 'rows.jsonl' has format preference, and sft learns from text or prompt-completion or instruction "
        "or messages or sharegpt or tool-calls.",
    ),
    "a column that is mapped and not there": (
        ["question", "reply"],
        {},
        {"columns": {"prompt": "questoin", "completion": "reply"}},
        "data.columns.prompt: 'questoin' is not a column of rows.jsonl; its first rows have question, reply.",
    ),
    "a further column that is not there": (
        ["text", "id"],
        {},
        {"extra_columns": ["level"]},
        "data.extra_columns: 'level' is not a column of rows.jsonl; its first rows have id, text.",
    ),
    "a further column that is called like what comes out": (
        ["prompt", "question", "answer"],
        {},
        {"columns": GSM8K, "extra_columns": ["prompt"]},
        "data.extra_columns: 'prompt' is a column of rows.jsonl, and the name of what comes out of 'question'; "
        "both cannot be kept.",
    ),
}


@pytest.mark.parametrize(("present", "source", "settings", "message"), WRONG.values(), ids=WRONG)
def test_what_is_said_of_a_source_and_is_not_so(
    present: list[str], source: dict[str, Any], settings: dict[str, Any], message: str
):
    with pytest.raises(UserError) as caught:
        layout("sft", present, source, **settings)

    assert caught.value.message == message


def test_sources_that_do_not_go_together():
    text, chat = layout("sft", ["text"]), layout("sft", ["messages"])

    schema.require_one_shape([("a.jsonl", chat), ("b.jsonl", layout("sft", ["conversations"]))])
    with pytest.raises(UserError) as caught:
        schema.require_one_shape([("a.jsonl", text), ("b.jsonl", text), ("c.jsonl", chat)])

    assert caught.value.message == (
        "data.source: a.jsonl is text and c.jsonl is messages, which are not trained on together."
    )
