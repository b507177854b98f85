"""The list of what a chunk reads: how it is made, and that an image has it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
def test_lists_what_is_read_in_order_and_of_libraries_a_part(tmp_path: Path) -> None:
    ran = subprocess.run([sys.executable, ROOT / "images" / "reads.py", tmp_path], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    parts = [line.split(" ", 2) for line in (tmp_path / "train_chunk").read_text().splitlines()]
    lengths: dict[str, int] = {}
    for _, length, path in parts:
        lengths[path] = lengths.get(path, 0) + int(length)
    assert all(Path(path).is_file() for path in lengths), "files of the run, or of this test's"
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    assert 0 < lengths[str(library)] < library.stat().st_size / 2
    order = [Path(path).name.partition(".")[0] for path in lengths if path.endswith((".py", ".pyc"))]
    assert order.index("executor") < order.index("supervisor") < order.index("modeling_llama")
    assert any(path.startswith(str(Path(transformers.__file__).parent)) for path in lengths)
    assert sum(lengths.values()) < 600e6


def test_the_image_reads_what_its_list_says(engine: Any, image: str) -> None:
    """A process beside the stage has the disk read what is not in the kernel's cache."""
    output = engine.containers.run(
        image, ["python3", "-c", READ], remove=True, network_mode="none", read_only=True, cap_drop=["ALL"]
    )
    missing, files, code, read = map(int, output.decode().split())
    assert (missing, code) == (0, 0)
    assert files > 2000
    assert read > 20e6, "bytecode alone is twice that; libraries that another container has mapped are not dropped"


READ = """
import os
from baton.train import readahead as ahead

lines = open(f"{ahead.FOLDER}/train_chunk").read().splitlines()
paths = list(dict.fromkeys(line.split(" ", 2)[2] for line in lines))
missing = [path for path in paths if not os.path.isfile(path)]
os.sync()  # what was just written is not dropped
for path in paths:
    file = os.open(path, os.O_RDONLY)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(file)
process = ahead.start("train_chunk")
_, code, usage = os.wait4(process, 0)
print(len(missing), len(paths), code, usage.ru_inblock * 512)
"""
