"""ZeRO's partitions, cut for another number of processes."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed

from baton.checkpoint import zero_format
from baton.checkpoint.digest import tree_digest
from baton.errors import DamagedError
from baton.train import reshard
from baton.train.protocol import Resumption
from baton.train.sharding import (
    MASTER,
    MASTERS,
    OPTIMIZER_STATES,
    Partitioning,
    SavedPartitions,
    WeightSegment,
    row_length,
)

GROUPS = [[7, 1, 12], [5, 3]]
"""Sizes of weights that come out even for no number of processes."""


def whole(kind: str) -> list[torch.Tensor]:
    """Returns the values of each weight, no two of them the same."""
    first = 1.0 if kind == MASTER else 1000.0
    return list((torch.arange(28) + first).split([size for group in GROUPS for size in group]))


def row(kind: str, pieces: list[WeightSegment]) -> torch.Tensor:
    """Returns a process's row, laid out value by value."""
    values: list[float] = []
    for piece in pieces:
        values += [*whole(kind)[piece.weight][piece.start : piece.stop].tolist(), *[0.0] * piece.padding]
    return torch.tensor(values)


def state(stage: int, cut: Partitioning, rank: int) -> dict[str, Any]:
    """Returns what DeepSpeed has in a process."""
    rows = cut.rows[rank]
    lean = [row_length(pieces) - (pieces[-1].padding if stage == 2 else 0) for pieces in rows]
    return {
        MASTERS[stage]: [row(MASTER, pieces)[:real] for pieces, real in zip(rows, lean, strict=True)],
        OPTIMIZER_STATES[stage]: {
            "state": {
                number: {"step": torch.tensor(3.0), "exp_avg": row("exp_avg", pieces)}
                for number, pieces in enumerate(rows)
            },
            "param_groups": [{"lr": 0.1, "params": [number]} for number in range(len(rows))],
        },
        "partition_count": len(cut.rows),
    }


def saved(stage: int, ranks: int, folder: Path) -> SavedPartitions:
    """Writes what so many processes have, and reads it."""
    cut = Partitioning(stage, GROUPS, ranks)
    for rank in range(ranks):
        zero_format.write(str(folder / zero_format.file_name(rank)), state(stage, cut, rank))
    return SavedPartitions(str(folder), ranks, GROUPS)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 16])
def test_each_value_lies_in_one_place_and_all_rows_are_as_long(stage: int, ranks: int) -> None:
    cut = Partitioning(stage, GROUPS, ranks)
    values = torch.cat([row(MASTER, pieces) for rows in cut.rows for pieces in rows])
    assert torch.equal(values[values > 0].sort().values, torch.cat(whole(MASTER)))
    assert len({tuple(row_length(pieces) for pieces in rows) for rows in cut.rows}) == 1


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2), (3, 2), (2, 16), (16, 3), (2, 1)])
def test_another_number_of_processes_reads_what_it_would_have_had(
    stage: int, before: int, after: int, tmp_path: Path
) -> None:
    parts = saved(stage, before, tmp_path)
    cut = Partitioning(stage, GROUPS, after)
    for rank in range(after):
        own = state(stage, cut, rank)
        made = parts.part({**own, MASTERS[stage]: None}, cut, rank)
        for mine, expected in zip(made[MASTERS[stage]], own[MASTERS[stage]], strict=True):
            assert torch.equal(mine[: len(expected)], expected)
        assert made["partition_count"] == after
        optimizer, expected = made[OPTIMIZER_STATES[stage]], own[OPTIMIZER_STATES[stage]]
        assert optimizer["param_groups"] == expected["param_groups"]
        for number, entries in expected["state"].items():
            assert torch.equal(optimizer["state"][number]["exp_avg"], entries["exp_avg"])
            assert optimizer["state"][number]["step"] == 3


