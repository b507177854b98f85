"""After a preemption the newest checkpoint in a mounted bucket is incomplete: its files arrive later, one by one.

Issue: https://github.com/axolotl-ai-cloud/axolotl/pull/3948
Upstream: fixture. A folder stands for SkyPilot's `MOUNT_CACHED`: small files of the newest checkpoint have arrived,
    optimizer, scheduler and random state have not. axolotl picks the highest number, and Transformers' `Trainer`
    resumes from it without an error, to other losses.
Baton: writes to the bucket directly, manifest last. A chunk killed during the upload leaves no checkpoint; the next
    process takes the previous one and ends on the undisturbed bits.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from baton.recipe.recipe import Recipe
from baton.runs.run import Run
from tests.demands import chunks, upstream


def test_upstream_goes_on_without_its_optimizer(tmp_path: Path, legs: Any) -> None:
    code, printed = legs.leg(upstream.preempted_on_a_mount, str(tmp_path))
    assert code == 0, printed
    told = upstream.read(printed)
    assert told["newest"] == "checkpoint-5"
    assert told["files"] == ["config.json", "model.safetensors", "trainer_state.json"]
    assert len(told["again"]) == 3
    assert told["again"] != told["whole"]


@pytest.mark.slow
@pytest.mark.s3
def test_baton_commits_in_the_bucket(recipes: dict[str, Recipe], adapted: Run, s3_store: str, legs: Any) -> None:
    run = legs.prepare(legs.changed(recipes["lora"], store=s3_store), "mounted")
    code, printed = legs.leg(chunks.killed_in_upload, run.uri, 1, 8)
    assert code == -signal.SIGKILL, printed
    assert legs.steps(run) == [4]
    files = [name for name in run.storage.find(run.path("checkpoints")) if name.startswith("step-00000008/")]
    assert len(files) >= 2, "of the second, which are never read"
    legs.train(run)
    assert legs.final(run).meta.state == legs.final(adapted).meta.state
    assert legs.losses(run) == legs.losses(adapted)
