"""A method's rows after the tokenize stage are those that its TRL trainer makes of the same rows itself."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import pytest
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerBase
from trl import (
    DPOConfig,
    DPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)

from baton.data import encoding, normalize, tokenize
from baton.data.schema import ColumnMapping
from baton.errors import UserError
from baton.models import loading
from baton.models.train_rows import IGNORED
from baton.recipe import load
from baton.recipe.recipe import Recipe
from baton.runs.run import Run
from baton.store import bundle
from baton.store.manifest import read_manifest
from baton.store.storage import Storage
from tests.support import tiny

Row = dict[str, Any]

LIMIT = 48
AWKWARD = [
    ("x ", " spaces meet spaces", "or  do not"),
    ("naïve 🙂", "日本語 \u0000 \r\n\ttabs", "é"),
    ("ends", "by itself<|end|>", "not by itself"),
    ("long " * 60, "never reached", "nor this"),
    ("short", "long " * 60, "short"),
    ("short", "also short", "long " * 60),
    ("just " * 20, "cut in the middle of it", "cut as well, but elsewhere"),
    ("<|im_start|>", "special<|im_end|>", "<|pad|>"),
    ("dates", "2024-01-01", "true"),
]
PAIRS: list[Row] = [
    *({"prompt": f"area {n} of", "chosen": f"a rectangle {n}", "rejected": f"a fox {n * n}"} for n in range(20)),
    *({"prompt": prompt, "chosen": chosen, "rejected": rejected} for prompt, chosen, rejected in AWKWARD),
]


def said(role: str, content: str) -> dict[str, str]:
    """A message."""
    return {"role": role, "content": content}


TALKED: list[Row] = [
    {
        "prompt": [said("user", row["prompt"])],
        "chosen": [said("assistant", row["chosen"])],
        "rejected": [said("assistant", row["rejected"])],
    }
    for row in PAIRS
]
TURNS: list[Row] = [
    {
        "prompt": [said("system", "Be brief."), said("user", "a"), said("assistant", "b"), said("user", f"c{n}")],
        "chosen": [said("assistant", "d"), said("user", "e"), said("assistant", f"f{n}")],
        "rejected": [said("assistant", f"g{n}")],
    }
    for n in range(3)
]
MESSAGES: list[Row] = [{"messages": row["prompt"] + row["chosen"]} for row in (*TALKED, *TURNS)]


def rated(rows: list[Row]) -> list[Row]:
    """Every third answer is bad."""
    return [
        {"prompt": row["prompt"], "completion": row["chosen"], "label": number % 3 > 0}
        for number, row in enumerate(rows)
    ]


def recipe(store: str, method: str, **data: Any) -> Recipe:
    """A recipe with a tokenizer of its own."""
    own = {method: {"rewards": ["length"]}} if method == "grpo" else {}
    return load.validate(
        {
            "name": "tiny",
            "store": store,
            "model": {"from_scratch": {"hidden_size": 16}, "tokenizer": {"train": {"vocab_size": 300}}},
            "data": {"source": "rows.jsonl", "max_length": LIMIT, **data},
            "training": {"method": method, **own},
            "tracking": {"mlflow": None},
        },
        origin="r.yaml",
    )


def tokenized(given: Recipe, rows: list[Row], folder: Path) -> tuple[datasets.Dataset, PreTrainedTokenizerBase, Any]:
    """Runs the tokenize stage over rows that are split already; returns its rows, its tokenizer and its counts."""
    run = Run(Storage(given.store.uri), "run-1")
    run.create(given)
    split = folder / "split"
    split.mkdir()
    for side in ("train", "eval"):
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (split / f"{side}.jsonl").write_text(lines, encoding="utf-8")
    bundle.publish(run.storage, "data/digest/split", str(split), kind="split", meta={})
    run.set_once("data.json", {"digest": "digest", "rows": 2 * len(rows)})
    counts = tokenize.tokenize_run(run.uri)
    prefix = run.require("tokens.json")["prefix"]
    manifest = read_manifest(run.storage, prefix)
    assert manifest is not None
    found = run.storage.key(manifest.path(prefix))
    return datasets.load_from_disk(f"{found}/train"), loading.load_tokenizer(f"{found}/tokenizer"), counts


KINDS: dict[str, tuple[Any, Any, Any]] = {
    "sft": (SFTTrainer, SFTConfig, LlamaForCausalLM),
    "dpo": (DPOTrainer, DPOConfig, LlamaForCausalLM),
    "orpo": (DPOTrainer, DPOConfig, LlamaForCausalLM),
    "cpo": (DPOTrainer, DPOConfig, LlamaForCausalLM),
    "kto": (KTOTrainer, KTOConfig, LlamaForCausalLM),
    "reward": (RewardTrainer, RewardConfig, LlamaForSequenceClassification),
}
COLUMNS = {
    "sft": ("input_ids", "labels"),
    "kto": ("prompt_ids", "completion_ids", "label"),
    "reward": ("chosen_ids", "rejected_ids"),
    **dict.fromkeys(("dpo", "orpo", "cpo"), ("prompt_ids", "chosen_ids", "rejected_ids")),
}


def by_trl(method: str, rows: list[Row], tokenizer: Any, folder: Path, **settings: Any) -> datasets.Dataset:
    """Returns the rows of a TRL trainer that was given texts or messages; a separator is part of the prompt."""
    trainer, config, model = KINDS[method]
    sized = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_labels=1,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    given = [{**row, "prompt": row["prompt"] + "\n"} if isinstance(row.get("prompt"), str) else row for row in rows]
    extra = {"ref_model": model(sized)} if method in ("dpo", "orpo", "cpo", "kto") else {}
    made = trainer(
        model=model(sized),
        args=config(str(folder), max_length=LIMIT, report_to="none", bf16=False, **settings),
        train_dataset=datasets.Dataset.from_list(given),
        processing_class=tokenizer,
        **extra,
    )
    return made.train_dataset


CASES: dict[str, tuple[str, list[Row], Row, Row]] = {
    **{f"{method}, texts": (method, PAIRS, {}, {}) for method in ("dpo", "orpo", "cpo", "reward")},
    **{f"{method}, conversations": (method, [*TALKED, *TURNS], {}, {}) for method in ("dpo", "orpo", "cpo", "reward")},
    "kto, texts": ("kto", rated(PAIRS), {}, {}),
    "kto, conversations": ("kto", rated([*TALKED, *TURNS]), {}, {}),
    "sft, completions": ("sft", [{"prompt": x["prompt"], "completion": x["chosen"]} for x in PAIRS], {}, {}),
    "sft, conversations": ("sft", MESSAGES, {}, {}),
    "sft, what the assistant says": ("sft", MESSAGES, {"train_on": "assistant"}, {"assistant_only_loss": True}),
}


@pytest.mark.parametrize(("method", "rows", "data", "settings"), CASES.values(), ids=CASES)
def test_rows_become_what_trl_makes_of_them(
    method: str, rows: list[Row], data: Row, settings: Row, tmp_path: Path
) -> None:
    ours, tokenizer, counts = tokenized(recipe(str(tmp_path / "store"), method, **data), rows, tmp_path)
    theirs = by_trl(method, rows, tokenizer, tmp_path, **settings)
    columns = COLUMNS[method]
    assert sorted(ours.column_names) == sorted(columns)
    expected = theirs.select_columns(columns).to_list()
    if settings:  # the template's mark holds the newline after the end token as well, which TRL trains
        end, newline = tokenizer.convert_tokens_to_ids(["<|im_end|>", "Ċ"])
        for row in expected:
            after = zip([None, *row["labels"]], row["labels"], strict=False)
            row["labels"] = [-100 if pair == (end, newline) else pair[1] for pair in after]
    assert ours.to_list() == expected
    assert counts["truncated"] > 0, "some are too long"
    assert counts["train"] + counts["dropped"] / 2 == len(rows)


@pytest.mark.parametrize("rows", [PAIRS, [*TALKED, *TURNS]], ids=["texts", "conversations"])
def test_pairs_become_ratings_as_trl_makes_them(rows: list[Row], tmp_path: Path) -> None:
    """TRL puts all good answers before all bad ones, Baton each pair's together; both are shuffled later."""
    ours, tokenizer, _ = tokenized(recipe(str(tmp_path / "store"), "kto"), rows, tmp_path)
    theirs = by_trl("kto", rows, tokenizer, tmp_path)

    def counted(found: datasets.Dataset) -> Counter[str]:
        return Counter(repr([row[name] for name in COLUMNS["kto"]]) for row in found)

    assert counted(ours) == counted(theirs)
    assert ours["label"][:2] == [True, False]


