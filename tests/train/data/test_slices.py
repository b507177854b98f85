"""The order of blocks, and the files that steps of it need."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from baton import events
from baton.errors import BatonError
from baton.recipe import load
from baton.recipe.recipe import Recipe
from baton.runs.plan import Plan
from baton.runs.run import Run
from baton.store import bundle
from baton.store.storage import Storage
from baton.train import samplers
from baton.train.tokens import GROUP, Blocks, ChunkTokens, needed_files

ROWS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4]
STEPS_PER_EPOCH = 20
"""Of five rows each; the last has two."""


def file_of(row: int) -> int:
    """The file that a row lies in, counted by hand."""
    for number, rows in enumerate(ROWS):
        if row < rows:
            return number
        row -= rows
    raise AssertionError


def recipe(workers: int = 0) -> Recipe:
    """Five rows a step."""
    return load.validate(
        {
            "name": "tiny",
            "seed": 3,
            "model": {"base": "org/model"},
            "data": {"source": "r.jsonl", "order": "blocks"},
            "training": {"batch_size": 5, "workers": workers},
        },
        origin="r.yaml",
    )


def test_each_pass_has_all_rows_in_an_order_of_its_own() -> None:
    blocks = Blocks(ROWS, seed=3)
    orders = [list(blocks.order(epoch)) for epoch in (0, 1)]
    assert len(blocks) == 97
    assert [sorted(order) for order in orders] == [list(range(97))] * 2
    assert orders[0] != orders[1]
    assert orders[0] == list(Blocks(ROWS, seed=3).order(0))
    assert orders[0] != list(Blocks(ROWS, seed=4).order(0))


def test_the_order_is_that_of_all_releases() -> None:
    """Runs go on with a newer release."""
    assert list(Blocks([2, 1, 3], seed=7).order(0)) == [4, 5, 0, 2, 1, 3]
    assert list(Blocks([2, 1, 3], seed=7).order(1)) == [2, 5, 0, 1, 4, 3]


def test_rows_of_a_group_are_mixed_and_those_of_two_groups_are_not() -> None:
    blocks = Blocks(ROWS, seed=3)
    found = [file_of(row) for row in blocks.order(0)]
    groups = blocks.groups(0)
    assert [len(group) for group in groups] == [GROUP, GROUP, 4]
    at = 0
    for group in groups:
        files = found[at : at + sum(ROWS[file] for file in group)]
        assert Counter(files) == {file: ROWS[file] for file in group}
        assert files != sorted(files, key=group.index), "mixed"
        at += len(files)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("start", [0, 3, 19, 20, 33])
@pytest.mark.parametrize("steps", [1, 5, 21])
def test_what_steps_draw_and_the_loader_fetches_ahead_is_needed_and_little_else(
    start: int, steps: int, workers: int
) -> None:
    blocks = Blocks(ROWS, seed=3)
    found = needed_files(blocks, recipe(workers), STEPS_PER_EPOCH, start, start + steps)
    drawn: set[int] = set()
    ahead: set[int] = set()
    for step in range(start, start + steps + 1 + 2 * workers):
        epoch, within = divmod(step, STEPS_PER_EPOCH)
        rows = list(blocks.order(epoch))[within * 5 : within * 5 + 5]
        if step < start + steps:
            drawn |= {file_of(row) for row in rows}
        elif epoch == (start + steps - 1) // STEPS_PER_EPOCH:
            ahead |= {file_of(row) for row in rows}
    touched = [
        set(group)
        for epoch in range(start // STEPS_PER_EPOCH, (start + steps - 1) // STEPS_PER_EPOCH + 1)
        for group in blocks.groups(epoch)
        if epoch_draws(blocks, epoch, group, start, start + steps, workers)
    ]
    assert drawn | ahead <= found == set().union(*touched)


def epoch_draws(blocks: Blocks, epoch: int, group: list[int], start: int, target: int, workers: int) -> bool:
    """Tells whether steps of a pass, or the loader ahead of them, draw rows of a group."""
    first, last = (min(max(step - epoch * STEPS_PER_EPOCH, 0), STEPS_PER_EPOCH) for step in (start, target))
    rows = list(blocks.order(epoch))[first * 5 : (last + 1 + 2 * workers) * 5]
    return any(file_of(row) in group for row in rows)


def test_a_slice_gives_its_rows_and_refuses_others(tmp_path: Path) -> None:
    names = []
    for number, rows in enumerate([2, 3, 1]):
        ids = pa.array([[number, at] for at in range(rows)], pa.list_(pa.int32()))
        table = pa.table({"input_ids": ids, "position": range(rows)})
        names.append(f"{number}.arrow")
        with pa.ipc.new_stream(str(tmp_path / names[-1]), table.schema) as writer:
            writer.write_table(table)
    blocks = Blocks([2, 3, 1], seed=0)
    rows = samplers.open_files(str(tmp_path), names, blocks, {2, 1})
    assert len(rows) == 6
    assert [row["input_ids"] for row in rows.__getitems__([5, 2, 4])] == [[2, 0], [1, 0], [1, 2]]
    for dataset in (rows, rows.remove_columns("position")):
        with pytest.raises(BatonError, match="row 1 of the training data is asked for, and its file was not fetched"):
            dataset.__getitems__([5, 1])
    chosen = samplers.sampler(recipe(), rows, 3)
    assert isinstance(chosen, samplers.InBlocks)
    chosen.set_epoch(1)
    assert list(chosen) == list(blocks.order(1))


@pytest.fixture
def tokens_run(s3_store: str, tmp_path: Path) -> Run:
    """A run in a bucket, with tokens in files of `ROWS` and others beside them."""
    run, folder = Run(Storage(s3_store), "r"), tmp_path / "tokens"
    train = [f"train/{number:05d}.arrow" for number in range(len(ROWS))]
    for number, name in enumerate([*train, "train/state.json", "tokenizer/t.json", "eval/0.arrow", "seen/0.jsonl"]):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"1" * (number + 1))
    counts = dict.fromkeys(("tokens", "truncated", "dropped", "train", "eval", "bytes"), 0)
    files = {"train": list(zip(train, ROWS, strict=True)), "eval": [("eval/0.arrow", 1)]}
    bundle.publish(run.storage, "data/x", str(folder), kind="tokens", meta={**counts, "lengths": {}, "files": files})
    return run


PLAN = Plan(rows=97, steps_per_epoch=STEPS_PER_EPOCH, num_steps=40, targets=(20, 40))


@pytest.mark.s3
@pytest.mark.parametrize("order", [None, "blocks"])
def test_a_chunk_fetches_the_files_that_it_lacks(
    order: str | None, tokens_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    monkeypatch.setattr(events, "emit", told.append)
    tokens_run.put("tokens.json", {"prefix": "data/x", **({"order": order} if order else {})})
    places: list[int] = []

    def place(num_bytes: int) -> str:
        places.append(num_bytes)
        return str(tmp_path / "place")

    chunk = ChunkTokens(tokens_run, recipe(), PLAN, place)
    numbered = {f"train/{number:05d}.arrow": number for number in range(len(ROWS))}
    sizes = {**{name: number + 1 for name, number in numbered.items()}, "train/state.json": 21, "tokenizer/t.json": 22}
    sizes["eval/0.arrow"] = 23
    present: set[str] = set()
    for start, target in ((0, 1), (0, 1), (0, 12), (12, 21)):
        wanted = set(numbered.values())
        if order == "blocks":
            wanted = needed_files(Blocks(ROWS, seed=3), recipe(), STEPS_PER_EPOCH, start, target)
        names = {name for name in sizes if numbered.get(name, -1) in {*wanted, -1}}
        num_bytes = sum(sizes[name] for name in names - present)
        present |= names
        assert chunk.fetch(start, target) == chunk.folder == str(tmp_path / "place/tokens")
        assert {str(path.relative_to(chunk.folder)) for path in Path(chunk.folder).rglob("*.*")} == present
        if order == "blocks":
            count = len(present & numbered.keys())
            assert (told[-1].files, told[-1].of, told[-1].bytes) == (count, len(ROWS), num_bytes)
            assert chunk.present == {numbered[name] for name in present & numbered.keys()}
            assert chunk.files == list(numbered)
    assert len(told) == (4 if order == "blocks" else 0)
    assert (chunk.blocks is None) == (order != "blocks")
    assert places == [sum(sizes.values())] if order != "blocks" else len(places) == 1
    other = ChunkTokens(tokens_run, recipe(), PLAN, place)
    other.adopt(chunk.folder)
    assert other.folder == chunk.folder
    assert len(places) == 1


def test_lengths_of_chosen_rows(tmp_path: Path) -> None:
    table = pa.table({"a_ids": pa.array([[1], [1, 2], []]), "b_ids": pa.array([[], [1], [1, 2, 3, 4]])})
    with pa.ipc.new_stream(str(tmp_path / "0.arrow"), table.schema) as writer:
        writer.write_table(table)
    rows = samplers.open_files(str(tmp_path), ["0.arrow"], Blocks([3], seed=0), {0})
    assert samplers.lengths(rows) == [1, 3, 4]
    assert samplers.lengths(rows.select([2, 0, 2])) == [4, 1, 4]
