"""Tokenizing: the ids and labels that TRL's own preparation gives, from a vocabulary that is always the same."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import pytest
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase
from trl import SFTConfig, SFTTrainer

from baton.data import encoding, tokenize
from baton.data.encoding import encode_texts
from baton.errors import UserError
from baton.models import loading
from baton.models.train_rows import IGNORED
from baton.recipe import load
from baton.recipe.model import TrainTokenizer
from baton.recipe.recipe import Recipe
from baton.runs.run import Run
from baton.store import bundle
from baton.store.manifest import Manifest, read_manifest
from baton.store.storage import Storage
from tests.support import tiny

PAIRS = [
    {"prompt": f"def area_{n}(width, height):", "completion": f"Return the area number {n} of a rectangle."}
    for n in range(40)
]
AWKWARD = [
    {"prompt": "", "completion": "no prompt"},
    {"prompt": "x ", "completion": " spaces meet spaces"},
    {"prompt": "naïve 🙂", "completion": "日本語 \u0000 \r\n\ttabs"},
    {"prompt": "ends", "completion": "by itself<|end|>"},
    {"prompt": "long " * 30, "completion": "never reached"},
    {"prompt": "short", "completion": "long " * 30},
    {"prompt": "dates", "completion": "2024-01-01"},
]
TEXTS = [{"text": row["prompt"] + row["completion"]} for row in (*PAIRS, *AWKWARD)]
TALKS = [
    {"messages": [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["completion"]}]}
    for row in (*PAIRS, *AWKWARD)
]
LIMIT = 24
UNMERGED = "".join(map(chr, range(33, 127)))
"""No pair of characters occurs twice: as many tokens as characters."""


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    """Write rows as the split stage does."""
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    """A tokenizer trained on the pairs and loaded again, as training and export do."""
    folder = tmp_path_factory.mktemp("tokenizer")
    trained = encoding.train_bpe(write(folder / "train.jsonl", PAIRS), TrainTokenizer(vocab_size=400), LIMIT)
    trained.save_pretrained(folder / "saved")
    return loading.load_tokenizer(str(folder / "saved"))


@pytest.fixture(scope="module")
def prepared_by_trl(tokenizer: PreTrainedTokenizerBase, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Runs rows through the preparation of an `SFTTrainer` and returns its rows."""
    datasets.disable_progress_bars()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    output_dir = str(tmp_path_factory.mktemp("trl"))

    def prepare(rows: list[dict[str, Any]], completion_only: bool) -> list[dict[str, list[int]]]:
        trainer = SFTTrainer(
            model=model,
            args=SFTConfig(
                output_dir=output_dir,
                max_length=LIMIT,
                completion_only_loss=completion_only,
                report_to="none",
                use_cpu=True,
                bf16=False,
            ),
            train_dataset=datasets.Dataset.from_list(rows),
            processing_class=tokenizer,
        )
        return [{"input_ids": row["input_ids"], "labels": row["labels"]} for row in trainer.train_dataset.to_list()]

    return prepare


def encoded(rows: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, completion_only: bool) -> list[Any]:
    """Tokenize rows as a recipe without a separator does."""
    recipe = load.validate(
        {
            "name": "tiny",
            "model": {"base": "org/model"},
            "data": {"source": "r.jsonl", "separator": "", "completion_only_loss": completion_only},
        },
        origin="r.yaml",
    )
    encode_row = tiny.encoder(recipe, tokenizer)
    return [made for row in rows for made in encode_row(row)]


@pytest.mark.parametrize(
    ("rows", "completion_only"),
    [([*PAIRS, *AWKWARD], True), ([*PAIRS, *AWKWARD], False), (TEXTS, False), (TALKS, False)],
    ids=["completion", "prompt and completion", "text", "messages"],
)
def test_rows_become_what_trl_makes_of_them(
    rows: list[dict[str, Any]], completion_only: bool, tokenizer: PreTrainedTokenizerBase, prepared_by_trl: Any
):
    ours = encoded(rows, tokenizer, completion_only)
    cut = [{name: values[:LIMIT] for name, values in row.items()} for row in ours]
    kept = [row for row in cut if any(label != IGNORED for label in row["labels"])]
    theirs = prepared_by_trl(rows, completion_only)

    assert kept == theirs
    assert len(cut) - len(kept) == completion_only  # a prompt that leaves no room for its completion


