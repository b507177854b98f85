"""A real search, watched and steered in a browser while `baton sweep run` trains it."""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from baton.runs.outcomes import TrialFailure
from baton.runs.run import Sweep
from tests.support.browser import Page

pytestmark = pytest.mark.slow
BATON = str(Path(sys.executable).with_name("baton"))
STEPS, CHUNKS = 12, 4
PACED = """
import json, os, time
from transformers import TrainerCallback

class Paced(TrainerCallback):
    def on_log(self, args, state, control, logs, **_):
        if "loss" in logs:
            with open(os.environ["LOGGED"], "a") as file:
                print(json.dumps([logs["loss"], state.global_step, time.time()]), file=file, flush=True)
        time.sleep(0.5)
"""
CURVES = """
    Object.fromEntries([...document.querySelectorAll("figure[data-plot]")]
        .map(figure => JSON.parse(figure.dataset.plot))
        .filter(plot => plot.y === "training loss")
        .flatMap(plot => plot.curves.map(curve => [curve.name.split(" ")[0], curve.ys])))
"""


@pytest.fixture
def search(tmp_path: Path) -> Iterator[Sweep]:
    """Four trials of four chunks, of which half go on after chunks 1 and 2, in a process of their own."""
    draw = random.Random(1)
    words = ["the", "run", "goes", "on", "from", "where", "every", "pod", "hands", "what", "it", "knows", "to", "next"]
    rows = [{"text": " ".join(draw.choice(words) for _ in range(12))} for _ in range(120)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (tmp_path / "paced.py").write_text(PACED, encoding="utf-8")
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    recipe: dict[str, Any] = {
        "name": "swept",
        "store": "store",
        "model": {
            "from_scratch": {"architecture": "llama", **shape, "num_key_value_heads": 2},
            "tokenizer": {"train": {"vocab_size": 300}},
        },
        "data": {"source": "rows.jsonl", "max_length": 32, "split": {"eval": 0.2}},
        "training": {"method": "pretrain", "batch_size": 8, "max_steps": STEPS * CHUNKS},
        "hooks": {"source": "paced.py", "callbacks": ["paced:Paced"]},
        "chunks": {"count": CHUNKS},
        "evaluation": {"samples": 1, "max_new_tokens": 4},
        "tracking": {"mlflow": "sqlite:///mlflow.db"},
        "sweep": {
            "method": "grid",
            "parameters": {"training.learning_rate": [1e-4, 3e-2, 1e-2, 1e-3]},
            "halving": {"eta": 2},
        },
    }
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    environment = {**os.environ, "LOGGED": str(tmp_path / "logged"), "BATON_CACHE": str(tmp_path / "cache")}
    with open(tmp_path / "log", "w", encoding="utf-8") as log:
        command = [BATON, "sweep", "run", "sweep.yaml", "--run", "s"]
        process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=log, stderr=log)
    sweep, ends = Sweep.open(f"{tmp_path}/store/sweeps/s"), time.monotonic() + 120
    while sweep.find() is None:
        assert process.poll() is None, (tmp_path / "log").read_text()
        assert time.monotonic() < ends
        time.sleep(0.2)
    yield sweep
    process.wait(600)
    assert process.returncode == 0, (tmp_path / "log").read_text()


@pytest.fixture
def address(search: Sweep) -> Iterator[str]:
    """The address that `baton sweep watch` prints."""
    command = [BATON, "sweep", "watch", search.uri, "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        yield json.loads(process.stdout.readline())["address"]
        process.terminate()


def _scored(sweep: Sweep, trial: str) -> set[int]:
    return {score.chunk for score in sweep.scores(f"s-{trial}")}


def test_a_search_is_watched_and_steered(search: Sweep, address: str, page: Page, tmp_path: Path) -> None:
    page.go(address)
    # The first trial's losses, each within 5 s of its step.
    shown: dict[float, float] = {}
    while len(shown) < STEPS:
        assert page.until("document.querySelector('#live h1')", 60)
        now, curves = time.time(), page.js(CURVES)
        for loss in curves.get("t000", []):
            shown.setdefault(loss, now)
        time.sleep(0.1)
    logged = [json.loads(line) for line in (tmp_path / "logged").read_text().splitlines()][:STEPS]
    lags = [shown[float(f"{loss:.7g}")] - at for loss, _, at in logged]
    print(f"seconds from a step to its loss on the page: {max(lags):.1f} at most, {statistics.median(lags):.1f} median")
    assert max(lags) < 5
    # The second is stopped while it trains: its chunk is its last.
    page.until("document.querySelector('tr[data-key=t001] .now')", 120)
    page.click("tr[data-key=t001] [data-act=stop]")
    page.write("dialog [name=why]", "too dear")
    page.click("#steer-go")
    page.until("document.querySelector('tr[data-key=t001]').innerText.includes('asked to stop')")
    assert _scored(search, "t001") == set()
    # Meanwhile the first is cloned, with another learning rate.
    page.click("tr[data-key=t000] [data-act=clone]")
    page.write("dialog [name=changes]", "training.learning_rate=0.02")
    page.click("#steer-go")
    page.until("!document.querySelector('dialog').open", 60)
    child = page.until("document.querySelector('tr[data-key=f000]')?.innerText", 20)
    assert f"of t000, step {STEPS}" in child
    assert "0.02" in child
    page.until("document.querySelector('.pill').textContent === 'over'", 400)
    assert _scored(search, "t001") == {1}
    assert "asked to stop: too dear" in page.js("document.querySelector('tr[data-key=t001]').innerText")
    rungs = search.rungs()
    assert "f000" in rungs[0].kept
    assert _scored(search, "f000") >= {2, 3, 4}
    assert search.run(search.trial("f000")).read(TrialFailure) is None
    # Of the others of the first rung two went on.
    assert len(rungs[0].kept) == 3
    assert "t001" not in rungs[0].kept
    assert page.messages == []
