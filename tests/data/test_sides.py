"""Sides: decided by content and seed, near the share in each stratum, and for good."""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from baton.data import assign
from baton.data.assign import SplitAssigner
from baton.data.rows import Record
from baton.errors import DamagedError, UserError
from baton.recipe import load
from baton.recipe.data import Data, SplitRule
from baton.store.storage import Storage


def rule(
    store: str, *, seed: int = 7, name: str = "tiny", data: dict[str, Any] | None = None, **split: Any
) -> SplitAssigner:
    """The rule of a recipe."""
    document = {
        "name": name,
        "seed": seed,
        "model": {"base": "org/model"},
        "data": {"source": "rows.jsonl", "split": split, **(data or {})},
    }
    return SplitAssigner(load.validate(document, origin="r.yaml"), Storage(store))


def records(count: int, *, start: int = 0, key: str = "") -> list[Record]:
    """Records with contents of their own."""
    return [
        Record(f'{{"text": "row {number} {key}"}}', "rows.jsonl", number, key=key) for number in range(start, count)
    ]


def assigned(found: SplitAssigner, rows: Iterable[Record]) -> dict[str, str]:
    """Content → side."""
    rows = list(rows)
    if found.needs_all:
        found.fit(rows)
    return {row.content: found.side(row) for row in rows}


def counts(found: SplitAssigner, rows: Iterable[Record]) -> Counter[str]:
    """Side → number of rows."""
    return Counter(assigned(found, rows).values())


def test_where_content_puts_rows_by_hand(tmp_path: Path) -> None:
    """SHA-256 of `7:a` begins with 0x82d9, of `7:b` with 0xec2a, of `7:c` with 0x18ec: at 51%, 92% and 9.7%."""
    found = rule(str(tmp_path), eval=0.1, test=0.2)

    by_hand = {text: assign.position(7, text) >> 48 for text in "abc"}
    at = [found.side(Record(text, "rows.jsonl", 1)) for text in "abc"]

    assert by_hand == {"a": 0x82D9, "b": 0xEC2A, "c": 0x18EC}
    assert at == ["train", "test", "eval"]


def test_one_share_moves_no_row_of_the_other(tmp_path: Path) -> None:
    rows = records(2000)
    small, large = (assigned(rule(str(tmp_path), eval=0.1, test=test), rows) for test in (0.05, 0.3))

    moved = {(small[row], large[row]) for row in small if small[row] != large[row]}
    assert moved == {("train", "test")}


@pytest.mark.parametrize("size", [1, 50, 137, 999])
def test_a_count_is_met(size: int, tmp_path: Path) -> None:
    assert counts(rule(str(tmp_path), eval=size), records(1000))["eval"] == size


def test_counts_of_both(tmp_path: Path) -> None:
    assert counts(rule(str(tmp_path), eval=30, test=70), records(200)) == {"eval": 30, "test": 70, "train": 100}


def test_a_count_stays_the_share_it_was(store: str) -> None:
    before = assigned(rule(store, eval=100), records(1000))
    after = assigned(rule(store, eval=100), records(10_000))
    elsewhere = assigned(rule(f"{store}/other", eval=100), records(10_000))

    assert {row: after[row] for row in before} == before
    assert 900 < Counter(after.values())["eval"] < 1100
    assert Counter(elsewhere.values())["eval"] == 100


@pytest.mark.parametrize(
    "other",
    [{"seed": 8}, {"name": "other"}, {"eval": 101}, {"test": 0.1}, {"data": {"max_samples": 5000}}],
    ids=["seed", "name", "count", "other share", "fewer rows"],
)
def test_a_count_of_something_else_is_another(other: dict[str, Any], tmp_path: Path) -> None:
    first = rule(str(tmp_path), eval=100)
    first.fit(records(1000))
    second = rule(str(tmp_path), **{"eval": 100, **other})
    second.fit(records(10_000))

    assert first.pinned != second.pinned
    assert counts(second, records(10_000))["eval"] == other.get("eval", 100)


@pytest.mark.parametrize("pin", [b"{", b'{"shares": {"eval": 0.1}, "cuts": {}}', b'{"shares": [], "cuts": {"": [1]}}'])
def test_a_pin_that_no_split_has_written_is_damage(pin: bytes, tmp_path: Path) -> None:
    first = rule(str(tmp_path), eval=100)
    first.fit(records(1000))
    (path,) = tmp_path.glob("splits/*/0.json")
    path.write_bytes(pin)
    with pytest.raises(DamagedError, match=r"splits/.*/0\.json is not"):
        rule(str(tmp_path), eval=100).fit(records(1000))


