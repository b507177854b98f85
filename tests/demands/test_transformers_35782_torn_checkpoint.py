"""A run killed during a save cannot resume: its newest checkpoint is half written, and is used.

Issue: https://github.com/huggingface/transformers/issues/35782
Upstream: reproduced. Transformers' `Trainer` dies during a save; `get_last_checkpoint` names the torn folder, and
    resuming ends with a traceback.
Baton: takes the newest checkpoint whose files match its manifest, names the damaged one and its file, and ends on the
    same bits.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from transformers.trainer_utils import get_last_checkpoint

from baton.checkpoint.store import CheckpointStore
from baton.runs.run import Run
from tests.demands import upstream


def test_upstream_takes_a_torn_checkpoint(tmp_path: Path, legs: Any) -> None:
    code, printed = legs.leg(upstream.killed_while_saving, str(tmp_path))
    assert code == -signal.SIGKILL, printed
    newest = get_last_checkpoint(str(tmp_path))
    assert newest == str(tmp_path / "checkpoint-4")
    assert "trainer_state.json" in os.listdir(tmp_path / "checkpoint-2")
    assert "trainer_state.json" not in os.listdir(newest)
    code, printed = legs.leg(upstream.resumed, str(tmp_path), newest)
    assert code == 1
    assert "Traceback" in printed
    code, printed = legs.leg(upstream.resumed, str(tmp_path), str(tmp_path / "checkpoint-2"))
    assert upstream.read(printed) == {"step": upstream.STEPS}, "the one before would have done"


def test_baton_passes_over_a_torn_checkpoint(adapted: Run, again: Any) -> None:
    store = CheckpointStore(adapted)
    torn = store.read(8)
    assert torn
    weights = Path(store.uri(torn)) / "adapter_model.safetensors"
    os.truncate(weights, weights.stat().st_size // 2)
    before, after, printed = again(adapted, 8)
    assert "checkpoint of step 8 is not used" in printed
    assert "adapter_model.safetensors" in printed
    assert after == before
