"""Source file and line of each training row, kept with a run whose guard may have to name them.

    runs/<run>/origins.gz    for each line of the split's train.jsonl its line number, and where the file differs from
                             the previous line's, a tab and the file as JSON

Not kept with the split, which runs share whose rows are the same but come from different files.
"""

import gzip
import json
import os
from collections.abc import Collection
from typing import Self

from baton.runs.documents import ORIGINS as ORIGINS
from baton.runs.documents import SourceLocation, SplitData
from baton.runs.run import Run
from baton.scratch import scratch_folder


class OriginsWriter:
    def __init__(self, path: str) -> None:
        self.path = path
        self._file = gzip.open(path, "wt", encoding="utf-8", newline="\n")  # noqa: SIM115 - closed by `__exit__`
        self._before = ""

    def add(self, file: str, line: int) -> None:
        self._file.write(f"{line}\n" if file == self._before else f"{line}\t{json.dumps(file)}\n")
        self._before = file

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def places(run: Run, lines: Collection[int]) -> list[SourceLocation]:
    """Returns the origins of lines of the split's train.jsonl, in order; the lines themselves where none are known."""
    wanted = sorted(set(lines))
    with scratch_folder("origins") as scratch:
        local = os.path.join(scratch, ORIGINS)
        try:
            run.storage.download(run.path(ORIGINS), local)
        except FileNotFoundError:
            split = run.storage.uri(f"{run.need(SplitData).prefix}/train.jsonl")
            return [SourceLocation(file=split, line=line) for line in wanted]
        return _read(local, set(wanted))


def _read(path: str, wanted: set[int]) -> list[SourceLocation]:
    found: list[SourceLocation] = []
    file_name = ""
    with gzip.open(path, "rt", encoding="utf-8", newline="\n") as file:
        for number, text in enumerate(file, 1):
            line, _, other = text.rstrip("\n").partition("\t")
            file_name = json.loads(other) if other else file_name
            if number in wanted:
                found.append(SourceLocation(file=file_name, line=int(line)))
                if len(found) == len(wanted):
                    break
    return found
