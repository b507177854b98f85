"""Near duplicates: the estimate is close, the result does not hang on the order, and one of each group stays."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.data import quality
from baton.data.rows import SIDES, Record
from baton.recipe.data import QualityChecks

WORDS = [
    "the",
    "a",
    "farmer",
    "sells",
    "buys",
    "apples",
    "pears",
    "on",
    "monday",
    "tuesday",
    "for",
    "two",
    "three",
    "four",
    "dollars",
    "each",
    "and",
    "keeps",
    "some",
]


def numbers(rows: list[tuple[str, str]]) -> np.ndarray:
    """The side of each row, by its place."""
    return np.array([SIDES.index(side) for _, side in rows], dtype=np.uint8)


def find(rows: list[tuple[str, str]], folder: Path, **given: Any) -> dict[str, dict[str, str]]:
    """Returns for each check what text is like what other: `{check: {text: partner}}`."""
    folder.mkdir(exist_ok=True)
    checks = quality.DedupChecks(QualityChecks(**given), str(folder))
    for line, (text, _) in enumerate(rows):
        checks.add(Record(json.dumps({"text": text}), "rows.jsonl", line))
    return {
        check: {
            rows[at][0]: rows[partner][0] for at, partner in enumerate(partners.tolist()) if partner != quality.NONE
        }
        for check, partners in checks.find(numbers(rows)).items()
    }


def jaccard(a: str, b: str) -> float:
    """The exact similarity of two texts, by their word triples."""
    x, y = set(quality.shingles(a)), set(quality.shingles(b))
    return len(x & y) / len(x | y)


def test_shingles():
    assert quality.shingles("One two, THREE four") == ["one two three", "two three four"]
    assert quality.shingles("One two") == ["one two"]
    assert quality.shingles("") == [""]
    assert len(quality.shingles("ab " * 1_000_000)) == quality.LONGEST // 3 + 1 - 2
    assert quality.split_words("漢字 and ไทย 7") == ["漢", "字", "and", "ไ", "ท", "ย", "7"]


@pytest.mark.parametrize(("threshold", "size"), [(0.95, 16), (0.85, 8), (0.7, 4), (0.5, 2), (0.3, 2), (0.1, 1)])
def test_size_of_a_band(threshold: float, size: int):
    """By hand for 0.85: 16 bands of 8 find 1 - (1 - 0.2725)^16 = 99.4%, 8 bands of 16 find 46%."""
    assert quality.band_rows(threshold) == size
    assert 1 - (1 - threshold**size) ** (quality.NUM_HASHES // size) >= 0.99


def test_the_estimate_is_near_the_exact_similarity(tmp_path: Path):
    """Its standard deviation is at most sqrt(0.25 / 128) = 0.044."""
    draw = random.Random(0)
    pairs = []
    for changed in range(60):
        first = draw.choices(WORDS, k=80)
        second = [draw.choice(WORDS) if draw.random() < changed / 120 else word for word in first]
        pairs.append((" ".join(first), " ".join(second)))
    signatures = quality.Signatures(str(tmp_path / "signatures"))
    for pair in pairs:
        for text in pair:
            signatures.add(text)
    rows = signatures.rows()
    assert rows.shape == (120, 128)
    estimates = (rows[0::2] == rows[1::2]).mean(axis=1)
    exact = np.array([jaccard(*pair) for pair in pairs])
    assert float(np.abs(estimates - exact).max()) < 4 * 0.044
    assert abs(float((estimates - exact).mean())) < 0.02


def test_one_of_each_group_stays_and_is_near_the_others(tmp_path: Path):
    """A chain: each text is near the next, the ends are not near each other, so both must stay."""
    base = [f"w{number}" for number in range(100)]
    chain = [" ".join([*(f"x{number}" for number in range(at * 2)), *base[at * 2 :]]) for at in range(10)]
    assert jaccard(chain[0], chain[1]) > 0.85
    assert jaccard(chain[0], chain[-1]) < 0.7

    dropped = find([(text, "train") for text in chain], tmp_path)["near_duplicates"]

    assert 2 <= len(chain) - len(dropped) < len(chain)
    for text, partner in dropped.items():
        assert partner not in dropped
        assert jaccard(text, partner) > 0.7


@st.composite
def variations(draw: st.DrawFn) -> list[tuple[str, str]]:
    """Rows of a few groups of near texts, on several sides, with exact copies among them."""
    rows = []
    for group in range(draw(st.integers(1, 3))):
        base = [f"g{group}"] + [WORDS[(number * (group + 3)) % len(WORDS)] for number in range(40)]
        for _ in range(draw(st.integers(1, 4))):
            at = draw(st.integers(0, 40))
            words = [*base[:at], "zebra", *base[at + 1 :]]
            rows += [(" ".join(words), draw(st.sampled_from(["train", "eval"])))] * draw(st.integers(1, 2))
    return rows


@given(variations(), st.randoms(use_true_random=False))
def test_order_changes_nothing(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str]], mixer: random.Random
):
    shuffled = list(rows)
    mixer.shuffle(shuffled)
    first = find(rows, tmp_path_factory.mktemp("a"), leakage="fix", near_duplicates="fix")
    second = find(shuffled, tmp_path_factory.mktemp("b"), leakage="fix", near_duplicates="fix")
    assert first == second


def test_copies_go_with_their_row(tmp_path: Path):
    """What drops a row drops its copies, also where exact duplicates are allowed."""
    text = " ".join(f"w{number}" for number in range(100))
    other = text.replace("w50", "x50")
    rows = [(text, "train"), (other, "train"), (other, "train"), (text, "train")]

    found = find(rows, tmp_path, duplicates="off")

    assert list(found) == ["leakage", "near_duplicates"]
    assert len(found["near_duplicates"]) == 1  # by text: one of the two, with its copy
    checks = quality.DedupChecks(QualityChecks(duplicates="off"), str(tmp_path))
    for line, (row, _) in enumerate(rows):
        checks.add(Record(json.dumps({"text": row}), "rows.jsonl", line))
    assert (checks.find(numbers(rows))["near_duplicates"] != quality.NONE).sum() == 2


def test_leakage_goes_before_near_duplicates(tmp_path: Path):
    """Of two near training rows, one of which leaks: the other must not be lost too if it does not leak itself."""
    base = [f"w{number}" for number in range(100)]
    held_out = " ".join(base)
    leaks = " ".join(["x", *base[1:]])
    far = " ".join(["x", *base[1:88], *(f"y{number}" for number in range(12))])
    assert jaccard(leaks, held_out) > 0.95
    assert jaccard(far, held_out) < 0.8
    assert 0.75 < jaccard(leaks, far) < 0.85

    rows = [(held_out, "eval"), (leaks, "train"), (far, "train")]
    found = find(rows, tmp_path, leakage="fix", near_duplicates="fix", near_duplicate_threshold=0.78)

    kept = {text for text, side in rows if side == "train"} - found["leakage"].keys() - found["near_duplicates"].keys()
    assert leaks in found["leakage"]
    assert kept | found["leakage"].keys() == {leaks, far}


def test_nothing_is_signed_where_nobody_asks(tmp_path: Path):
    assert find([("a", "train"), ("a", "train")], tmp_path, leakage="off", near_duplicates="off") == {
        "duplicates": {"a": "a"}
    }
    assert (tmp_path / "signatures").stat().st_size == 0


def test_no_rows(tmp_path: Path):
    assert find([], tmp_path) == {"duplicates": {}}
