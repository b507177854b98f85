"""What DPO logs of the policy and its reference."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import tiny


def test_log_probabilities_of_policy_and_reference_and_their_divergence_are_logged(
    tiny_base: str, tmp_path: Path
) -> None:
    rows = [{"prompt": f"What is {n}?", "chosen": f"it is {n}", "rejected": "the fox jumps"} for n in range(8)]
    recipe = tiny.recipe(tiny_base, training={"method": "dpo"})
    trainer = tiny.trainer(recipe, tiny.tokens(recipe, rows), tmp_path)
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(logged) == 3
    start = logged[0]
    assert start["kl"] == 0
    for entry in logged:
        for side in ("chosen", "rejected"):  # each step has all rows, and the reference stays what it was
            assert entry[f"logps/reference_{side}"] == pytest.approx(start[f"logps/{side}"], rel=1e-4)
        ratios = [entry[f"logps/{side}"] - entry[f"logps/reference_{side}"] for side in ("chosen", "rejected")]
        assert entry["kl"] == pytest.approx(sum(ratios) / 2, abs=1e-4)
    assert logged[-1]["logps/chosen"] != start["logps/chosen"]
    assert logged[-1]["kl"] != 0