def _prove(rank: int, ranks: int, stage: int, before: int, folder: Path, found: Any) -> None:
    """Tells the digests that one of some processes gets from its own state for those that have saved."""
    meeting = f"file://{folder}/meeting"
    torch.distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks)
    weights = [[torch.nn.Parameter(torch.zeros(size)) for size in group] for group in GROUPS]
    trainer: Any = SimpleNamespace(
        trained=lambda: weights,
        args=SimpleNamespace(world_size=ranks, process_index=rank),
        resumption=Resumption(folder=str(folder), ranks=before),
        optimizer_state=lambda: state(stage, Partitioning(stage, GROUPS, ranks), rank),
    )
    found.put([tree_digest(tree) for tree in reshard._Partitions(trainer).trees()])
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(("before", "after"), [(3, 2), (5, 2), (2, 3)])
def test_several_processes_prove_what_another_number_had_saved(
    stage: int, before: int, after: int, tmp_path: Path
) -> None:
    saved(stage, before, tmp_path)
    context = multiprocessing.get_context("fork")
    found = context.Queue()
    processes = [
        context.Process(target=_prove, args=(rank, after, stage, before, tmp_path, found)) for rank in range(after)
    ]
    for process in processes:
        process.start()
    digests = [found.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    cut = Partitioning(stage, GROUPS, before)
    assert digests == [[tree_digest(state(stage, cut, rank)) for rank in range(before)]] * after


@pytest.mark.parametrize("stage", [2, 3])
def test_one_process_reads_whole_weights(stage: int, tmp_path: Path) -> None:
    parts = saved(stage, 3, tmp_path)
    counts = []
    for number, values in enumerate(whole(MASTER)):
        pieces = [WeightSegment(number, 0, len(values))]
        assert torch.equal(parts.row(MASTER, pieces), values)
        assert torch.equal(parts.state(pieces)["exp_avg"], whole("exp_avg")[number])
        counts.append(parts.state(pieces)["step"])
    before = [int(count) for count in counts]
    for count in counts:  # as an optimizer does
        count += 1
    assert [int(count) for count in counts] == [count + 1 for count in before]


@pytest.mark.parametrize("stage", [2, 3])
def test_parts_of_another_model_are_refused(stage: int, tmp_path: Path) -> None:
    saved(stage, 2, tmp_path)
    for groups in ([[7, 1, 40], [5, 3]], [[7, 1], [5, 3]], [[7, 1, 12], [5, 3, 4]], [*GROUPS, [4]], GROUPS[:1]):
        with pytest.raises(DamagedError):
            SavedPartitions(str(tmp_path), 2, groups)


def test_long_rows_of_stage_3_that_follow_the_number_of_processes(tmp_path: Path) -> None:
    """DeepSpeed ends a row of stage 3 at so many values of a process: with fewer processes there are more rows."""
    cut = Partitioning(3, [[7], [1, 12], [5, 3]], 2)
    for rank in range(2):
        zero_format.write(str(tmp_path / zero_format.file_name(rank)), state(3, cut, rank))
    parts = SavedPartitions(str(tmp_path), 2, GROUPS)
    assert torch.equal(parts.row(MASTER, [WeightSegment(2, 0, 12)]), whole(MASTER)[2])


def test_values_in_fewer_bits_stay_in_them(tmp_path: Path) -> None:
    """Also where zeros fill a row up, and where a process has nothing but those."""
    cut = Partitioning(2, GROUPS, 2)
    for rank in range(2):
        part = state(2, cut, rank)
        for entries in part[OPTIMIZER_STATES[2]]["state"].values():
            entries["exp_avg"] = entries["exp_avg"].to(torch.bfloat16)
        zero_format.write(str(tmp_path / zero_format.file_name(rank)), part)
    parts, others = SavedPartitions(str(tmp_path), 2, GROUPS), Partitioning(2, GROUPS, 16)
    for pieces in (row for rows in others.rows for row in rows):
        if any(piece.start < piece.stop for piece in pieces):
            assert parts.row("exp_avg", pieces).dtype == torch.bfloat16
            assert parts.row(MASTER, pieces).dtype == torch.float32
        else:
            assert parts.row(MASTER, pieces).tolist() == [0.0] * row_length(pieces)