def test_the_separator_is_prompt(tokenizer: PreTrainedTokenizerBase):
    (row,) = encode_texts([{"prompt": "a", "completion": "b"}], tokenizer, "\n", True)
    ids = tokenizer.convert_tokens_to_ids(["a", "Ċ", "b", "<|end|>"])

    assert row == {"input_ids": ids, "labels": [IGNORED, IGNORED, *ids[2:]]}


def test_all_is_learned_where_the_prompt_counts(tokenizer: PreTrainedTokenizerBase):
    (row,) = encode_texts([{"prompt": "a", "completion": "b"}], tokenizer, "\n", False)

    assert row["labels"] == row["input_ids"]


def test_a_text_ends_once(tokenizer: PreTrainedTokenizerBase):
    a, end = tokenizer.convert_tokens_to_ids(["a", "<|end|>"])

    assert encode_texts([{"text": "a"}], tokenizer, "\n", True)[0]["input_ids"] == [a, end]
    assert encode_texts([{"text": "a<|end|>"}], tokenizer, "\n", True)[0]["input_ids"] == [a, end]


@pytest.mark.parametrize(
    ("a", "b", "length"),
    [([], [], 0), ([1], [], 0), ([1, 2], [1, 2, 3], 2), ([1, 2], [1, 3], 1), ([1, 2], [1, 2], 2)],
    ids=["empty", "one empty", "prefix", "diverging", "equal"],
)
def test_common_prefix_length(a: list[int], b: list[int], length: int):
    assert encoding.common_prefix_length(a, b) == length


def run_of(tmp_path: Path, train: list[dict[str, Any]], held_out: list[dict[str, Any]], **changes: Any) -> Run:
    """A run whose rows are split and not yet tokenized."""
    recipe: Recipe = load.validate(
        {
            "name": "tiny",
            "store": str(tmp_path / "store"),
            "model": {"from_scratch": {"hidden_size": 16}, "tokenizer": {"train": {"vocab_size": 300}}},
            "data": {"source": "rows.jsonl", "max_length": LIMIT, **changes},
            "training": {"batch_size": 2},
            "tracking": {"mlflow": None},
        },
        origin="r.yaml",
    )
    run = Run(Storage(recipe.store.uri), "run-1")
    run.create(recipe)
    digest = hashlib.sha256(json.dumps([train, held_out]).encode()).hexdigest()
    (tmp_path / "split").mkdir()
    write(tmp_path / "split" / "train.jsonl", train)
    write(tmp_path / "split" / "eval.jsonl", held_out)
    bundle.publish(run.storage, f"data/{digest}/split", str(tmp_path / "split"), kind="split", meta={})
    run.set_once("data.json", {"digest": digest, "rows": len(train) + len(held_out)})
    return run


def test_what_is_cut_and_what_is_left_out_is_counted(tmp_path: Path):
    rows = [
        *({"prompt": "p", "completion": f"c{n}"} for n in range(6)),
        {"prompt": "q", "completion": "word " * 50},
        {"prompt": UNMERGED, "completion": "y"},
    ]
    run = run_of(tmp_path, rows, rows[:2])

    found = tokenize.tokenize_run(run.uri)

    assert {key: found[key] for key in ("train", "eval", "truncated", "dropped", "steps")} == {
        "train": 7,
        "eval": 2,
        "truncated": 2,
        "dropped": 1,
        "steps": 4,
    }
    folder = bundle.fetch(run.storage, run.require("tokens.json")["prefix"], _manifest(run), str(tmp_path / "unused"))
    train = datasets.load_from_disk(f"{folder}/train").to_list()
    assert [len(row["input_ids"]) for row in train] == [*([5] * 6), LIMIT]
    assert sum(len(row["input_ids"]) for row in train) == found["tokens"]
    assert run.plan().num_steps == 4


