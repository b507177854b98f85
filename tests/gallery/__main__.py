"""The gallery's page, and the memory in its headers: `python -m tests.gallery docs/guides/recipes.md` (`make docs`)."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from tests.gallery import page, recipes

if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    with tempfile.TemporaryDirectory(prefix="gallery-") as folder:
        memory = {path.stem: recipes.estimated(path, Path(folder)) for path in recipes.PATHS}
    for path in recipes.PATHS:
        path.write_text(page.with_memory(path.read_text(encoding="utf-8"), memory[path.stem]), encoding="utf-8")
    Path(sys.argv[1]).write_text(page.page(memory), encoding="utf-8")
