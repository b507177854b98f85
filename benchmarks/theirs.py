"""The other side: `benchmarks.script` as processes, with the same model, rows, batch and steps."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable

from benchmarks.bench import Bench, parse_mark
from benchmarks.ours import Ours
from benchmarks.process import Event, Trace, watch
from benchmarks.sizes import Size

ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


class Theirs:
    """The script's runs for one benchmark.

    Args:
        bench: The benchmark.
        ours: Where the script's inputs are taken from.
    """

    def __init__(self, bench: Bench, ours: Ours) -> None:
        self.bench, self.ours = bench, ours
        self.parameters: dict[str, int] = {}

    def begin(self, name: str) -> str:
        """Returns the address below which a run keeps its checkpoints; nothing is there."""
        self.bench.server.clear(f"script/{name}/")
        return f"{self.bench.server.uri}/script/{name}"

    def process(
        self,
        uri: str,
        size: Size,
        *,
        steps: int,
        target: int,
        every: int | None = None,
        seconds: float | None = None,
        until: Callable[[Event], bool] = lambda event: False,
        after: float | None = None,
    ) -> Trace:
        """Runs the script to its target or until it is killed; what it left on this machine is removed.

        Args:
            uri: Where its checkpoints are.
            size: Its model.
            steps: Steps of the whole run.
            target: Step at which it saves and ends.
            every: Steps between checkpoints.
            seconds: Seconds between checkpoints.
            until: Tells at which event to kill it.
            after: Seconds after its start at which to kill it.
        """
        inputs, folder = self.inputs(size), self.bench.fresh_folder("script")
        settings = {
            "uri": uri,
            "folder": folder,
            "model": inputs,
            "rows": f"{inputs}/rows.jsonl",
            "steps": steps,
            "target": target,
            "every_steps": every,
            "every_seconds": seconds,
            "batch": size.batch,
            "length": size.length,
            "threads": 1,
            "seed": 1,
        }
        path, cache = f"{self.bench.work}/script.json", f"{self.bench.work}/script-cache"
        with open(path, "w", encoding="utf-8") as file:
            json.dump(settings, file)
        environment = {**ENVIRONMENT, "HF_DATASETS_CACHE": cache}
        command = ["-m", "benchmarks.script", path]
        try:
            return watch(command, parse_mark, folder=folder, environment=environment, until=until, after=after)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            shutil.rmtree(cache, ignore_errors=True)  # a fresh pod has none

    def newest(self, uri: str) -> int:
        """Returns the step of the newest checkpoint that was put completely, 0 where there is none."""
        from baton.store.storage import Storage

        try:
            return int(Storage(uri).read("newest").decode().rpartition("-")[2])
        except FileNotFoundError:
            return 0

    def inputs(self, size: Size) -> str:
        """Returns the folder with tokenizer, configuration and rows that ours trains with."""
        folder = f"{self.bench.work}/inputs-{size.name}"
        if not os.path.exists(folder):
            os.makedirs(folder)
            run = self.ours.run(size, steps=4, count=2)
            trace = watch(["-m", "benchmarks.export", run.uri, folder], parse_mark)
            self.parameters[size.name] = trace.all("exported")[0]["parameters"]
            if self.parameters[size.name] != size.parameters:
                raise RuntimeError(f"{size.name} has {self.parameters[size.name]} parameters, not {size.parameters}")
        return folder
