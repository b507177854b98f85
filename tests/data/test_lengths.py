"""Lengths of rows, and what the recipe says to those that are too long; packing in several files."""

from __future__ import annotations

import contextlib
import itertools
import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from baton.data import fitting, tokenize
from baton.errors import UserError
from baton.models import chat, loading
from baton.recipe import load
from baton.recipe.recipe import Recipe
from baton.runs.run import Run
from baton.store import bundle
from baton.store.manifest import read_manifest
from baton.store.storage import Storage

UNMERGED = "".join(map(chr, range(33, 127)))
LIMIT = 16
TRAIN = {"vocab_size": 300, "min_frequency": 1000}


def rows_of(*sizes: int) -> list[dict[str, str]]:
    """Texts of so many tokens, their ends included: the tokenizers here merge nothing."""
    return [{"text": UNMERGED[: size - 1]} for size in sizes]


def run_of(folder: Path, rows: list[Any], *, quality: dict[str, Any] | None = None, **changes: Any) -> Run:
    """A run whose rows are split and not yet tokenized; two short ones are held out."""
    document: dict[str, Any] = {
        "name": "tiny",
        "store": str(folder / "store"),
        "model": {"from_scratch": {"hidden_size": 16}, "tokenizer": {"train": TRAIN}},
        "data": {"source": "rows.jsonl", "max_length": LIMIT, "quality": quality or {}},
        "training": {"batch_size": 2},
        "tracking": {"mlflow": None},
    }
    for section, values in changes.items():
        document[section] |= values
    recipe = load.validate(document, origin="r.yaml")
    run = Run(Storage(recipe.store.uri), "run-1")
    run.create(recipe)
    (folder / "split").mkdir()
    held_out = rows_of(5, 5) if "text" in rows[0] else rows[:2]
    for side, found in (("train", rows), ("eval", held_out)):
        (folder / "split" / f"{side}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    bundle.publish(run.storage, "data/digest/split", str(folder / "split"), kind="split", meta={})
    run.set_once("data.json", {"digest": "digest", "rows": 0})
    return run


def folder_of(run: Run) -> str:
    """Where the tokens lie."""
    prefix = run.require("tokens.json")["prefix"]
    manifest = read_manifest(run.storage, prefix)
    assert manifest
    return run.storage.key(manifest.path(prefix))


BOUNDS = {1: 1, 2: 2, 3: 3, 4: 4, 5: 6, 6: 6, 7: 8, 9: 12, 13: 16, 24: 24, 25: 32, 97: 128, 512: 512, 513: 768}


@pytest.mark.parametrize(("length", "bound"), BOUNDS.items())
def test_classes_of_lengths(length: int, bound: int) -> None:
    assert fitting.length_bound(length) == bound


def test_lengths_are_those_before_cutting(tmp_path: Path) -> None:
    found = tokenize.tokenize_run(run_of(tmp_path, rows_of(4, 6, 16, 17, 40)).uri)
    assert found["lengths"] == {
        "rows": 7,
        "total": 93,
        "mean": 93 / 7,
        "longest": 40,
        "over": 2,
        "histogram": [[4, 1], [6, 3], [16, 1], [24, 1], [48, 1]],
    }
    assert {name: found[name] for name in ("train", "truncated", "dropped", "tokens")} == {
        "train": 5,
        "truncated": 2,
        "dropped": 0,
        "tokens": 4 + 6 + 16 + 16 + 16,
    }


@pytest.mark.parametrize(
    ("action", "share", "told"),
    [("off", 0.0, 0), ("warn", 0.3, 0), ("warn", 0.2, 1), ("fail", 0.3, 0)],
    ids=["off", "few enough", "warn", "fail, few enough"],
)
def test_too_long_rows_are_told_of(
    action: str, share: float, told: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("BATON_EVENTS", "stdout")
    run = run_of(tmp_path, rows_of(4, 6, 16, 17, 40), quality={"truncation": action, "truncated_share": share})
    assert tokenize.tokenize_run(run.uri)["train"] == 5
    text = "2 of 7 rows (28.6%) are longer than data.max_length 16; the longest has 40 tokens"
    assert capsys.readouterr().out.count(text) == told


def test_too_many_long_rows_end_the_run(tmp_path: Path) -> None:
    run = run_of(tmp_path, rows_of(4, 6, 16, 17, 40), quality={"truncation": "fail", "truncated_share": 0.2})
    for _ in range(2):  # the second time the tokens are there
        with pytest.raises(UserError) as caught:
            tokenize.tokenize_run(run.uri)
        assert caught.value.message == (
            "data.quality.truncation: 2 of 7 rows (28.6%) are longer than data.max_length 16; the longest has 40 "
            "tokens; more than 20.0% may not be."
        )


def test_rows_that_would_be_cut_are_left_out_and_named(tmp_path: Path) -> None:
    run = run_of(tmp_path, rows_of(4, 17, 16, 40), quality={"truncation": "fix"})
    found = tokenize.tokenize_run(run.uri)
    assert {name: found[name] for name in ("train", "truncated", "dropped")} == {
        "train": 2,
        "truncated": 0,
        "dropped": 2,
    }
    assert [len(row["input_ids"]) for row in datasets.load_from_disk(f"{folder_of(run)}/train")] == [4, 16]
    (path,) = Path(found["dropped_uri"]).iterdir()
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"file": "train.jsonl", "line": 2, "reason": "17 tokens, data.max_length is 16"},
        {"file": "train.jsonl", "line": 4, "reason": "40 tokens, data.max_length is 16"},
    ]


