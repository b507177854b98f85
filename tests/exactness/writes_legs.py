"""What the tests of virtual workers that write change in the processes: the negative controls."""

from __future__ import annotations

import os


def seeded_by_process(run_uri: str, index: int) -> None:
    """Runs a chunk in which what writes is seeded by its process and its place there."""
    from baton.train.chunk import run_chunk
    from baton.train.virtual import VirtualWorkers

    seed = VirtualWorkers.seed

    def by_process(self: VirtualWorkers, place: str) -> None:
        kind, *rest = place.split(":")
        if kind == "writing":
            worker = int(rest[0]) - self._passes.own.start
            place = f"{kind}:{os.environ.get('RANK', '0')}-{worker}:{rest[1]}"
        seed(self, place)

    VirtualWorkers.seed = by_process  # type: ignore[method-assign]
    run_chunk(run_uri, index)


def normalized_by_process(run_uri: str, index: int) -> None:
    """Runs a chunk in which each process divides by as many tokens as there were if all wrote as many as itself."""
    from baton.train.chunk import run_chunk
    from baton.train.generation import VirtualGeneration

    of_all = VirtualGeneration._of_all

    def of_process(self: VirtualGeneration, seen: int, items: int) -> tuple[int, int]:
        return of_all(self, seen, items)[0], items * self.ranks.size

    VirtualGeneration._of_all = of_process  # type: ignore[method-assign]
    run_chunk(run_uri, index)


def begun_anew(run_uri: str, index: int) -> None:
    """Runs a chunk in which each process resumes with the completions of the first workers."""
    from baton.train.chunk import run_chunk
    from baton.train.generation import VirtualGeneration

    load = VirtualGeneration.load_method_state

    def load_first(self: VirtualGeneration, saved: dict[str, object]) -> None:
        load(self, saved)
        if self._buffered_inputs is not None:
            self._buffered_inputs = saved["completions"][: len(self._own or ())]  # type: ignore[index]

    VirtualGeneration.load_method_state = load_first  # type: ignore[method-assign]
    run_chunk(run_uri, index)
