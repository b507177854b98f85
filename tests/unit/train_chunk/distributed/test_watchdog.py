"""Who hangs, who is slow, and what a chunk says of its processes' ends."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from baton.components.shared.core.errors import ExactnessError
from baton.components.shared.core.state import PARTS
from baton.components.train_chunk.checkpointing import state
from baton.components.train_chunk.distributed import launcher
from baton.components.train_chunk.distributed.ranks import Ranks
from baton.components.train_chunk.distributed.watchdog import Sign, Watchdog
from baton.components.train_chunk.trainer.base import OF_EACH


@pytest.fixture
def watchdog() -> Watchdog:
    return Watchdog(Ranks(size=3), 600.0)


def test_the_rank_that_has_got_least_done_hangs(watchdog: Watchdog) -> None:
    rows = [
        Sign(41, 7, "backward pass", False, 0),
        Sign(40, 7, "forward pass", False, 9),
        Sign(41, 7, "rows", False, 0),
    ]
    assert watchdog.verdict(rows).startswith("rank 1 hangs in step 7, before or in its forward pass: no sign")


def test_several_that_have_got_as_little_done_are_all_named(watchdog: Watchdog) -> None:
    rows = [
        Sign(41, 7, "end", False, 0),
        Sign(40, 7, "backward pass", False, 1),
        Sign(40, 7, "backward pass", False, 1),
    ]
    assert watchdog.verdict(rows).startswith("ranks 1, 2 hang in step 7")


def test_of_processes_that_write_the_one_with_fewest_tokens_hangs(watchdog: Watchdog) -> None:
    rows = [Sign(40, 7, "writing", False, 5), Sign(41, 7, "rewards", False, 0), Sign(40, 7, "writing", False, 4)]
    assert watchdog.verdict(rows).startswith("rank 2 hangs in step 7, before or in its writing: no sign")


@pytest.mark.parametrize(
    ("seconds", "named"),
    [
        pytest.param([0.1, 0.1, 0.4], [2], id="one"),
        pytest.param([0.1, 0.14, 0.12], [], id="none"),
        pytest.param([0.001, 0.001, 0.015], [], id="noise"),
        pytest.param([0.5, 0.1, 0.1], [0], id="first"),
    ],
)
def test_a_slow_one_is_named(
    seconds: list[float], named: list[int], watchdog: Watchdog, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="baton"):
        watchdog.name_slow(seconds)
        watchdog.name_slow(seconds)
    assert [record.args[0] for record in caplog.records if record.args] == named, "once"


def test_what_a_process_does_with_the_model_beside_training_is_no_sign_of_life(watchdog: Watchdog) -> None:
    import torch

    class Wrapped(torch.nn.Module):
        def __init__(self, module: torch.nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return self.module(rows)  # type: ignore[no-any-return]

    model = torch.nn.Linear(2, 2)
    wrapped = Wrapped(model)
    watchdog.time_forward(model, wrapped)
    for _ in range(3):
        model(torch.ones(1, 2))
    assert (watchdog._count, watchdog.take_busy()) == (0, 0.0)
    wrapped(torch.ones(1, 2))
    assert watchdog._count == 2
    assert watchdog.take_busy() > 0
    model(torch.ones(1, 2))
    assert watchdog._count == 2


def test_what_a_process_generates_is_no_forward_pass_where_nothing_is_wrapped(watchdog: Watchdog) -> None:
    import torch

    model = torch.nn.Linear(2, 2)
    watchdog.time_forward(model, model)
    with torch.no_grad():
        model(torch.ones(1, 2))
    assert (watchdog._count, watchdog.take_busy()) == (0, 0.0)
    model(torch.ones(1, 2))
    assert watchdog._count == 2
    assert watchdog.take_busy() > 0


def digests(**changed: str) -> dict[str, str]:
    return {name: changed.get(name, "0") for name in PARTS}


def test_what_all_processes_have_counts_once() -> None:
    alone = state.joined([digests(rng="a")], replicated=True)
    both = state.joined([digests(rng="a"), digests(rng="b")], replicated=True)
    assert {name for name in PARTS if alone[name] != both[name]} == {"rng"}
    assert both["rng"] != state.joined([digests(rng="b"), digests(rng="a")], replicated=True)["rng"], "by rank"


def test_copies_that_differ_are_refused_and_shards_are_not() -> None:
    rows = [digests(), digests(), digests(weights="1")]
    with pytest.raises(ExactnessError, match="rank 2 has other weights than rank 0"):
        state.joined(rows, replicated=True)
    assert state.joined(rows, replicated=False)["weights"] not in ("0", "1")


def test_what_a_method_has_in_each_process_may_differ() -> None:
    rows = [digests(method="1"), digests(method="2")]
    with pytest.raises(ExactnessError, match="rank 1 has other method"):
        state.joined(rows, replicated=True)
    both = state.joined(rows, replicated=True, of_each=(*OF_EACH, "method"))
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
    error = launcher._explained(failed)
    assert error.message == text
    assert error.exit_code == code
