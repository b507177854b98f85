"""`make gpu-evidence` before there is a GPU: its packages, its page, and what it leaves for the next call."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import evidence, wheels
from tests.gpu.evidence import Part

PROBE = Part("probe", (f"{evidence.MATRIX}::test_attention_gives_the_same_gradients_each_time[MATH]",))


def test_what_has_to_come_is_in_the_lock() -> None:
    needed = wheels.requirements()
    assert len(needed) == len(wheels.FROM_LOCK) + len(wheels.KERNELS)
    assert all(line.count("==") == 1 for line in needed)
    assert not set(wheels.FROM_LOCK) & set(wheels.THERE)


def test_builds_for_other_devices_do_not_travel(tmp_path: Path) -> None:
    builds = {f"bitsandbytes/libbitsandbytes_{name}.so": name for name in ("cpu", "cuda118", "cuda130", "rocm72")}
    record = "bitsandbytes-1.dist-info/RECORD"
    wheel = tmp_path / "bitsandbytes-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as made:
        for path, content in {**builds, "bitsandbytes/__init__.py": ""}.items():
            made.writestr(path, content)
        made.writestr(record, "".join(f"{path},sha256=x,1\n" for path in [*builds, "bitsandbytes/__init__.py"]))
    wheels._strip(wheel)
    with zipfile.ZipFile(wheel) as left:
        kept = {name for name in left.namelist() if name != record}
        listed = {line.partition(",")[0] for line in left.read(record).decode().splitlines()}
    assert (
        kept
        == listed
        == {f"bitsandbytes/libbitsandbytes_{name}.so" for name in ("cpu", "cuda130")} | {"bitsandbytes/__init__.py"}
    )
    assert os.listdir(tmp_path) == [wheel.name]


@pytest.mark.slow
def test_cells_run_with_what_is_there_and_what_comes_alone(tmp_path: Path) -> None:
    allowed, site = {*wheels.THERE, *wheels.FROM_LOCK}, tmp_path / "site-packages"
    site.mkdir()
    for each in metadata.distributions():
        if each.name.lower().replace("_", "-") not in allowed:
            continue
        for name in {file.parts[0] for file in each.files or [] if file.parts[0] not in ("..", "__pycache__")}:
            if not (site / name).exists():
                (site / name).symlink_to(each.locate_file(name))
    wheels.name_tree(site)
    command = [sys.executable, "-S", "-m", "pytest", "-q", *evidence.ARGUMENTS, "-p", "no:xdist"]
    cells = ("sft-lora-nf4", "pretrain-full-cuda-sdpa")  # plain text has its languages told
    tests = [f"{evidence.MATRIX}::test_chunks_end_on_the_bits_of_one_run[{cell}]" for cell in cells]
    tests += [f"{evidence.MEASURES}::test_beside_plain_trl_and_what_determinism_costs"]
    paths = {"PYTHONPATH": f"{site}{os.pathsep}{wheels.ROOT}", "BATON_CACHE": str(tmp_path / "cache")}
    ran = subprocess.run(
        [*command, *tests], cwd=wheels.ROOT, env={**os.environ, **paths}, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    assert "3 passed" in ran.stdout


@pytest.mark.slow
def test_a_test_that_passed_is_not_run_again(tmp_path: Path) -> None:
    assert evidence.run(PROBE, tmp_path, 200) == 0
    rows = evidence.rows_of(PROBE, tmp_path)
    (row,) = map(json.loads, rows.read_text(encoding="utf-8").splitlines())
    assert (row["outcome"], [what for what, _, _ in row["figures"]]) == (
        "passed",
        ["without determinism", "with determinism"],
    )
    assert evidence.run(PROBE, tmp_path, 200) == 0
    assert len(rows.read_text(encoding="utf-8").splitlines()) == 1


@pytest.mark.slow
def test_a_part_without_time_is_stopped(tmp_path: Path) -> None:
    assert evidence.run(PROBE, tmp_path, 0.5) == 3
    assert not evidence.rows_of(PROBE, tmp_path).exists()


def document(commit: str = "abc", **changes: Any) -> dict[str, Any]:
    figures = [["step", "5 ms", "≤ 10 %"], ["peak", "1 GB", ""]]
    rows = [
        {"name": "b", "outcome": "failed", "why": "AssertionError: x | y", "figures": [], "commit": "abc"},
        {"name": "a", "outcome": "passed", "why": "", "figures": figures, "commit": commit},
    ]
    about = {"created": "2026-01-02T03:04:05Z", "dry": False, "cores": 2, "device": "H100"}
    parts = {"0.6 B": {"seconds": 90.0, "rows": rows}, "memory": {"seconds": 0.0, "rows": []}}
    return {**about, "versions": {"torch": "2"}, "parts": parts, **changes}


def test_the_page_has_every_figure_and_every_failure() -> None:
    text = evidence.page(document())
    assert "## 0.6 B\n\n1 of 2 passed, in 1.5 minutes." in text
    assert "| a | passed | step | 5 ms | ≤ 10 % |\n| a | passed | peak | 1 GB |  |\n| b | failed |  |" in text
    assert "AssertionError: x \\| y" in text
    assert "## Memory\n\nNot run.\n" in text
    assert "commit abc.\n" in text
    assert "commit abc and def.\n" in evidence.page(document("def"))
    assert "dry run" not in text
    assert "dry run" in evidence.page(document(dry=True))


@pytest.mark.parametrize(
    "changes", [{"dry": True}, {"commit": "abc-dirty"}, {"commit": "unknown"}], ids=["dry", "dirty", "no commit"]
)
def test_only_evidence_of_a_commit_is_published(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evidence, "DOCS", tmp_path / "docs")
    evidence.DOCS.mkdir()
    (tmp_path / f"{evidence.NAME}.json").write_text(json.dumps(document(**changes)))
    with pytest.raises(SystemExit, match="nothing is published"):
        evidence.publish(tmp_path)
    (tmp_path / f"{evidence.NAME}.json").write_text(json.dumps(document()))
    evidence.publish(tmp_path)
    assert sorted(os.listdir(evidence.DOCS)) == [f"{evidence.NAME}.json", f"{evidence.NAME}.md"]


@pytest.mark.parametrize(("code", "expected"), [("x = 1\n", "abc"), ("x = 2\n", "unknown")], ids=["same", "other"])
def test_a_tree_without_its_history_has_the_commit_that_it_was_fetched_for(
    code: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wheels, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    (tmp_path / "baton").mkdir()
    (tmp_path / "baton/part.py").write_text("x = 1\n", encoding="utf-8")
    (tmp_path / wheels.COMMIT).write_text(f"abc {wheels.tree_digest()}", encoding="utf-8")
    (tmp_path / "baton/part.py").write_text(code, encoding="utf-8")
    assert wheels.commit(tmp_path) == expected
