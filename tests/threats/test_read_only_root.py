"""A whole run where the root file system cannot be written to, as in pods: the store and one temporary folder are."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = """
set -e
for mount in "$STORE" "$TMPDIR"; do mount --bind "$mount" "$mount"; done
mount -t tmpfs tmpfs /dev/shm
for mount in $(awk '{print $5}' /proc/self/mountinfo | sort -u); do
    case "$mount" in
        /proc*|/sys*|/dev*|"$STORE"|"$TMPDIR") ;;
        *) mount -o remount,bind,ro "$mount" 2>/dev/null || true ;;
    esac
done
for folder in / "$ROOT" "$ROOT/.." /tmp "$BESIDE"; do
    if touch "$folder/written" 2>/dev/null; then echo "$folder can be written to" >&2; exit 3; fi
done
cd "$TMPDIR"
exec "$@"
"""


def has_namespaces() -> bool:
    """Whether this user may have a view of the file systems of its own."""
    unshare = shutil.which("unshare")
    words = [str(unshare), "--user", "--map-root-user", "--mount", "mount", "-o", "remount,bind,ro", "/"]
    return bool(unshare) and subprocess.run(words, capture_output=True, check=False).returncode == 0


@pytest.mark.slow
def test_a_run_needs_its_store_and_one_folder(scratch_recipe: dict[str, Any], tmp_path: Path) -> None:
    if not has_namespaces():
        pytest.skip("this user may not have mounts of its own")
    folders = {name: tmp_path / name for name in ("store", "tmp", "beside")}
    for folder in folders.values():
        folder.mkdir()
    rows = [{"prompt": f"What is {n}?", "completion": f"the number {n}"} for n in range(60)]
    (folders["beside"] / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    scratch_recipe["store"] = {"uri": str(folders["store"])}
    scratch_recipe["training"] = {"max_steps": 4, "batch_size": 4}
    scratch_recipe["chunks"] = {"count": 2}
    (folders["beside"] / "r.yaml").write_text(json.dumps(scratch_recipe))
    before = [path.name for path in folders["beside"].iterdir()]
    environment = os.environ | {
        "STORE": str(folders["store"]),
        "TMPDIR": str(folders["tmp"]),
        "BESIDE": str(folders["beside"]),
        "HOME": str(folders["tmp"]),
        "XDG_CACHE_HOME": str(folders["tmp"]),
        "HF_HOME": str(folders["tmp"]),
        "ROOT": str(Path(__file__).parents[2]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(folders["tmp"]),
    }
    inside = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", SCRIPT, "sh"]
    command = [sys.executable, "-m", "baton", "run", f"{folders['beside']}/r.yaml", "--run", "r"]
    done = subprocess.run([*inside, *command], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (folders["store"] / "runs" / "r" / "report.html").is_file()
    assert [path.name for path in folders["beside"].iterdir()] == before
