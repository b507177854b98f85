"""Who hangs, and what a chunk says of its processes' ends."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from baton.errors import ExactnessError
from baton.runs.documents import PARTS
from baton.train import distributed, state
from baton.train.distributed import Heartbeat, Ranks, Watchdog
from baton.train.protocol import PER_RANK_PARTS


@pytest.fixture
def watchdog() -> Watchdog:
    return Watchdog(Ranks(size=3), 600.0)


def test_the_rank_that_has_got_least_done_hangs(watchdog: Watchdog) -> None:
    rows = [
        Heartbeat(41, 7, "backward pass", False, 0),
        Heartbeat(40, 7, "forward pass", False, 9),
        Heartbeat(41, 7, "rows", False, 0),
    ]
    assert watchdog.verdict(rows).startswith("rank 1 hangs in step 7, before or in its forward pass: no sign")


def test_several_that_have_got_as_little_done_are_all_named(watchdog: Watchdog) -> None:
    rows = [
        Heartbeat(41, 7, "end", False, 0),
        Heartbeat(40, 7, "backward pass", False, 1),
        Heartbeat(40, 7, "backward pass", False, 1),
    ]
    assert watchdog.verdict(rows).startswith("ranks 1, 2 hang in step 7")


def test_of_processes_that_write_the_one_with_fewest_tokens_hangs(watchdog: Watchdog) -> None:
    rows = [
        Heartbeat(40, 7, "writing", False, 5),
        Heartbeat(41, 7, "rewards", False, 0),
        Heartbeat(40, 7, "writing", False, 4),
    ]
    assert watchdog.verdict(rows).startswith("rank 2 hangs in step 7, before or in its writing: no sign")


def test_a_forward_pass_in_training_alone_is_a_sign_of_life(watchdog: Watchdog) -> None:
    import torch

    model = torch.nn.Linear(2, 2)
    watchdog.follow(model)
    with torch.no_grad():
        model(torch.ones(1, 2))
    assert watchdog._count == 0, "what generates calls the same module"
    model(torch.ones(1, 2))
    assert watchdog._count == len(watchdog.beats_of_a_pass) - 2, "the others are the trainer's"
    model.eval()
    model(torch.ones(1, 2))
    assert watchdog._count == 2


def digests(**changed: str) -> dict[str, str]:
    return {name: changed.get(name, "0") for name in PARTS}


def test_what_all_processes_have_counts_once() -> None:
    alone = state.merge_rank_digests([digests(rng="a")], replicated=True)
    both = state.merge_rank_digests([digests(rng="a"), digests(rng="b")], replicated=True)
    assert {name for name in PARTS if alone[name] != both[name]} == {"rng"}
    assert both["rng"] != state.merge_rank_digests([digests(rng="b"), digests(rng="a")], replicated=True)["rng"], (
        "by rank"
    )


def test_copies_that_differ_are_refused_and_shards_are_not() -> None:
    rows = [digests(), digests(), digests(weights="1")]
    with pytest.raises(ExactnessError, match="rank 2 has other weights than rank 0"):
        state.merge_rank_digests(rows, replicated=True)
    assert state.merge_rank_digests(rows, replicated=False)["weights"] not in ("0", "1")


def test_what_a_method_has_in_each_process_may_differ() -> None:
    rows = [digests(method="1"), digests(method="2")]
    with pytest.raises(ExactnessError, match="rank 1 has other method"):
        state.merge_rank_digests(rows, replicated=True)
    both = state.merge_rank_digests(rows, replicated=True, per_rank_parts=(*PER_RANK_PARTS, "method"))
    assert both["method"] not in ("1", "2")


def failure(rank: int, code: int, at: int, message: str = "") -> Any:
    data = {"message": {"message": message, "extraInfo": {"py_callstack": "Traceback"}}} if message else {}
    return SimpleNamespace(
        local_rank=rank, exitcode=code, timestamp=at, error_file_data=data, signal_name=lambda: "SIGKILL"
    )


@pytest.mark.parametrize(
    ("failures", "text", "code"),
    [
        pytest.param([failure(1, -9, 5)], "rank 1 was ended by SIGKILL.", 1, id="killed"),
        pytest.param([failure(0, 1, 5, "UserError: give another.")], "give another.", 2, id="ours"),
        pytest.param(
            [failure(1, 1, 4, "RuntimeError: Connection closed"), failure(0, 1, 5, "ExactnessError: differs")],
            "differs",
            1,
            id="cause",
        ),
        pytest.param([failure(1, 1, 4, "ValueError: odd")], "rank 1 failed: ValueError: odd.", 1, id="other"),
        pytest.param([failure(1, 3, 4)], "rank 1 failed: exit code 3.", 1, id="silent"),
    ],
)
def test_one_message_for_all_ends(failures: list[Any], text: str, code: int) -> None:
    failed: Any = SimpleNamespace(failures=dict(enumerate(failures)))
    error = distributed._explained(failed)
    assert error.message == text
    assert error.exit_code == code
