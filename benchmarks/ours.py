"""Baton's side: runs prepared in the store, and their chunks as processes."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from typing import Any

from baton.checkpoint.store import CheckpointStore
from baton.data import readers
from baton.recipe import load
from baton.recipe.cluster import Parallel
from baton.runs.run import Run
from benchmarks.bench import Bench, parse_event
from benchmarks.process import Trace, watch
from benchmarks.sizes import Size

RECIPE = "tests/recipes/bench.yaml"
ENVIRONMENT = {
    "BATON_EVENTS": "stdout",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
_LEFT_BY_CHUNKS = ("checkpoints", "records", "proof", "progress.json", "promoted.json")


class Ours:
    """Runs of Baton for one benchmark."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self._prepared: dict[str, tuple[int, Run]] = {}

    def run(
        self,
        size: Size,
        *,
        steps: int,
        count: int = 1,
        every: int | str | None = None,
        overrides: Sequence[str] = (),
        **training: int | None,
    ) -> Run:
        """Returns the run of this kind at its beginning: split and tokenized, nothing trained.

        Args:
            size: Its model.
            steps: Steps of the whole run.
            count: Number of chunks.
            every: Steps or time between checkpoints inside a chunk.
            overrides: Further changes to the recipe, the same for all runs of this size, steps and settings.
            training: Further settings of the section, those of `parallel` among them.
        """
        name = f"{size.name}-steps-{steps}-chunks-{count}-every-{every or 'none'}"
        more = {key: value for key, value in training.items() if value}
        name += "".join(f"-{key.replace('_', '-')}-{value}" for key, value in more.items())
        name += "-changed" * bool(overrides)
        generation, run = self._prepared.get(name, (0, None))
        if run is not None and generation == self.bench.server.generation:
            self.rewind(run)
            return run
        chunks = [f"chunks.count={count}", f"chunks.checkpoint_every={'null' if every is None else every}"]
        settings = [f"training.{'parallel.' * (key in Parallel.model_fields)}{key}={more[key]}" for key in more]
        run = self._prepare(name, size, steps, [*chunks, *settings, *overrides])
        self._prepared[name] = (self.bench.server.generation, run)
        return run

    def chunk(
        self,
        run: Run,
        index: int,
        *,
        record: str = "-",
        **watching: Any,
    ) -> Trace:
        """Runs a chunk to its end or until it is killed; what it left on this machine is removed.

        Args:
            run: The run.
            index: The chunk's number.
            record: File for the names of the modules that it has imported at its end.
            watching: Further arguments of `process.watch`: when to end it.
        """
        folder = self.bench.fresh_folder("stage")
        command = ["-m", "benchmarks.chunk", folder, record, run.uri, str(index)]
        try:
            return watch(command, parse_event, folder=folder, environment=ENVIRONMENT, **watching)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def record(self, run: Run, index: int) -> dict[str, Any]:
        """Returns what the newest attempt at a chunk wrote about itself."""
        return run.attempts(index)[-1].to_json()

    def committed(self, run: Run) -> int:
        """Returns the step of the newest checkpoint, 0 where there is none."""
        return next((checkpoint.step for checkpoint in CheckpointStore(run).committed()), 0)

    def modules(self) -> str:
        """Returns a file with the names of all modules that a chunk has imported at its end."""
        path = f"{self.bench.work}/modules.json"
        if not os.path.exists(path):
            self.bench.say("looking what a chunk imports")
            run = self.run(self.bench.options.small, steps=4, count=2)
            self.chunk(run, 1, record=path)
            self.rewind(run)
        return path

    def _prepare(self, name: str, size: Size, steps: int, more: Sequence[str]) -> Run:
        overrides = [
            f"store.uri={self.bench.server.uri}",
            f"data.source={self.rows()}",
            f"training.max_steps={steps}",
            *size.overrides,
            *more,
        ]
        recipe = load.load(RECIPE, overrides)
        path = f"{self.bench.work}/{name}.json"
        with open(path, "w", encoding="utf-8") as file:
            file.write(load.dumps(recipe))
        watch(["-m", "baton.kfp.process", "data_split", path, name], parse_event, environment=ENVIRONMENT)
        run = Run.open(f"{self.bench.server.uri}/runs/{name}")
        watch(["-m", "baton.kfp.process", "tokenize", run.uri], parse_event, environment=ENVIRONMENT)
        return run

    def rows(self) -> str:
        """Returns a file with the standard library's docstrings: reading them anew for each run would take long."""
        path = f"{self.bench.work}/rows.jsonl"
        if not os.path.exists(path):
            with open(path, "w", encoding="utf-8") as file:
                file.writelines(json.dumps(row) + "\n" for row in readers.stdlib_rows())
        return path

    def rewind(self, run: Run) -> None:
        """Takes away what chunks left, so that the run is at its beginning."""
        for name in _LEFT_BY_CHUNKS:
            self.bench.server.clear(run.path(name))


def every_step(trace: Trace, first: int, last: int) -> float:
    """Returns the seconds from the end of one step to the end of another."""
    return trace.at("step", step=last) - trace.at("step", step=first)
