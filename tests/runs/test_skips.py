"""The document of a skipped step: one for each, whoever writes it, and the first one stands."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from baton.runs.documents import Skip, SourceLocation
from baton.runs.run import Run
from baton.store.storage import Storage


def skip(step: int, reason: str = "nan") -> Skip:
    """A document."""
    return Skip(step=step, chunk=1, reason=reason, message=f"step {step} has a loss that is not finite.")


def race(runs: list[Run], step: int) -> list[str]:
    """Has each run's process find a step at the same moment, and returns who was first."""
    barrier, first = threading.Barrier(len(runs)), []

    def find(number: int) -> None:
        barrier.wait()
        if runs[number].note_skip(skip(step, f"writer {number}")):
            first.append(f"writer {number}")

    threads = [threading.Thread(target=find, args=(number,)) for number in range(len(runs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return first


def test_the_first_writer_of_a_step_stands(tmp_path: Path) -> None:
    runs = [Run(Storage(str(tmp_path)), "run") for _ in range(8)]
    for step in (12, 3):
        (first,) = race(runs, step)
        assert not runs[0].note_skip(skip(step, "a zombie"))
        assert runs[0].skips()[0].reason == first
    assert [found.step for found in runs[0].skips()] == [3, 12]


@pytest.mark.s3
def test_a_store_with_leases_keeps_one_of_two(faulty_s3: Any) -> None:
    """The lease, whose object may lie beside the document, is none of the steps."""
    faulty_s3.proxy.drop_header("If-None-Match")
    runs = [Run(Storage(faulty_s3.store), "run") for _ in range(2)]
    assert not runs[0].storage.has_conditional_put
    (first,) = race(runs, 7)
    runs[0].storage.write(runs[0].path("skips/step-00000009.json.lease"), b"left by a writer that died")
    assert [(found.step, found.reason) for found in runs[1].skips()] == [(7, first)]


@pytest.mark.parametrize(
    ("rows", "count", "words"),
    [
        ([], 0, ""),
        ([("a.jsonl", 1_200)], 1, "a.jsonl line 1,200"),
        ([("a.jsonl", 3), ("a.jsonl", 5), ("b.jsonl", 1)], 3, "a.jsonl line 3, 5; b.jsonl line 1"),
        ([("a.jsonl", line) for line in range(1, 7)], 900, "a.jsonl line 1, 2, 3, 4 and 896 more"),
    ],
)
def test_rows_are_named_by_file_and_line(rows: list[tuple[str, int]], count: int, words: str) -> None:
    found = Skip(
        **skip(1).model_dump(exclude={"rows", "num_rows"}),
        rows=[SourceLocation(file=file, line=line) for file, line in rows],
        num_rows=count,
    )
    assert found.rows_in_words == words
