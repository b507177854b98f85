"""Plots are drawn by one library, pinned and unchanged, and a page with it stays small."""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from baton.pages import plots
from baton.pages.run_page import render
from tests.support.pages import read

UPLOT = Path(plots.FOLDER, "uplot")
ORIGIN = json.loads((UPLOT / "origin.json").read_text())
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def test_the_library_is_the_pinned_one() -> None:
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in UPLOT.iterdir()}
    assert found.pop("origin.json")
    assert found == ORIGIN["files"]
    assert f"(v{ORIGIN['version']})" in (UPLOT / "uPlot.iife.min.js").read_text()[:100]


def test_its_licence_is_in_every_page(full_report: Any) -> None:
    (script,) = [script for script in read(render(full_report())).scripts if script.strip()]
    assert "Permission is hereby granted, free of charge" in script
    assert "Leon Sorokin" in script


def test_what_it_adds_to_a_page_is_small() -> None:
    assert len(plots.script().encode()) + len(plots.style().encode()) < 75_000


def test_a_script_cannot_end_early_or_load_anything() -> None:
    assert not re.search(r"</script|<!--|https?://(?!github\.com/leeoniya/uPlot)", plots.script(), re.IGNORECASE)
    assert not re.search(r"@import|url\(", plots.style())


def test_readers_without_script_get_a_table(full_report: Any) -> None:
    text = read(render(full_report())).text
    assert re.search(r"loss First Lowest Highest Last training \d\.\d\d", text)
    assert re.search(r"evaluation 8\.31 3\.\d\d 8\.31 3\.\d\d", text)


def test_values_that_are_no_numbers_are_left_out() -> None:
    entries = [{"step": step, "loss": value} for step, value in enumerate([1.0, math.nan, math.inf, None, 2.0])]
    assert plots.series(entries, "loss") == [(0, 1.0), (4, 2.0)]
    assert plots.plot("x", "y", [plots.Curve(name="none", points=[])]) is None


def test_the_moving_mean_of_a_line_is_the_line() -> None:
    line = [(float(x), 2.0 * x) for x in range(1000)]
    mean = plots.smoothed(line)
    assert all(math.isclose(y, 2 * x, abs_tol=2) for x, y in mean)
    assert plots.smoothed(line[:100]) == []


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
@pytest.mark.parametrize("frame", [False, True], ids=["page", "in Kubeflow's frame"])
def test_a_browser_draws_every_open_plot(frame: bool, full_report: Any, tmp_path: Path) -> None:
    """Kubeflow shows a page by `srcdoc` in a frame that may run scripts and has no origin."""
    html = render(full_report())
    probe = "document.title = document.querySelectorAll('.u-over').length + ' drawn'"
    digest = plots.script_digest()
    # The page's own policy refuses any other script, so the probe is added to it.
    policy = f"script-src 'nonce-probe' '{digest}'"
    html = html.replace(f"script-src '{digest}'", policy)
    if frame:
        probe = "setTimeout(() => parent.postMessage(document.querySelectorAll('.u-over').length, '*'), 300)"
    html = html.replace("</body>", f"<script nonce='probe'>setTimeout(() => {{{probe}}}, 300)</script></body>")
    if frame:
        escaped = html.replace("&", "&amp;").replace('"', "&quot;")
        listen = "addEventListener('message', event => { document.title = event.data + ' drawn' })"
        inner = f'<iframe width=900 height=600 sandbox="allow-scripts" srcdoc="{escaped}"></iframe>'
        html = f"<title></title><script>{listen}</script>{inner}"
    (tmp_path / "page.html").write_text(html)
    command = [
        *(str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
        # A headless browser's clock does not wait for a frame in a process of its own.
        "--disable-features=IsolateSandboxedIframes",
        *(f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=4000", "--dump-dom"),
    ]
    page = (tmp_path / "page.html").as_uri()
    done = subprocess.run([*command, page], capture_output=True, text=True, timeout=120, check=True)
    assert "<title>1 drawn</title>" in done.stdout, "the loss; the others are folded"
