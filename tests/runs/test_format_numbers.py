"""What each format's number stands for: made anew here, and compared with what it came to when the number was given.

A test that fails here says that runs of before would go on otherwise than they began. Where that is meant, raise the
number in `shared/runs/formats.py`, as CONTRIBUTING.md says, and put what the message gives under it; where a library
alone has changed what it makes, put it under the same number. All of it is whole numbers and exact fractions, the same
on every machine. `tests/exactness/test_old_runs.py` has the files of a checkpoint and the digests of a restored one.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerBase

from baton.checkpoint.digest import TensorHash, tree_digest
from baton.data import encoding, tokenize
from baton.data.split import split_data
from baton.models import loading, rng, trained
from baton.recipe import load
from baton.recipe.model import TrainTokenizer
from baton.recipe.training import Curriculum
from baton.runs.documents import PARTS
from baton.runs.run import Run
from baton.runs.versions import FORMATS
from baton.store.storage import Storage
from baton.train import state, weighing
from baton.train.generation import SeekingRepeatSampler
from baton.train.samplers import DistributedBatches, EasyFirst, GroupedByLength
from baton.train.tokens import Blocks
from baton.train.trainer import seed_of
from tests.data.splitting import split, write
from tests.support import tiny

Made = dict[str, str]
GOLDEN: dict[str, dict[int, Made]] = {
    "rows": {
        1: {
            "texts": "e4a97b9740001b48",
            "pairs": "3433590a551ea9d7",
            "preferences": "0d586e2ead99a02f",
            "talks": "8b2315abeef1f4f6",
            "counted": "ff1fcb15b02b7872",
            "stratified": "22650f8ed6f37e2b",
            "grouped": "b770c33251045a1f",
            "weighted": "4df97189780b48d8",
        },
        2: {
            "texts": "1be17bca90810fd5",
            "pairs": "0291ca51bed41857",
            "preferences": "50555faf0e756211",
            "talks": "77a6b00148e958ba",
            "counted": "3bef6e15f6793a4b",
            "stratified": "ddb8d44a39b53319",
            "grouped": "d0410d6f9ff8e54e",
            "weighted": "661da38c6f97b48f",
        },
    },
    "tokens": {
        1: {
            "own vocabulary": "62ce5b1e85b774b6",
            "texts": "906d139e00cf1fa6",
            "asked, as turns": "e605a24d56e1c7e6",
            "asked, as text": "bf895aea06ecfe23",
            "asked, all of it": "6731be57d72962b9",
            "asked, by an own tokenizer": "7653321b79adf848",
            "preferred": "72dc9eecead5b0a2",
            "scored": "1f7a82ad01a98d08",
            "rated": "25bca5675b72e44d",
            "prompts": "7123c999c137d56a",
            "talks, all": "57c6b8df2cd2cc7a",
            "talks, completions": "57c6b8df2cd2cc7a",
            "talks, assistant": "5b9386e4ea637c71",
            "talks, last": "e2c01e7f56abc434",
            "talks, with a system": "3962497d947da89e",
            "joined and cut": "0d0b5d45d07317d0",
            "best fit": "0da67e8e67ec3d66",
            "one by one": "5d8602ce2209f631",
        }
    },
    "draws": {
        1: {
            "grouped by length": "e2a4673110dda783",
            "curriculum": "e3ea0e171ca90b24",
            "blocks": "6c70bb58acd5c197",
            "prompts": "733ab77e0a367c28",
            "distributed": "b60dd31a8b9964c8",
            "as the trainer has them": "769f32f5db735451",
            "seeds of ranks": "d3e1edd7adcd2164",
            "seeds of virtual workers": "d8b0f763eead2585",
            "generators": "4a507f0c7cf27599",
        }
    },
    "loss": {
        2: {
            "micro-batches": "7fa1eaabb1c66045",
            "likelihoods": "fa1826b34f2af0c4",
            "evaluations": "ef4426b63bfc6c32",
        }
    },
    "digest": {
        1: {
            "tree": "f6b793177a593d31",
            "parts": "65ef52483f253c58",
            "ranks": "4e59e15bf31222c6",
            "rng": "5aacaf22d31150dc",
            "scheduler": "ba25dbc1c1a77760",
            "scaler": "dd08b8d35aadc2eb",
            "position": "2a7436528a12fe95",
            "callbacks": "f6442079068da128",
            "method": "f6442079068da128",
        }
    },
}
"""Format → number → what it comes to, by name."""
GOLDEN["tokens"][2] = GOLDEN["tokens"][1]
"""Number 2 differs in templates that write a turn otherwise when it is last, or a prompt after every conversation."""

TEXTS = [
    {"text": f"{n} foxes jump over {n % 7} dogs", "kind": "odd" if n % 2 else "even", "group": f"g{n // 3}"}
    for n in range(60)
]
PAIRS = [{"question": f"What is {n} and 1?", "good": f"It is {n + 1}."} for n in range(40)]
PREFERENCES = [{**row, "chosen": row["good"], "rejected": "No idea."} for row in PAIRS]
LOOK_UP = {"name": "look_up", "arguments": {"word": "fox", "limit": 2, "deep": {"b": [1, None], "a": "é"}}}
TALKS: list[dict[str, Any]] = [
    {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": f"And {n}? 日本語"},
            {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": LOOK_UP}]},
            {"role": "tool", "content": '{"found": 3}'},
            {"role": "assistant", "content": f"That is {n}.", "reasoning_content": "I count."},
        ]
    }
    for n in range(12)
]
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>' }}"
    "{% if message.reasoning_content %}{{ '<think>' + message.reasoning_content + '</think>' }}{% endif %}"
    "{% if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}{{ message.content + '<|eot|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def hashed(value: object) -> str:
    """Returns a short digest of plain values."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=False).encode()).hexdigest()[:16]


