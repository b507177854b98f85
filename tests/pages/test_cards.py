"""Cards hold any text and any figure, and stay small."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from baton.pages.card import LARGEST, Card, table, visible


def _left(card: Card, folder: Path) -> tuple[bytes, dict[str, object]]:
    artifact = SimpleNamespace(path=str(folder / "card"), metadata={})
    card.write(artifact)
    return (folder / "card").read_bytes(), artifact.metadata


@given(st.text(alphabet=st.characters(codec=None), max_size=80), st.integers(1, 40))
def test_any_text_is_one_line_that_prints(text: str, length: int) -> None:
    shown = visible(text, length)
    assert shown.isprintable()
    assert ("more)" in shown) >= (len(text) > length)


def test_what_does_not_print_is_seen() -> None:
    assert visible("a\tb\n\x00\x1b[31m\ud800 naïve 日本 \u202e🙂", 99) == (
        r"a\tb\n\x00\x1b[31m\ud800 naïve 日本 \u202e🙂"
    )
    assert visible("x" * 1_234_567, 3) == "xxx… (1,234,564 more)"


def test_a_card_is_utf_8_whatever_it_says(tmp_path: Path) -> None:
    data, _ = _left(Card("half a pair \ud83d\n"), tmp_path)
    assert data == b"half a pair \\ud83d\n"


def test_a_card_is_small_and_ends_in_a_whole_character(tmp_path: Path) -> None:
    data, _ = _left(Card("日" * LARGEST), tmp_path)
    assert len(data) < 2**16
    assert set(data.decode()) == {"日", "\n", "…"}


def test_facts_are_what_kubeflow_can_keep(tmp_path: Path) -> None:
    """Its launcher reads strict JSON, and its metadata store refuses null."""
    facts = {"rows": 3, "loss": float("nan"), "worst": float("-inf"), "goodput": 0.5, "page": None, "whole": True}
    _, metadata = _left(Card("", facts), tmp_path)
    assert metadata == {"rows": 3, "loss": "nan", "worst": "-inf", "goodput": 0.5, "whole": True}
    json.dumps(metadata, allow_nan=False)


def test_a_table_leaves_out_what_is_not_known() -> None:
    assert table({"run": "r", "MLflow": None, "address": "a"}) == "run      r\naddress  a"
    assert table({}) == ""
