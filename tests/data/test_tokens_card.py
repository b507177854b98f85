"""The card of the tokens: sequences as the model sees them, of every shape, with what is trained in marks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from baton.data import encoding, preview, tokenize
from baton.recipe import load
from baton.recipe.model import TrainTokenizer
from baton.runs.run import Run
from baton.store.manifest import read_manifest
from tests.data.test_encoding import MESSAGES, PAIRS, Row, rated, recipe, tokenized
from tests.support import tiny


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    path = tmp_path_factory.mktemp("rows") / "train.jsonl"
    path.write_text('{"text": "what is it? a rectangle, or a fox."}\n' * 20, encoding="utf-8")
    return encoding.train_bpe(str(path), TrainTokenizer(vocab_size=300), 48)


TOLD = {"prompt": "what is it?", "completion": " a fox", "chosen": " a fox", "rejected": " or", "label": True}


@pytest.mark.parametrize(
    ("method", "columns", "expected"),
    [
        ("sft", ("prompt", "completion"), r"what is it?\n⟦ a fox<|end|>⟧ ({n} tokens)"),
        ("pretrain", ("completion",), "⟦ a fox<|end|>⟧ ({n} tokens)"),
        ("dpo", ("prompt", "chosen", "rejected"), r"prompt what is it?\n ({n} tokens) | chosen ⟦ a fox<|end|>⟧ ("),
        ("kto", ("prompt", "completion", "label"), r"prompt what is it?\n ({n} tokens) | completion ⟦ a fox<|end|>⟧ ("),
        (
            "reward",
            ("prompt", "chosen", "rejected"),
            r"chosen what is it?\n a fox<|end|> ({n} tokens) | rejected what is",
        ),
        ("grpo", ("prompt",), "prompt what is it?"),
    ],
)
def test_every_shape_in_words(
    method: str, columns: tuple[str, ...], expected: str, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    row: Row = {name: TOLD[name] for name in columns}
    if method == "pretrain":
        row = {"text": row["completion"]}
    made = tiny.encoder(recipe(str(tmp_path), method), tokenizer)(row)
    tokenize.write_rows(str(tmp_path / "rows.arrow"), [made])
    (shown,) = preview.first_sequences(str(tmp_path / "rows.arrow"), tokenizer)
    length = len(next(iter(made[0].values())))
    assert shown.startswith(expected.format(n=length))


def _sequence(prompt: int, answer: int, tokenizer: PreTrainedTokenizerBase, folder: Path) -> str:
    ids = tokenizer("what", add_special_tokens=False)["input_ids"][:1] * prompt
    answers = tokenizer("fox", add_special_tokens=False)["input_ids"][:1] * answer
    row = {"input_ids": ids + answers, "labels": [-100] * prompt + answers}
    tokenize.write_rows(str(folder / "rows.arrow"), [[row]])
    (shown,) = preview.first_sequences(str(folder / "rows.arrow"), tokenizer)
    return shown


def test_where_training_begins_is_shown_however_far_it_is(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    shown = _sequence(50_000, 50_000, tokenizer, tmp_path)
    assert "⟦" in shown
    assert shown.endswith(" … (100,000 tokens)")
    assert len(shown) < preview.LONGEST + 100
    assert "…" not in _sequence(100, 50, tokenizer, tmp_path)


def test_first_sequences_come_from_the_stage_and_stay_when_tokens_are_reused(tmp_path: Path) -> None:
    given = recipe(str(tmp_path / "store"), "sft")
    _, _, made = tokenized(given, MESSAGES, tmp_path)
    assert set(made["first"]) == {"train", "eval"}
    assert len(made["first"]["train"]) == preview.SHOWN
    assert made["first"]["train"][0].startswith("⟦<|im_start|>user")
    shown = preview.tokens_card(given, made)
    assert made["first"]["train"][0] in shown.text
    assert shown.facts["train"] == made["train"]
    assert {"steps", "tokens", "digest", "truncated", "dropped"} <= shown.facts.keys()
    assert Path(f"{shown.facts['address']}/train/dataset_info.json").exists()


def test_counts_alone_show_no_sequence(tmp_path: Path) -> None:
    given = recipe(str(tmp_path / "store"), "dpo")
    _, _, made = tokenized(given, PAIRS, tmp_path)
    assert "area" in preview.tokens_card(given, made).text
    document = given.model_dump(mode="json")
    document["tracking"]["cards"] = "counts"
    shown = preview.tokens_card(load.validate(document, origin="r.yaml"), made)
    assert "area" not in shown.text
    assert "⟦" not in shown.text
    assert f"train {made['train']}" in shown.text
    assert "tokens in a row: " in shown.text


def test_tokens_of_an_older_baton_have_none(tmp_path: Path) -> None:
    given = recipe(str(tmp_path / "store"), "kto")
    _, _, made = tokenized(given, rated(PAIRS), tmp_path)
    older: dict[str, Any] = {**made, "first": {}}
    assert preview.tokens_card(given, older).text.startswith(f"train {made['train']}")


def test_the_run_does_not_repeat_them(tmp_path: Path) -> None:
    """They are with the tokens, which many runs share."""
    given = recipe(str(tmp_path / "store"), "sft")
    tokenized(given, [{"prompt": row["prompt"], "completion": row["chosen"]} for row in PAIRS], tmp_path)
    run = Run.open(f"{tmp_path}/store/runs/run-1")
    tokens = run.require("tokens.json")
    assert "area" not in str(tokens)
    manifest = read_manifest(run.storage, tokens["prefix"])
    assert manifest is not None
    assert "area" in str(manifest.meta["first"])
