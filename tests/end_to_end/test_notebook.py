"""examples/notebook.ipynb runs from its first cell to its last, in a kernel of its own, and shows what it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support import notebook


@pytest.mark.slow
def test_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("nbclient", "ipykernel"):
        pytest.importorskip(package, reason=f"{package} is not installed; `make setup` does it")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, "")  # put back afterwards
    cells = [cell for cell in notebook.executed(tmp_path / "repository").cells if cell.cell_type == "code"]
    shown = [notebook.shown(cell) for cell in cells]
    assert "did you mean 'learning_rate'" in shown[1]
    assert "'succeeded',\n 24" in shown[2]
    assert "  after " in shown[3]
    assert "image/png" in shown[4]
    assert "(True,\n {" in shown[5]
    assert 'srcdoc="&lt;!doctype html' in shown[6]
    assert "('done', 4)" in shown[7]
    assert "('done', 8)" in shown[8]
    assert shown[9].endswith("True")


def test_it_lies_there_as_it_was_run() -> None:
    """A reader of the repository sees what it shows; nothing in it tells of the machine that ran it."""
    text = notebook.NOTEBOOK.read_text(encoding="utf-8")
    code = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert all(cell["outputs"] for cell in code)
    assert {output["output_type"] for cell in code for output in cell["outputs"]} == {
        "stream", "execute_result", "display_data",
    }  # fmt: skip
    assert "/tmp/" not in text
    assert "site-packages" not in text
    assert len(text) < 60_000