def test_more_than_there_is(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        rule(str(tmp_path), eval=200, test=100).fit(records(300))

    assert str(caught.value) == (
        "data.split.eval 200 and data.split.test 100 of 300 rows: none remain to train on. "
        "Hold out fewer, or give more rows."
    )
    assert Storage(str(tmp_path)).list("splits") == []


def strata(sizes: dict[str, int]) -> list[Record]:
    """Records of several strata."""
    return [row for key, size in sizes.items() for row in records(size, key=key)]


def test_each_stratum_has_its_share(store: str) -> None:
    sizes = {"a": 1000, "b": 100, "c": 20, "d": 10, "e": 3}
    rows = strata(sizes)

    found = assigned(rule(store, eval=0.1, test=0.2, stratify_by="kind"), rows)

    held_out = {side: Counter(row.key for row in rows if found[row.content] == side) for side in ("eval", "test")}
    assert {key: held_out["eval"][key] for key in "abcd"} == {"a": 100, "b": 10, "c": 2, "d": 1}
    assert {key: held_out["test"][key] for key in "abcd"} == {"a": 200, "b": 20, "c": 4, "d": 2}
    assert held_out["eval"]["e"] <= 1
    assert held_out["test"]["e"] <= 1


def test_many_small_strata_have_the_share_together(tmp_path: Path) -> None:
    rows = strata({f"{number}": 3 for number in range(900)})

    held_out = counts(rule(str(tmp_path), eval=0.1, stratify_by="kind"), rows)["eval"]

    assert 220 <= held_out <= 320, "a tenth of 2700, to within three standard deviations of 900 draws"


def test_too_many_strata(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data\.split\.stratify_by: 'id' has more than 1000 values"):
        rule(str(tmp_path), stratify_by="id").fit(strata({f"{number}": 1 for number in range(1001)}))


def test_more_rows_than_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assign, "MAX_POSITIONS", 999)

    held_out = counts(rule(str(tmp_path), eval=100), records(1000))["eval"]

    plain = counts(rule(str(tmp_path), eval=0.1), records(1000))["eval"]
    assert held_out == plain != 100


SIZES = st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 40), min_size=1)


@settings(max_examples=40)
@given(
    sizes=SIZES,
    more=SIZES,
    order=st.randoms(use_true_random=False),
    split=st.fixed_dictionaries(
        {"eval": st.sampled_from([0.1, 0.5, 1, 2]), "test": st.sampled_from([0, 0.3])},
        optional={"stratify_by": st.just("kind")},
    ),
)
def test_growing_and_shuffling_move_no_row(
    sizes: dict[str, int], more: dict[str, int], order: random.Random, split: dict[str, Any]
) -> None:
    rows = strata({"z": 5, **sizes})
    grown = [*rows, *(row for key, size in more.items() for row in records(100 + size, start=100, key=key))]
    order.shuffle(grown)
    with tempfile.TemporaryDirectory() as store:
        before = assigned(rule(store, **split), rows)
        after = assigned(rule(store, **split), grown)
        again = assigned(rule(store, **split), rows[::-1])

    assert {row: after[row] for row in before} == before == again


@settings(max_examples=40)
@given(
    rows=st.lists(st.tuples(st.integers(0, 8), st.text("ab", max_size=3)), min_size=5, max_size=60),
    size=st.sampled_from([0.3, 0.5, 2]),
    seed=st.integers(0, 100),
)
def test_a_group_is_never_on_two_sides(rows: list[tuple[int, str]], size: float, seed: int) -> None:
    made = [Record(f"{number} {text}", "r", number, key=f"g{group}") for number, (group, text) in enumerate(rows)]
    with tempfile.TemporaryDirectory() as store:
        found = assigned(rule(store, seed=seed, eval=size, test=0.2, group_by="author"), made)

    by_group: dict[str, set[str]] = {}
    for row in made:
        by_group.setdefault(row.key, set()).add(found[row.content])
    assert {len(there) for there in by_group.values()} == {1}


def test_a_given_side_is_respected(tmp_path: Path) -> None:
    given_side = [Record(row.content, row.file, row.line, side="test") for row in records(50)]
    found = rule(str(tmp_path), eval=10, stratify_by="kind")

    by_side = counts(found, [*given_side, *records(150, start=50)])

    assert by_side == {"test": 50, "eval": 10, "train": 90}


CONTRADICTIONS = {
    "two rules": ({"stratify_by": "a", "group_by": "b"}, "stratify_by and group_by each decide a row's side"),
    "three rules": ({"stratify_by": "a", "group_by": "b", "column": "c"}, "leave 2 of them out"),
    "all held out": ({"eval": 0.5, "test": 0.5}, "eval 0.5 and test 0.5 leave no rows to train on"),
    "nothing for evaluation": ({"eval": 0}, "greater than 0"),
}


@pytest.mark.parametrize(("split", "message"), CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_settings_that_contradict_each_other(split: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        SplitRule(**split)

    assert message in str(caught.value)


def test_groups_and_a_given_side_contradict_each_other() -> None:
    with pytest.raises(ValidationError, match=r"the side of b\.jsonl is given; leave one out"):
        Data.model_validate(
            {"source": ["a.jsonl", {"uri": "b.jsonl", "side": "test"}], "split": {"group_by": "author"}}
        )
