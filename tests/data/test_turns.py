"""Rows of texts on a chat model: their tokens are those of its template on the conversation that they are."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

import datasets
import pytest
from transformers import PreTrainedTokenizerBase
from trl import SFTConfig, SFTTrainer

from baton import events
from baton.data import preview, tokenize
from baton.errors import UserError
from baton.models import chat, loading
from baton.models.train_rows import IGNORED
from baton.pages import collect, publish, quality_page, run_page
from baton.recipe.recipe import Recipe
from baton.runs.run import Run
from baton.store import bundle
from baton.store.storage import Storage
from tests.support import tiny

Row = dict[str, Any]

LIMIT = 200
QUESTIONS = ["What is 3 and 4?", "naïve 🙂 日本語", "a\n\nb", "  spaces  ", "<|eot|> in it"]
INSTRUCTIONS = [chat.alpaca(question, context) for question in QUESTIONS for context in ("", "1 and\n\n2")]
SYSTEM = {"role": "system", "content": "Be brief."}


def recipe(base: str, method: str = "sft", **data: Any) -> Recipe:
    """A recipe for a base."""
    own = {"grpo": {"rewards": ["length"], "num_generations": 8}} if method == "grpo" else {}
    return tiny.recipe(base, training={"method": method, **own}, data={"max_length": LIMIT, **data})


def ids(tokenizer: PreTrainedTokenizerBase, turns: list[tuple[str, str]], **options: Any) -> list[int]:
    """The template's own tokens of a conversation."""
    messages = [{"role": role, "content": content} for role, content in turns]
    return list(tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, **options)["input_ids"])


@pytest.fixture
def tokenizer(chat_base: str) -> PreTrainedTokenizerBase:
    """That of the chat model."""
    return loading.load_tokenizer(chat_base)