def test_pairs_that_trainers_would_cut_are_left_out(tmp_path: Path) -> None:
    rows = [{"prompt": "p", "chosen": "c", "rejected": "r"}] * 2 + [
        {"prompt": "p", "chosen": UNMERGED[:30], "rejected": "r"},
        {"prompt": UNMERGED[:20], "chosen": "c", "rejected": "r"},
    ]
    run = run_of(tmp_path, rows, quality={"truncation": "fix"}, training={"method": "dpo"})
    found = tokenize.tokenize_run(run.uri)
    assert (found["train"], found["dropped"], found["truncated"]) == (2, 2, 0)


@pytest.mark.parametrize("packing", [True, "best-fit"], ids=["joined", "best-fit"])
def test_packing_in_several_files(packing: bool | str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file is packed for itself; best-fit loses no row, joining what does not fill a sequence of each."""
    monkeypatch.setattr(tokenize, "LEAST", 150)
    rows = [{"text": UNMERGED[n : n + 3 + n % 9]} for n in range(80)]
    run = run_of(tmp_path, rows, data={"packing": packing})
    found = tokenize.tokenize_run(run.uri)
    tokenizer = loading.load_tokenizer(f"{folder_of(run)}/tokenizer")
    train = datasets.load_from_disk(f"{folder_of(run)}/train").to_list()
    cut = tokenize.cut(str(tmp_path / "split" / "train.jsonl"), "train")
    assert len(cut) > 10
    assert {len(row["input_ids"]) <= LIMIT for row in train} == {True}
    if packing is True:
        assert {len(row["input_ids"]) for row in train} == {LIMIT}
        total = sum(len(row["text"]) + 1 for row in rows)
        assert total - len(cut) * (LIMIT - 1) <= found["tokens"] <= total
        return
    whole = []
    for row in train:
        ends = list(itertools.accumulate(row["seq_lengths"]))
        starts = [0, *ends[:-1]]
        whole += [tokenizer.decode(row["input_ids"][start:end]) for start, end in zip(starts, ends, strict=True)]
    assert sorted(whole) == sorted(f"{row['text']}<|end|>" for row in rows)


def talks(count: int) -> list[dict[str, Any]]:
    """Conversations."""
    return [
        {"messages": [{"role": "user", "content": f"a{n}"}, {"role": "assistant", "content": "b"}]}
        for n in range(count)
    ]


def test_the_recipes_template_is_used_and_saved(tmp_path: Path) -> None:
    model = {"chat_template": "alpaca"}
    run = run_of(tmp_path, talks(3), model=model, data={"max_length": 64, "assistant_only_loss": True})
    tokenize.tokenize_run(run.uri)
    tokenizer = loading.load_tokenizer(f"{folder_of(run)}/tokenizer")
    assert tokenizer.chat_template == chat.ALPACA
    row = datasets.load_from_disk(f"{folder_of(run)}/train")[1]
    assert tokenizer.decode(row["input_ids"]) == "### Instruction:\na1\n\n### Response:\nb<|end|>\n\n"
    assert tokenizer.decode([label for label in row["labels"] if label != -100]) == "b<|end|>"


def test_tokens_of_another_template_are_others(tmp_path: Path) -> None:
    def digest(template: str | None) -> str:
        given: Recipe = load.validate(
            {"name": "t", "model": {"base": "org/m", "chat_template": template}, "data": {"source": "r.jsonl"}},
            origin="r.yaml",
        )
        return tokenize.tokens_digest(given, "s", None, None)

    path = tmp_path / "own.jinja"
    path.write_text("{{ messages }}")
    found = [digest(None), digest("zephyr"), digest(str(path))]
    assert len(set(found)) == 3
    assert digest("{{ messages }}") == found[2], "what counts is what it says"
    path.write_text("{{ messages[0] }}")
    assert digest(str(path)) != found[2]


def test_a_conversation_that_the_template_refuses(tmp_path: Path) -> None:
    model = {"chat_template": "{{ raise_exception('roles must alternate') }}"}
    run = run_of(tmp_path, talks(3), model=model)
    with pytest.raises(UserError) as caught:
        tokenize.tokenize_run(run.uri)
    assert caught.value.message == (
        "5 of 5 conversations cannot be rendered by the chat template with the tokens in the loss known (100.0%; "
        "data.max_rejected is 1.0%). The first is in train.jsonl, line 1: the chat template refuses it: roles must "
        "alternate."
    )


def test_a_few_conversations_that_the_template_refuses_are_left_out_and_named(tmp_path: Path) -> None:
    """The second conversation of each side has two questions in a row."""
    rows = talks(20)
    rows[1]["messages"] = [rows[1]["messages"][0], *rows[1]["messages"]]
    run = run_of(tmp_path, rows, model={"chat_template": ALTERNATING}, data={"max_rejected": 0.1})
    counts = tokenize.tokenize_run(run.uri)
    assert (counts["train"], counts["dropped"], counts["refused"]) == (19, 2, 2)
    (dropped,) = Path(folder_of(run)).glob("dropped/train-*.jsonl")
    assert json.loads(dropped.read_text()) == {
        "file": "train.jsonl",
        "line": 2,
        "reason": "the chat template refuses it: roles must alternate",
    }


ALTERNATING = (
    "{% for m in messages %}{% if loop.index0 and m.role == messages[loop.index0 - 1].role %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ m.role + ':' + m.content + '<|end|>' }}{% endfor %}"
)
ASK, SAY = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
LEARNED: dict[str, tuple[str, dict[str, Any]]] = {
    "a sequence": ("sft", {"completion": [SAY]}),
    "a pair": ("dpo", {"chosen": [SAY], "rejected": [SAY]}),
    "a pair to be scored": ("reward", {"chosen": [SAY], "rejected": [SAY]}),
    "two of a pair": ("kto", {"chosen": [SAY], "rejected": [SAY]}),
    "one that is rated": ("kto", {"completion": [SAY], "label": True}),
    "a prompt": ("grpo", {"answer": "b"}),
}


@pytest.mark.parametrize(("max_rejected", "passes"), [(0.06, False), (0.1, True)])
@pytest.mark.parametrize(("method", "answers"), LEARNED.values(), ids=LEARNED)
def test_a_row_that_is_refused_is_one_of_the_rows_whatever_they_become(
    method: str, answers: dict[str, Any], max_rejected: float, passes: bool, tmp_path: Path
) -> None:
    """The second of 20 rows, and of 2 that are held out."""
    rows = [{"prompt": [ASK, *([ASK] if n == 1 else [])], **answers} for n in range(20)]
    own = {"grpo": {"rewards": ["length"], "num_generations": 2}} if method == "grpo" else {}
    run = run_of(
        tmp_path,
        rows,
        model={"chat_template": ALTERNATING},
        data={"max_rejected": max_rejected, "max_length": 64},
        training={"method": method, **own},
    )
    with contextlib.nullcontext() if passes else pytest.raises(UserError, match="2 of 22 conversations cannot be"):
        assert tokenize.tokenize_run(run.uri)["refused"] == 2


def test_rows_of_a_segment_that_an_older_baton_made_are_those_that_it_counted() -> None:
    new = fitting.TemplateErrors(of=5, rows=1, first="train.jsonl, line 1: x")
    older = {"rows": 1, "first": "", "told": {}}
    new.merge(older)
    assert (new.of, new.rows) == (5, 2)


@pytest.mark.parametrize(
    ("given", "num_bytes", "expected"),
    [
        ({}, 2**30 - 1, "uniform"),
        ({}, 2**30, "blocks"),
        ({"data": {"order": "blocks"}}, 1, "blocks"),
        ({"data": {"order": "uniform"}}, 2**40, "uniform"),
        ({"training": {"method": "kto"}}, 2**30, "uniform"),
        ({"training": {"group_by_length": True}}, 2**30, "uniform"),
        ({"training": {"parallel": {"processes": 2}}}, 2**30, "uniform"),
        ({"training": {"parallel": {"virtual_workers": 2}}}, 2**30, "uniform"),
    ],
    ids=["auto, small", "auto, large", "blocks", "uniform", "a method", "lengths", "processes", "virtual workers"],
)
def test_the_order_of_rows(given: dict[str, Any], num_bytes: int, expected: str) -> None:
    document: dict[str, Any] = {"name": "t", "model": {"base": "org/m"}, "data": {"source": "r.jsonl"}}
    for section, values in given.items():
        document[section] = {**document.get(section, {}), **values}
    assert tokenize.order(load.validate(document, origin="r.yaml"), num_bytes) == expected


@pytest.mark.parametrize(
    ("training", "what"),
    [
        ({"method": "orpo"}, "orpo"),
        ({"group_by_length": True}, "training.group_by_length"),
        ({"curriculum": {}}, "training.curriculum"),
    ],
    ids=["method", "lengths", "curriculum"],
)
def test_blocks_are_refused_where_all_rows_are_needed(training: dict[str, Any], what: str) -> None:
    document = {"name": "t", "model": {"base": "org/m"}, "data": {"source": "r.jsonl", "order": "blocks"}}
    with pytest.raises(UserError, match=f"data.order: {what} needs all rows in every chunk; set it to uniform"):
        load.validate({**document, "training": training}, origin="r.yaml")
