"""A run that is stopped and resumed goes on with other losses than one that is not.

Issue: https://github.com/huggingface/transformers/issues/11323
Upstream: reproduced. What the thread ran is mended: with the default collator Transformers 5.23 has the same losses
    after a resume, shown too. A collator that draws random numbers, as masking does, still gives others: the random
    state is set back after the first batch is made.
Baton: has the losses and the final state it had before, byte for byte, with such a collator.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from baton.runs.run import Run
from tests.demands import upstream


def test_upstream_has_other_losses_where_a_collator_draws(tmp_path: Path, legs: Any) -> None:
    code, printed = legs.leg(upstream.stopped_and_not, str(tmp_path))
    assert code == 0, printed
    told = upstream.read(printed)
    whole, resumed = told["plain"]
    assert len(whole) == 3
    assert resumed == whole, "mended"
    whole, resumed = told["drawing"]
    assert len(whole) == len(resumed) == 3
    assert resumed != whole


def test_baton_has_the_same_losses(noisy: Run, again: Any) -> None:
    before, after, _ = again(noisy, 5)
    assert len({loss for _, loss in before[0]}) == 8
    assert after == before