def rows_made(folder: Path) -> Made:
    """Splits rows in each way that decides where they lie."""
    texts, pairs = write(folder / "texts.jsonl", TEXTS), write(folder / "pairs.jsonl", PAIRS)
    preferences, talks = write(folder / "preferences.jsonl", PREFERENCES), write(folder / "talks.jsonl", TALKS)
    more = write(folder / "more.jsonl", [{"text": row["question"]} for row in PAIRS])
    columns = {"prompt": "question", "completion": "good"}
    ways: dict[str, tuple[Any, dict[str, Any]]] = {
        "texts": (texts, {}),
        "pairs": (pairs, {"columns": columns, "split": {"eval": 0.2, "test": 0.1}}),
        "preferences": (preferences, {"columns": {"prompt": "question"}, "method": "dpo"}),
        "talks": (talks, {"split": {"eval": 0.5}}),
        "counted": (texts, {"split": {"eval": 7}, "max_samples": 30, "shuffle": True}),
        "stratified": (texts, {"split": {"eval": 0.3, "stratify_by": "kind"}, "extra_columns": ["kind"]}),
        "grouped": (texts, {"split": {"eval": 0.3, "group_by": "group"}, "seed": 3}),
        "weighted": ([{"uri": texts, "weight": 0.4}, {"uri": more, "weight": 2.5}], {}),
    }
    return {
        name: str(split(str(folder / "store"), source, f"run-{number}", **settings)["digest"])[:16]
        for number, (name, (source, settings)) in enumerate(ways.items())
    }