def test_texts_that_share_their_prompt_are_trained_as_they_are(tmp_path: Path) -> None:
    """A separator of nothing keeps the text, and TRL, given the two texts, trains the same."""
    head = "\n\nHuman: what is it?\n\nAssistant:"
    texts = [{"chosen": f"{head} {x['chosen']}.", "rejected": f"{head} ~ {x['rejected']}."} for x in PAIRS]
    rows = [normalize.normalize_row(dict(row), ColumnMapping(format="preference", columns={})) for row in texts]
    assert all(isinstance(row, dict) and row["prompt"] == head for row in rows)

    given = recipe(str(tmp_path / "store"), "dpo", separator="")
    ours, tokenizer, _ = tokenized(given, [row for row in rows if isinstance(row, dict)], tmp_path)
    theirs = by_trl("dpo", texts, tokenizer, tmp_path)

    assert ours.to_list() == theirs.select_columns(COLUMNS["dpo"]).to_list()


def test_a_separator_is_the_prompts(tmp_path: Path) -> None:
    given = recipe(str(tmp_path / "store"), "dpo", separator="|")
    rows = [{"prompt": "ab", "chosen": "cd", "rejected": "ce"}]
    ours, tokenizer, _ = tokenized(given, rows, tmp_path)
    decoded = {name: tokenizer.decode(ours[0][f"{name}_ids"]) for name in ("prompt", "chosen", "rejected")}
    assert decoded == {"prompt": "ab|", "chosen": "cd<|end|>", "rejected": "ce<|end|>"}