def _manifest(run: Run) -> Manifest:
    manifest = read_manifest(run.storage, run.require("tokens.json")["prefix"])
    assert manifest is not None
    return manifest


def test_packing_cuts_into_whole_sequences(tmp_path: Path):
    rows = [{"text": "abc " * (n + 3)} for n in range(20)]
    run = run_of(tmp_path, rows, rows[:8], packing=True)

    tokenize.tokenize_run(run.uri)

    folder = run.storage.key(_manifest(run).path(run.require("tokens.json")["prefix"]))
    train = datasets.load_from_disk(f"{folder}/train").to_list()
    assert len(train) > 2
    assert {len(row["input_ids"]) for row in train} == {LIMIT}


@pytest.mark.parametrize(
    "rows",
    [
        [{"prompt": "When?", "completion": "2024-01-01"}, {"prompt": "And?", "completion": "2024-01-02"}],
        [{"text": "2024-01-01T10:00:00Z"}, {"text": "2024-01-02T10:00:00Z"}],
        [{"text": "17"}, {"text": "true"}],
        [{"text": "a\u0000b\u2028c\rd"}, {"text": "\ufeff"}],
    ],
    ids=["dates", "times", "numbers", "separators"],
)
def test_text_that_looks_like_something_else_stays_text(rows: list[dict[str, str]], tmp_path: Path):
    run = run_of(tmp_path, rows, rows, max_length=64)

    tokenize.tokenize_run(run.uri)

    folder = run.storage.key(_manifest(run).path(run.require("tokens.json")["prefix"]))
    tokenizer = loading.load_tokenizer(f"{folder}/tokenizer")
    decoded = [tokenizer.decode(row["input_ids"]) for row in datasets.load_from_disk(f"{folder}/train")]
    assert decoded == ["\n".join(row.values()) + "<|end|>" for row in rows]


def test_the_same_split_is_tokenized_once(tmp_path: Path):
    run = run_of(tmp_path, PAIRS, PAIRS[:3])

    first = tokenize.tokenize_run(run.uri)
    written = run.storage.find("data")

    assert tokenize.tokenize_run(run.uri) == first
    assert run.storage.find("data") == written
    assert [record.to_json()["reused"] for record in run.records()] == [False, True]


def test_no_sequence_left(tmp_path: Path):
    rows = [{"prompt": UNMERGED, "completion": "y"}]

    with pytest.raises(UserError, match="no train sequence is left after tokenizing") as caught:
        tokenize.tokenize_run(run_of(tmp_path, rows, rows).uri)

    assert caught.value.remedy == "Raise max_length so that completions are reached, or give more text."


def test_another_tokenizer_under_the_same_name_is_noticed(tmp_path: Path, tokenizer: PreTrainedTokenizerBase):
    recipe = run_of(tmp_path, PAIRS, PAIRS).recipe()

    digests = {
        tokenize.tokens_digest(recipe, *origins)
        for origins in [("s", None, None), ("t", None, None), ("s", "b", None), ("s", None, "b")]
    }

    assert len(digests) == 4


def test_a_fresh_process_trains_the_same_vocabulary(tmp_path: Path):
    train_file = write(tmp_path / "train.jsonl", [*PAIRS, *AWKWARD, *TALKS])
    code = (
        "import sys; from baton.recipe.model import TrainTokenizer; "
        "from baton.data import encoding as bpe; "
        f"bpe.train_bpe({train_file!r}, TrainTokenizer(vocab_size=420), 64).save_pretrained(sys.argv[1])"
    )
    processes = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path / name)]) for name in ("a", "b")]

    assert [process.wait(120) for process in processes] == [0, 0]
    written = [{path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("a", "b")]
    assert written[0] == written[1]
    assert len(json.loads(written[0]["tokenizer.json"])["model"]["vocab"]) == 420