def tokens_made(folder: Path, base: str) -> Made:
    """Makes tokens of each shape of rows, of conversations in another template, and in packed sequences."""
    own = encoding.train_bpe(write(folder / "train.jsonl", TEXTS), TrainTokenizer(vocab_size=320), 64)
    tokenizer = loading.load_tokenizer(base)

    def encoded(rows: list[dict[str, Any]], by: PreTrainedTokenizerBase = tokenizer, **sections: Any) -> str:
        encode = tiny.encoder(tiny.recipe(base, **sections), by)
        return hashed([encode(row) for row in rows])

    def stored(name: str, **sections: Any) -> str:
        """Runs both stages, and returns the rows of all sides in their order."""
        document = tiny.recipe(base, **sections).model_dump(mode="json")
        document["data"] |= {"source": [write(folder / f"{name}.jsonl", TEXTS)], "workers": 1}
        document["store"] = {"uri": str(folder / "store")}
        recipe = load.validate(document, origin=name)
        run = Run(Storage(recipe.store.uri), split_data(recipe, name)["run_uri"].rpartition("/")[2])
        tokenize.tokenize_run(run.uri)
        tokens = trained.tokens_folder(run, str(folder / "tokens"))
        return hashed([trained.open_rows(f"{tokens}/{side}").to_list() for side in ("train", "eval")])

    asked = [{"prompt": row["question"], "completion": row["good"]} for row in PAIRS[:4]]
    better = [{"prompt": row["question"], "chosen": row["good"], "rejected": "No."} for row in PAIRS[:4]]
    rated = [{**row, "label": number % 2 == 0} for number, row in enumerate(asked)]
    talking = loading.load_tokenizer(base)
    talking.chat_template = TEMPLATE
    return {
        "own vocabulary": hashed(own.get_vocab()),
        "texts": encoded(TEXTS[:4], data={"render_as": "text"}),
        "asked, as turns": encoded(asked),
        "asked, as text": encoded(asked, data={"render_as": "text", "separator": "###"}),
        "asked, all of it": encoded(asked, data={"render_as": "text", "train_on": "all"}),
        "asked, by an own tokenizer": encoded(asked, own),
        "preferred": encoded(better, training={"method": "dpo"}),
        "scored": encoded(better, training={"method": "reward"}),
        "rated": encoded(rated, training={"method": "kto"}),
        "prompts": encoded(asked, training={"method": "grpo", "grpo": {"rewards": ["length"], "num_generations": 8}}),
        **{
            f"talks, {train_on}": encoded(TALKS[:3], talking, data={"train_on": train_on, "max_length": 512})
            for train_on in ("all", "completions", "assistant", "last")
        },
        "talks, with a system": encoded([{"messages": TALKS[0]["messages"][1:]}], talking, data={"system": "Hm."}),
        "joined and cut": stored("joined", training={"method": "pretrain"}, data={"packing": True}),
        "best fit": stored("fitted", data={"packing": "best-fit"}),
        "one by one": stored("single"),
    }


def draws_made(folder: Path, base: str, monkeypatch: pytest.MonkeyPatch) -> Made:
    """Orders rows in each way, and draws from each generator."""

    def orders(sampler: Any) -> list[list[Any]]:
        return [list(sampler) for epoch in range(3) if sampler.set_epoch(epoch) is None]

    class ByEpoch(DistributedBatches):
        def __init__(self) -> None:
            grouped = GroupedByLength(list(range(19)), 8, 5)
            super().__init__(grouped, batch_size=8, micro=2, world_size=2)

    lengths = [(n * 37) % 23 for n in range(50)]
    curriculum = Curriculum(start=0.3, until=0.7, ramp="exponential")
    blocks = Blocks([5, 3, 8, 1, 9, 4, 7, 2, 6, 5], 7)
    repeated = SeekingRepeatSampler(list(range(12)), mini_repeat_count=2, batch_size=3, repeat_count=2, seed=7)
    rows = datasets.Dataset.from_list([{"input_ids": [5 + n] * 4, "labels": [5 + n] * 4} for n in range(20)])
    plain = tiny.trainer(tiny.recipe(base, training={"batch_size": 4, "max_steps": 10}), rows, folder / "plain")
    loader = plain.get_train_dataloader()

    def passes() -> Iterator[list[int]]:
        for epoch in range(2):
            loader.set_epoch(epoch)
            yield [int(row[0]) for batch in loader for row in batch["input_ids"]]

    rng.seed(7)
    drawn = [
        random.random(),
        random.sample(range(99), 5),
        float(np.random.rand()),
        np.random.permutation(9).tolist(),
        torch.randint(2**31, (5,)).tolist(),
        torch.rand(20).tolist(),
        torch.randperm(11).tolist(),
    ]
    return {
        "grouped by length": hashed(orders(GroupedByLength(lengths, 8, 7))),
        "curriculum": hashed(orders(EasyFirst(lengths, curriculum, batch_size=8, num_steps=21, seed=7))),
        "blocks": hashed([list(blocks.order(epoch)) for epoch in range(3)]),
        "prompts": hashed(orders(repeated)),
        "distributed": hashed(orders(ByEpoch())),
        "as the trainer has them": hashed(list(passes())),
        "seeds of ranks": hashed([seed_of(7, rank, step) for rank in range(3) for step in (0, 5)]),
        "seeds of virtual workers": hashed(_virtual_seeds(folder, base, rows, monkeypatch)),
        "generators": hashed(drawn),
    }


