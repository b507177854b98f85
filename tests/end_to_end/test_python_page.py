"""Examples of docs/reference/python.md, run unchanged and in order in a folder with their files."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.tiny import make_base

ROOT = Path(__file__).parents[2]
RECIPE = (ROOT / "tests" / "recipes" / "scratch.yaml").read_text(encoding="utf-8")


def examples(page: Path) -> list[str]:
    """Returns the Python of a page, block by block."""
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.S | re.M)


@pytest.mark.slow
def test_its_examples_run(tmp_path: Path) -> None:
    blocks = examples(ROOT / "docs/reference/python.md")
    assert len(blocks) > 6
    (tmp_path / "my.yaml").write_text(RECIPE, encoding="utf-8")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "a", "completion": "b"}) + "\n", encoding="utf-8")
    make_base(tmp_path / "my-model")
    script = tmp_path / "page.py"
    script.write_text("\n".join(blocks), encoding="utf-8")
    done = subprocess.run([sys.executable, script.name], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "report.html" in done.stdout


def test_importing_baton_imports_nothing_else() -> None:
    code = (
        "import sys, baton; print(sorted(name for name in sys.modules if name.partition('.')[0] in {'torch', 'kfp'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_name_is_there_and_said_to_a_type_checker() -> None:
    import baton

    text = (ROOT / "baton" / "__init__.py").read_text(encoding="utf-8")
    told = set(re.findall(r"^    from baton\.\S+ import (\w+) as \1$", text, re.M))
    assert told == set(baton._PLACES)
    for name in baton._PLACES:
        assert getattr(baton, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = baton.nothing  # type: ignore[attr-defined]
