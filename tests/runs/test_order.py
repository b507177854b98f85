"""The order of documents that a run gathers: as they were written, also within a millisecond."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from pathlib import Path

import pytest

from baton.runs.documents import Restart
from baton.runs.run import Run
from baton.store.storage import Storage

NUMBER = 60  # many more than the milliseconds that they take
KINDS: dict[str, tuple[Callable[[Run, int], None], Callable[[Run], list[str]]]] = {
    "records": (
        lambda run, number: run.record("train-chunk-000", {"chunk": 0, "outcome": str(number)}),
        lambda run: [each.outcome for each in run.attempts(0)],
    ),
    "restarts": (
        lambda run, number: run.note_restart(Restart(chunk=0, reason=str(number))),
        lambda run: [each.reason for each in run.restarts()],
    ),
    "warnings": (
        lambda run, number: run.warn(str(number)),
        lambda run: [each.text for each in run.warnings()],
    ),
}


@pytest.mark.parametrize(("write", "read"), KINDS.values(), ids=KINDS)
def test_documents_are_read_in_the_order_of_their_writes(
    write: Callable[[Run, int], None], read: Callable[[Run], list[str]], tmp_path: Path
) -> None:
    run = Run(Storage(str(tmp_path)), "gathers")
    for number in range(NUMBER):
        write(run, number)
    assert read(run) == [str(number) for number in range(NUMBER)]


def test_a_records_name_holds_its_time(tmp_path: Path) -> None:
    run = Run(Storage(str(tmp_path)), "gathers")
    before = datetime.datetime.now(datetime.UTC)
    run.record("split-data", {})
    assert run.recorded(before - datetime.timedelta(seconds=1)) == {"split-data"}
    assert run.recorded(before + datetime.timedelta(hours=1)) == set()
