"""Writes down which files a chunk reads until its first step, so that a pod asks the disk for them at once.

    python images/reads.py FOLDER

trains a few steps of a tiny run with this interpreter's packages, and writes FOLDER/train_chunk, which
`baton.train.readahead` reads. Of libraries, which are mapped into memory, it lists what was touched.
"""

import array
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

PAGE = os.sysconf("SC_PAGESIZE")
GAP = 2**17 // PAGE
"""Pages between two parts of a file that are read with them: a request more takes the disk longer."""
DATA = {"max_length": 32, "split": {"eval": 0.2}}
RECIPE = {
    "name": "reads",
    "model": {
        "from_scratch": {"architecture": "llama", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2},
        "tokenizer": {"train": {"vocab_size": 400}},
    },
    "training": {"method": "sft", "batch_size": 8, "max_steps": 2},
    "chunks": {"count": 2},
    "evaluation": {"samples": 1, "max_new_tokens": 4},
    "tracking": {"mlflow": None},
}
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
OWN = os.path.realpath(__file__)
TRANSIENT = ("/dev/", "/proc/", "/sys/", "/etc/")


class Reads:
    """Files that this process has opened, and libraries that it has mapped, in the order of their first use."""

    def __init__(self) -> None:
        self.files: dict[str, None] = {}
        self._maps = False
        sys.addaudithook(self._hear)

    def parts(self, apart: str) -> list[tuple[str, int, int]]:
        """Returns path, offset and length of what was read outside a folder."""
        self._look()
        pages, found = _touched(), []
        for path in self.files:
            if path.startswith((*TRANSIENT, apart, OWN)) or not os.path.isfile(path):
                continue
            for first, last in _joined(pages[path]) if path in pages else [(0, os.path.getsize(path) // PAGE)]:
                found.append((path, first * PAGE, (last - first + 1) * PAGE))
        return found

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[0], str):
            if self._maps:
                self._look()
            self.files.setdefault(os.path.realpath(arguments[0]))
        elif event == "ctypes.dlopen" or (event == "import" and arguments[1]):
            self._maps = True  # what it maps is seen at the next file

    def _look(self) -> None:
        self._maps = False
        for path, *_ in _mapped():
            self.files.setdefault(path)


def main(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as place:
        rows = [{"prompt": f"What is {i} plus 1?", "completion": f"It is {i + 1}."} for i in range(40)]
        Path(place, "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
        recipe = {**RECIPE, "store": f"{place}/store", "data": {**DATA, "source": f"{place}/rows.jsonl"}}
        Path(place, "recipe.json").write_text(json.dumps(recipe), encoding="utf-8")
        uri = f"{place}/store/runs/reads"
        for command in (
            ["-m", "baton.kfp.process", "data_split", "recipe.json", "reads"],
            ["-m", "baton.kfp.process", "tokenize", uri],
            ["-m", "baton.kfp.process", "train_chunk", uri, "1"],
            [os.path.abspath(__file__), "--record", str(folder.resolve()), uri],  # the second chunk restores, too
        ):
            subprocess.run([sys.executable, *command], cwd=place, env={**os.environ, **ENVIRONMENT}, check=True)


def record(folder: Path, uri: str) -> None:
    """Runs the second chunk of a run to its first step, and writes what it has read."""
    reads = Reads()
    from baton import events
    from baton.kfp import executor  # noqa: F401 - the stage's own process

    def hear(event: events.Event) -> None:
        if not isinstance(event, events.Step):
            return
        parts = reads.parts(uri.partition("/store/")[0])
        folder.mkdir(parents=True, exist_ok=True)
        lines = "".join(f"{offset} {length} {path}\n" for path, offset, length in parts)
        (folder / "train_chunk").write_text(lines, encoding="utf-8")
        print(
            f"{len(reads.files)} files, {sum(part[2] for part in parts) / 1e6:.0f} MB in {len(parts)} parts", flush=True
        )
        os._exit(0)

    events.hear(hear)
    os.environ["_KFP_RUNTIME"] = "true"
    import kfp.dsl.executor  # noqa: F401

    import baton.components.train_chunk.component  # noqa: F401
    from baton.train import supervisor as attempts

    attempts.run_chunk(uri, 2)


def _mapped() -> list[tuple[str, int, int, int]]:
    """Returns path, first page, page after the last, and first page in the file, of each part that is mapped."""
    found = []
    with open("/proc/self/maps", encoding="utf-8") as lines:
        for line in lines:
            addresses, _, offset, _, _, *path = line.rstrip("\n").split(None, 5)
            if path and path[0].startswith("/"):
                first, after = (int(address, 16) // PAGE for address in addresses.split("-"))
                found.append((path[0], first, after, int(offset, 16) // PAGE))
    return found


def _touched() -> dict[str, set[int]]:
    """Returns the pages of each mapped file that are in this process's memory; none where the kernel does not tell."""
    pages: dict[str, set[int]] = {path: set() for path, *_ in _mapped()}
    with contextlib.suppress(OSError), open("/proc/self/pagemap", "rb") as entries:
        for path, first, after, begin in _mapped():
            entries.seek(first * 8)
            present = array.array("Q", entries.read((after - first) * 8))
            # The highest two bits: in memory, or swapped out.
            pages[path].update(begin + at for at, entry in enumerate(present) if entry >> 62)
    return pages


def _joined(pages: set[int]) -> list[tuple[int, int]]:
    """Returns the first and the last page of each part of a file."""
    parts: list[tuple[int, int]] = []
    for page in sorted(pages):
        if parts and page - parts[-1][1] <= GAP:
            parts[-1] = (parts[-1][0], page)
        else:
            parts.append((page, page))
    return parts


if __name__ == "__main__":
    if sys.argv[1] == "--record":
        record(Path(sys.argv[2]), sys.argv[3])
    else:
        main(Path(sys.argv[1]))
