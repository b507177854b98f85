"""Samples and weights: by content and seed, whatever the order."""

from __future__ import annotations

import json
import random
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.data.assign import smallest_draws, times_used
from baton.data.rows import Record, RejectedRows, Spool, UnusableRow

ROWS = [Record(f"row {number}", "rows.jsonl", number) for number in range(200)]


def chosen(rows: list[Record], count: int, seed: int = 0) -> list[Record]:
    """The rows that are chosen."""
    with tempfile.TemporaryDirectory() as folder:
        return list(smallest_draws(Spool(rows, f"{folder}/rows"), seed, count))


@settings(max_examples=30)
@given(
    count=st.integers(1, 60), numbers=st.lists(st.integers(0, 30), max_size=50), order=st.randoms(use_true_random=False)
)
def test_the_same_rows_whatever_their_order(count: int, numbers: list[int], order: random.Random) -> None:
    rows = [ROWS[number] for number in numbers]
    shuffled = list(rows)
    order.shuffle(shuffled)

    found, other = chosen(rows, count), chosen(shuffled, count)

    assert len(found) == min(count, len(rows))
    assert Counter(row.content for row in found) == Counter(row.content for row in other)
    assert not Counter(row.content for row in found) - Counter(row.content for row in rows)


def test_rows_come_in_the_order_in_which_they_stand() -> None:
    found = chosen(ROWS, 50)

    assert [row.line for row in found] == sorted(row.line for row in found)
    assert {row.line for row in found} != set(range(50))


def test_growth_only_pushes_rows_out() -> None:
    few, many = {row.content for row in chosen(ROWS[:100], 50)}, {row.content for row in chosen(ROWS, 50)}

    assert {row for row in many if int(row.split()[1]) < 100} <= few


def test_another_seed_chooses_others() -> None:
    assert {row.line for row in chosen(ROWS, 50, 1)} != {row.line for row in chosen(ROWS, 50, 2)}


@pytest.mark.parametrize(
    ("weight", "least", "most", "low", "high"),
    [(1, 1, 1, 4000, 4000), (3, 3, 3, 12000, 12000), (0.25, 0, 1, 900, 1100), (2.5, 2, 3, 9840, 10160)],
)
def test_how_often_a_row_is_used(weight: float, least: int, most: int, low: int, high: int) -> None:
    found = [times_used(f"row {number}", 7, weight) for number in range(4000)]

    assert (min(found), max(found)) == (least, most)
    assert low <= sum(found) <= high


@given(content=st.text(max_size=5), seed=st.integers(0, 2**32 - 1), weight=st.floats(0.01, 1000))
def test_uses_are_the_weight_to_within_one(content: str, seed: int, weight: float) -> None:
    assert abs(times_used(content, seed, weight) - weight) < 1


def test_a_spool_gives_back_what_it_took(tmp_path: Path) -> None:
    rows = [Record(json.dumps("é\u2028\n\x00\t", ensure_ascii=False), "s3://b/ü.jsonl", 3, 1, "eval", "key"), *ROWS]

    spool = Spool(iter(rows), str(tmp_path / "spool"))

    assert len(spool) == 201
    assert list(spool) == list(spool) == rows


def test_what_is_refused_is_written_as_it_comes(tmp_path: Path) -> None:
    refused = RejectedRows(str(tmp_path / "rejected.jsonl"))
    first, cut = UnusableRow("a", 1, "bad \udcff", '{"a": "\ud800"}'), UnusableRow("b", 9, "cut", "", rest=True)
    for row in (first, cut):
        refused.add(row)
    refused.close()

    lines = (tmp_path / "rejected.jsonl").read_text(encoding="ascii").splitlines()
    assert [UnusableRow(**json.loads(line)) for line in lines] == [first, cut]
    assert (refused.count, refused.first, refused.broken_off) == (2, first, cut)
