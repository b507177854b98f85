"""The example notebook: `python -m tests.support.notebook` runs it and keeps what it shows beside its cells.

What tells of the machine or changes from run to run alone is left out: standard error, times, and the report, which is
a page of its own.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples" / "notebook.ipynb"
LEFT_OUT = "The report is shown here."


def executed(folder: Path) -> Any:
    """Runs the notebook in a kernel of its own, in a folder that looks like the repository, and returns it."""
    import nbclient
    import nbformat

    (folder / "examples").mkdir(parents=True)
    (folder / "pipelines").symlink_to(ROOT / "pipelines")
    for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR"):
        os.environ[name] = str(folder / name)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    for cell in _code(notebook):
        cell.outputs = []
    place = {"metadata": {"path": str(folder / "examples")}}
    nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3", resources=place).execute()
    return notebook


def cleaned(notebook: Any) -> Any:
    """Returns a notebook that was run as it is kept."""
    for cell in notebook.cells:
        cell.metadata = {}
    for cell in _code(notebook):
        cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
        for output in cell.outputs:
            if "text/html" in output.get("data", {}):
                output["data"] = {"text/plain": LEFT_OUT}
            if "train_runtime" in output.get("text", ""):
                lines = output["text"].splitlines(keepends=True)
                output["text"] = "".join(line for line in lines if "train_runtime" not in line)
    notebook.metadata = {"kernelspec": notebook.metadata["kernelspec"], "language_info": {"name": "python"}}
    return notebook


def shown(cell: Any) -> str:
    """Returns the texts of what a cell has printed and shown, and the kinds of its pictures."""
    parts = []
    for output in cell.outputs:
        data = output.get("data", {})
        parts += [output.get("text", ""), data.get("text/html", ""), data.get("text/plain", "")]
        parts += [kind for kind in data if kind.startswith("image/")]
    return "\n".join(part for part in parts if part).strip()


def _code(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def main() -> None:
    """Runs the notebook, and writes it."""
    import nbformat

    folder = Path(tempfile.mkdtemp(prefix="baton-notebook-"))
    try:
        nbformat.write(cleaned(executed(folder)), NOTEBOOK)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