PROMPTS = {
    "text": (
        "The quick brown fox jumps over 13 lazy dogs & 27 sleeping cats; why, @home?",
        "The quick brown fox jumps over 13 lazy dogs & 27 sleeping cats; why, @home?\n",
    ),
    "conversation": ([said("user", "a b")], "<|im_start|>user\na b<|im_end|>\n<|im_start|>assistant\n"),
}


@pytest.mark.parametrize(("prompt", "rendered"), PROMPTS.values(), ids=PROMPTS)
def test_a_prompt_to_answer_stays_what_it_is(prompt: Any, rendered: str, tmp_path: Path) -> None:
    """One that fills the limit is kept, and one token more is too long."""
    rows = [{"prompt": prompt, "answer": "d", "level": str(number)} for number in range(3)]
    found = {}
    for limit in (64, 0, -1):
        folder = tmp_path / str(limit)
        folder.mkdir()
        length = limit if limit > 0 else found[64]["length"] + limit
        given = recipe(str(folder / "store"), "grpo", extra_columns=["level"], max_length=length)
        try:
            ours, tokenizer, counts = tokenized(given, rows, folder)
        except UserError as error:
            found[limit] = str(error)
            continue
        assert (len(ours), counts["dropped"]) == (3, 0)
        found[limit] = ours[2]
        assert ours[2]["length"] == len(tokenizer(rendered)["input_ids"])
    text = rendered if isinstance(prompt, str) else prompt
    assert found[64] == found[0] == {"prompt": text, "answer": "d", "level": "2", "length": found[0]["length"]}
    assert "no train sequence is left after tokenizing" in found[-1]


def test_further_columns_go_along(tmp_path: Path) -> None:
    given = recipe(str(tmp_path / "store"), "kto", extra_columns=["level"])
    rows = [{**row, "level": str(number)} for number, row in enumerate(PAIRS[:4])]
    ours, _, _ = tokenized(given, rows, tmp_path)
    assert ours["level"] == ["0", "0", "1", "1", "2", "2", "3", "3"]


def test_conversations_need_a_template(tiny_base: str) -> None:
    tokenizer = loading.load_tokenizer(tiny_base)
    tokenizer.chat_template = None
    with pytest.raises(UserError) as caught:
        encoding.require_template(tokenizer, MESSAGES[0])
    assert str(caught.value) == (
        "data has conversations, but the tokenizer has no chat template. Use an instruct model, or set "
        "model.chat_template."
    )
    encoding.require_template(tokenizer, {"prompt": "texts need none"})


def said_by_it(base: str, template: str | None = None) -> str:
    """What of the first conversation counts with `train_on: assistant`."""
    tokenizer = loading.load_tokenizer(base)
    tokenizer.chat_template = template or tokenizer.chat_template
    data = {"source": "r.jsonl", "train_on": "assistant"}
    given = load.validate({"name": "tiny", "model": {"base": base}, "data": data}, origin="r.yaml")
    row = tiny.encoder(given, tokenizer)(MESSAGES[0])[0]
    text = tokenizer.decode([token for token in row["labels"] if token != IGNORED])
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize("mark", ["{% generation %}", "{%- generation %}", "{%- generation -%}", "{%generation%}", ""])
def test_what_the_assistant_says_is_found_with_any_mark_and_without(mark: str, tiny_base: str) -> None:
    """The mark of ours holds the newline after the end token, which is not trained."""
    template = str(loading.load_tokenizer(tiny_base).chat_template)
    other = template.replace("{% generation %}", mark)
    other = other if mark else other.replace("{% endgeneration %}", "")
    assert said_by_it(tiny_base, other) == MESSAGES[0]["messages"][1]["content"] + "<|im_end|>"


def test_a_mark_may_name_less_than_the_turn(tiny_base: str) -> None:
    template = (
        "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}Well. {% generation %}{{ m.content }}"
    )
    template += "{% endgeneration %}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    template += "{% if add_generation_prompt %}assistant: {% endif %}"
    assert said_by_it(tiny_base, template) == MESSAGES[0]["messages"][1]["content"] + "<|im_end|>"