@pytest.mark.parametrize("prompt", [*QUESTIONS, *INSTRUCTIONS])
@pytest.mark.parametrize("system", [None, "Be brief."])
def test_prompt_and_completion(
    prompt: str, system: str | None, chat_base: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    given = recipe(chat_base, separator="###", system=system)
    (row,) = tiny.encoder(given, tokenizer)({"prompt": prompt, "completion": " It is 7.\n"})
    head = [*([("system", system)] if system else []), ("user", chat.strip_alpaca(prompt))]
    whole = ids(tokenizer, [*head, ("assistant", " It is 7.\n")])
    begin = ids(tokenizer, head, add_generation_prompt=True)
    assert row["input_ids"] == whole
    assert whole[: len(begin)] == begin
    assert row["labels"] == [IGNORED] * len(begin) + whole[len(begin) :]
    assert whole.count(tokenizer.bos_token_id) == 1
    assert "###" not in tokenizer.decode(whole).replace("### Instruction", "")


@pytest.mark.parametrize("prompt", QUESTIONS)
def test_preference(prompt: str, chat_base: str, tokenizer: PreTrainedTokenizerBase) -> None:
    answers = {"chosen": "7.", "rejected": "7,5."}
    begin = ids(tokenizer, [("user", prompt)], add_generation_prompt=True)
    wholes = {side: ids(tokenizer, [("user", prompt), ("assistant", text)]) for side, text in answers.items()}
    (pair,) = tiny.encoder(recipe(chat_base, "dpo"), tokenizer)({"prompt": prompt, **answers})
    assert pair["prompt_ids"] == begin
    for side, whole in wholes.items():
        assert pair["prompt_ids"] + pair[f"{side}_ids"] == whole
    (scored,) = tiny.encoder(recipe(chat_base, "reward"), tokenizer)({"prompt": prompt, **answers})
    assert scored == {f"{side}_ids": whole for side, whole in wholes.items()}
    rated = tiny.encoder(recipe(chat_base, "kto"), tokenizer)({"prompt": prompt, **answers})
    assert [row["prompt_ids"] + row["completion_ids"] for row in rated] == list(wholes.values())
    assert [row["label"] for row in rated] == [True, False]
    (single,) = tiny.encoder(recipe(chat_base, "kto"), tokenizer)(
        {"prompt": prompt, "completion": "7.", "label": False}
    )
    assert single["prompt_ids"] + single["completion_ids"] == wholes["chosen"]
    assert single["label"] is False


@pytest.mark.parametrize("prompt", QUESTIONS)
def test_prompt_that_the_model_answers(prompt: str, chat_base: str, tokenizer: PreTrainedTokenizerBase) -> None:
    given = recipe(chat_base, "grpo", extra_columns=["level"], system="Be brief.")
    (row,) = tiny.encoder(given, tokenizer)({"prompt": prompt, "answer": "7", "level": "1"})
    assert row == {
        "prompt": [SYSTEM, {"role": "user", "content": prompt}],
        "prompt_text": f"{prompt}\n",
        "answer": "7",
        "level": "1",
        "length": len(ids(tokenizer, [("system", "Be brief."), ("user", prompt)], add_generation_prompt=True)),
    }


def test_columns_that_are_kept_stay_texts(chat_base: str, tokenizer: PreTrainedTokenizerBase) -> None:
    given = recipe(chat_base, extra_columns=["prompt"])
    (row,) = tiny.encoder(given, tokenizer)({"prompt": "a", "completion": "b"})
    assert row["prompt"] == "a"


@pytest.mark.parametrize("how", ["auto", "text", "chat"])
def test_plain_text_is_never_a_turn(how: str, chat_base: str, tokenizer: PreTrainedTokenizerBase) -> None:
    for method in ("sft", "pretrain"):
        (row,) = tiny.encoder(recipe(chat_base, method, render_as=how), tokenizer)({"text": "a b"})
        assert row["input_ids"] == row["labels"] == tokenizer("a b</s>")["input_ids"]


def test_a_tokenizer_of_batons_own_writes_text_unless_asked(tiny_base: str) -> None:
    own, row = loading.load_tokenizer(tiny_base), {"prompt": "a", "completion": "b"}
    (text,) = tiny.encoder(recipe(tiny_base), own)(row)
    assert text["input_ids"] == own("a\nb<|end|>")["input_ids"]
    (asked,) = tiny.encoder(recipe(tiny_base, render_as="chat"), own)(row)
    assert asked["input_ids"] == ids(own, [("user", "a"), ("assistant", "b")])


def test_trl_gives_the_same_tokens_to_the_rows_written_as_messages(
    chat_base: str, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    texts = [{"prompt": prompt, "completion": "It is 7."} for prompt in QUESTIONS]
    talks = [
        {
            "prompt": [{"role": "user", "content": row["prompt"]}],
            "completion": [{"role": "assistant", "content": row["completion"]}],
        }
        for row in texts
    ]

    def theirs(rows: list[Row]) -> Any:
        config = SFTConfig(output_dir=str(tmp_path), report_to="none", use_cpu=True, max_length=LIMIT)
        model, data = loading.load_model(chat_base), datasets.Dataset.from_list(rows)
        return SFTTrainer(model=model, args=config, train_dataset=data, processing_class=tokenizer).train_dataset

    ours = [row for text in texts for row in tiny.encoder(recipe(chat_base), tokenizer)(text)]
    assert [row["input_ids"] for row in ours] == list(theirs(talks)["input_ids"])
    as_text = [
        row
        for text in texts
        for row in tiny.encoder(recipe(chat_base, render_as="text", separator=""), tokenizer)(text)
    ]
    assert [row["input_ids"] for row in as_text] == list(theirs(texts)["input_ids"])


def tokenized(given: Recipe, rows: list[Row], folder: Path) -> dict[str, Any]:
    """Runs the tokenize stage over rows that are split already."""
    run = Run(Storage(str(folder / "store")), "run-1")
    run.create(given)
    split = folder / "split"
    split.mkdir(parents=True)
    for side in ("train", "eval"):
        (split / f"{side}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    bundle.publish(run.storage, "data/digest/split", str(split), kind="split", meta={})
    run.set_once("data.json", {"digest": "digest", "rows": 2 * len(rows)})
    return {"run": run, **tokenize.tokenize_run(run.uri)}


TEXTS: list[Row] = [{"prompt": f"What is {n}?", "completion": f"It is {n}."} for n in range(6)]
TALKS: list[Row] = [
    {"messages": [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["completion"]}]}
    for row in TEXTS
]
PLAIN: list[Row] = [{"text": f"It is {n}."} for n in range(6)]


@pytest.mark.parametrize(
    ("rows", "data", "is_new"),
    [
        (TEXTS, {}, True),
        (TEXTS, {"render_as": "chat"}, True),
        (TEXTS, {"render_as": "text"}, False),
        (TALKS, {}, False),
        (TALKS, {"render_as": "chat"}, False),
        (TALKS, {"system": "Be brief."}, True),
        (PLAIN, {}, False),
        (PLAIN, {"system": "Be brief.", "render_as": "chat"}, False),
    ],
)
def test_the_address_of_tokens_changes_where_they_do(
    rows: list[Row], data: Row, is_new: bool, chat_base: str, tmp_path: Path
) -> None:
    given = recipe(chat_base, **data)
    found = tokenized(given, rows, tmp_path)
    base = loading.model_identity(chat_base)
    before = tokenize.tokens_digest(given, "digest", base, None)
    assert (found["digest"] != before) is is_new
    assert found["digest"] == tokenize.tokens_digest(given, "digest", base, None, is_rendered=is_new)


def test_texts_and_the_conversations_that_they_are_give_the_same_tokens(chat_base: str, tmp_path: Path) -> None:
    texts = tokenized(recipe(chat_base, completion_only_loss=False), TEXTS, tmp_path / "texts")
    talks = tokenized(recipe(chat_base), TALKS, tmp_path / "talks")
    assert texts["tokens"] == talks["tokens"] > 0
    assert texts["first"] == talks["first"]


def test_a_template_that_is_asked_for_and_missing_is_told_before_anything_is_made(tmp_path: Path) -> None:
    base = tiny.make_chat_base(tmp_path / "base", template=None)
    with pytest.raises(UserError, match=r"render_as: chat.*no chat template.*Set model\.chat_template"):
        tokenized(recipe(base, render_as="chat"), TEXTS, tmp_path / "run")
    given = tiny.recipe(base, data={"render_as": "chat"}, model={"chat_template": "zephyr"})
    found = tokenized(given, TEXTS, tmp_path / "other")
    assert "<|user|>" in found["first"]["train"][0]
    assert given.model.chat_template == "zephyr" in chat.TEMPLATES


def test_a_system_message_without_a_conversation_is_refused(tiny_base: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data\.system: prompts are trained as text"):
        tokenized(recipe(tiny_base, system="Be brief."), TEXTS, tmp_path)


def test_baton_s_own_template_for_those_who_ask(tmp_path: Path) -> None:
    model = {"base": None, "from_scratch": {"hidden_size": 16}, "tokenizer": {"train": {"vocab_size": 300}}}
    asked = tokenized(tiny.recipe("", model=model, data={"render_as": "chat"}), TEXTS, tmp_path / "asked")
    assert asked["first"]["train"][0].startswith(r"<|im_start|>user\nWhat is")
    plain = tokenized(tiny.recipe("", model=model), TEXTS, tmp_path / "plain")
    assert plain["first"]["train"][0].startswith("What is")


def heard(printed: str) -> Row:
    """The fields of the event that ends the stage."""
    return next(
        event.fields() for line in printed.splitlines() if isinstance(event := events.parse(line), events.Tokens)
    )


def test_log_card_and_pages_say_it_with_one_row(
    chat_base: str, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_EVENTS", "stdout")
    given = recipe(chat_base, system="Be brief.")
    found = tokenized(given, TEXTS, tmp_path)
    event = heard(capsys.readouterr().out)
    told = f"{chat.TURNS} in the chat template of {chat_base}, with data.system (data.render_as: auto)"
    row = r"<s><|system|>\nBe brief.<|eot|><|user|>\nWhat is 0?<|eot|><|assistant|>\n⟦It is 0.<|eot|>⟧"
    assert event["rendered"] == told
    assert event["rendered_row"].startswith(row)
    card_text = preview.tokens_card(given, found).text
    assert told in card_text
    assert row in card_text
    run: Run = found["run"]
    known = quality_page.collect(run)
    quality = html.unescape(quality_page.render(known))
    assert told[1:] in quality
    assert row in quality
    run.put("split.json", {"rows": 12, "source": "rows.jsonl"})
    report = collect.collect(run)
    shown = html.unescape(run_page.render(report))
    assert told in shown
    assert row in shown
    for counts in (
        quality_page.render(quality_page.without_examples(known)),
        run_page.render(publish.without_texts(report)),
    ):
        assert told[1:] in html.unescape(counts)
        assert "Be brief" not in counts.partition("<h2>Recipe")[0].partition("<summary>Recipe")[0]


def test_nothing_is_said_of_rows_that_are_rendered_as_they_came(
    chat_base: str, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_EVENTS", "stdout")
    given = recipe(chat_base)
    found = tokenized(given, TALKS, tmp_path)
    assert "rendered" not in heard(capsys.readouterr().out)
    assert "render_as" not in preview.tokens_card(given, found).text
    assert quality_page.read_rendering(found["run"]) is None


def test_counts_alone_are_logged_without_the_row(
    chat_base: str, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_EVENTS", "stdout")
    given = recipe(chat_base)
    given = given.model_copy(update={"tracking": given.tracking.model_copy(update={"cards": "counts"})})
    found = tokenized(given, TEXTS, tmp_path)
    printed = capsys.readouterr().out
    assert "rendered_row" not in heard(printed)
    assert "What is" not in printed
    assert chat.TURNS in preview.tokens_card(given, found).text
