"""A resumed run waits for a long time: its data loader reads everything it has trained on.

Issue: https://github.com/mosaicml/composer/issues/3649
Upstream: fixture. Composer's loop around a plain loader draws and drops batches up to the step of the checkpoint, so
    reading grows with the step.
Baton: seeks: a chunk reads only the rows of its own steps.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader, Dataset

from baton.runs.run import Run
from tests.demands import chunks


class Counted(Dataset):  # type: ignore[type-arg]
    """Rows that are counted as they are read."""

    def __init__(self) -> None:
        self.read = 0

    def __len__(self) -> int:
        return 4000

    def __getitem__(self, number: int) -> int:
        self.read += 1
        return number


def test_upstream_reads_what_was_trained_on() -> None:
    read = {}
    for step in (10, 100, 1000):
        rows = Counted()
        batches = iter(DataLoader(rows, batch_size=4))
        for _ in range(step):  # as Composer does with `spin_dataloaders`, for a loader without a state
            next(batches)
        read[step] = rows.read
    assert read == {10: 40, 100: 400, 1000: 4000}


def test_baton_reads_the_rows_of_its_steps(noisy: Run, again: Any, tmp_path: Path) -> None:
    before, after, _ = again(noisy, 5, chunks.counting_rows, str(tmp_path))
    assert after == before
    plan, batch = noisy.plan(), noisy.recipe().training.batch_size
    assert plan.steps_per_epoch == plan.num_steps == 8
    assert int((tmp_path / chunks.ROWS).read_text()) == plan.rows - 5 * batch, "those of the steps 6, 7 and 8"