def _virtual_seeds(folder: Path, base: str, rows: datasets.Dataset, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns the seeds of two steps of a run with virtual workers."""
    seeds: list[int] = []
    seed = rng.seed

    def noted(number: int) -> None:
        seeds.append(number)
        seed(number)

    training = {"batch_size": 8, "max_steps": 2, "parallel": {"virtual_workers": 2}}
    trainer = tiny.trainer(tiny.recipe(base, training=training), rows, folder / "virtual")
    with monkeypatch.context() as patch:
        patch.setattr(rng, "seed", noted)
        trainer.train()
    return seeds


def losses_made(folder: Path, base: str) -> Made:
    """Counts the rows and tokens of micro-batches of two and one, and of batches of an evaluation."""
    rows = [{"prompt": "Hm?", "chosen": "Yes." * n, "rejected": "No."} for n in range(1, 4)]
    settings = {"method": "orpo", "batch_size": 4, "micro_batch_size": 2, "max_steps": 1}
    given = tiny.recipe(base, training=settings)
    trainer = tiny.trainer(given, tiny.tokens(given, rows), folder)
    batches = list(trainer.get_train_dataloader())
    trainer.get_batch_samples(iter(batches), 2, torch.device("cpu"))
    return {
        "micro-batches": hashed(list(trainer._shares)),
        "likelihoods": hashed([trainer.token_share(batch) for batch in batches]),
        "evaluations": hashed(weighing.weighted_mean([(0.5, 3.0), (2.0, 1.0), (9.0, 0.0)])),
    }


def digests_made(folder: Path, base: str) -> Made:
    """Takes digests of a fixed tree, of ranks', and of the parts of a trained state that are the same everywhere."""
    in_pieces = TensorHash(torch.int64, (2, 3))
    in_pieces.update(torch.arange(4))
    in_pieces.update(torch.arange(4, 6))
    tree = {
        "tensors": [torch.arange(6, dtype=kind).reshape(2, 3) for kind in (torch.float32, torch.bfloat16, torch.int64)],
        "pieces": in_pieces,
        "empty": [torch.zeros(0, 3), {}, [], ()],
        "plain": [
            7,
            -1,
            0.1,
            -0.0,
            True,
            None,
            "é",
            b"\x00",
            np.int64(3),
            np.float64(2.5),
            np.arange(3, dtype=np.int8),
        ],
        3: {"nested": {"deeper": (1, [2, (3,)])}},
    }
    ranks = [{part: f"{part}-{rank if part == 'rng' else 0}" for part in PARTS} for rank in range(3)]
    rows = datasets.Dataset.from_list([{"input_ids": [5 + n] * 4, "labels": [5 + n] * 4} for n in range(20)])
    given = tiny.recipe(base, training={"batch_size": 4, "max_steps": 7, "lr_scheduler": "linear"})
    trainer = tiny.trainer(given, rows, folder)
    rng.seed(7)
    trainer.train()
    parts = state.digests_of(trainer)
    anywhere = ("scheduler", "scaler", "position", "callbacks", "method")
    return {
        "tree": tree_digest(tree)[:16],
        "parts": hashed(PARTS),
        "ranks": hashed(state.merge_rank_digests(ranks, replicated=True)),
        "rng": tree_digest(rng.capture(cuda=False))[:16],
        **{part: parts[part][:16] for part in anywhere},
    }


@pytest.mark.parametrize("name", GOLDEN)
def test_a_number_stands_for_what_it_stood_for(
    name: str, tmp_path: Path, chat_base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    makers: dict[str, Callable[[], Made]] = {
        "rows": lambda: rows_made(tmp_path),
        "tokens": lambda: tokens_made(tmp_path, chat_base),
        "draws": lambda: draws_made(tmp_path, chat_base, monkeypatch),
        "loss": lambda: losses_made(tmp_path, chat_base),
        "digest": lambda: digests_made(tmp_path, chat_base),
    }
    number, made = FORMATS[name].number, makers[name]()
    golden = GOLDEN[name].get(number, {})
    changed = sorted(part for part in made.keys() | golden.keys() if made.get(part) != golden.get(part))
    assert not changed, f"{name} of format {number} are no longer what they were: {changed}; now {made}"
