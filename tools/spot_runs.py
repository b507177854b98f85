"""Real runs on this machine under recorded spot availability, an hour of it in ten seconds.

`python -m tools.spot_runs FOLDER` trains the quickstart under the traces of `tools/spot.py` in turn. Where a trace
loses its machine, the training process is killed; where it has one again, the run is started again. Each is compared
with its forecast by the first run, which is not killed. `FOLDER/spot_runs.json` is for `tests/assets`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from baton import api, events
from baton.compiler.pipeline_file import Pipeline
from baton.kfp.processes import FreshProcess
from baton.local import results
from baton.recipe import load
from baton.runs.bill import bill
from baton.runs.documents import RunInfo, moment
from baton.runs.forecast import DAY, forecast, measured
from baton.runs.run import Run
from baton.source.prepare import LoadedRecipe
from baton.store.storage import Storage
from benchmarks.published import commit
from tools.spot import RUNS, TRACES, Trace

SCALE = 10 / 3600  # seconds here for one of a trace
HOURS = 24  # of a trace, that a start is chosen for
MOST_LOSSES = 4  # in that time: a start on this machine takes as long as an hour of a trace
STEPS = 240
CHANGES = {
    "training.max_steps": STEPS,
    "training.lr_scheduler": "warmup_stable_decay",
    "training.lr_scheduler_options": {"num_decay_steps": 20},
    "chunks.count": 2,
    "chunks.checkpoint_every": "10s",
    "budget.price": 1.0,
}


class Training:
    """A run on this machine in a process of its own."""

    def __init__(self, loaded: LoadedRecipe, name: str, folder: Path) -> None:
        request = {
            "recipe": load.dumps(loaded.localised()),
            "name": name,
            "pipeline": Pipeline.finetune,
            "arguments": {"run_name": name},
            "containers": False,
            "environment": {},
        }
        path = folder / f"{name}.json"
        path.write_text(json.dumps(request))
        self.started, self.first_step = time.monotonic(), 0.0
        self.trains = threading.Event()
        self.ended = threading.Event()
        self.process = FreshProcess("baton.local.engine", [str(path)])
        threading.Thread(target=self._follow, daemon=True).start()

    def _follow(self) -> None:
        for event in self.process.events():
            if isinstance(event, events.Step):
                self.first_step = self.first_step or time.monotonic() - self.started
                self.trains.set()
            elif isinstance(event, events.Stage) and event.state == "done":
                self.trains.clear()
        self.process.wait()
        self.ended.set()

    def kill(self) -> None:
        """Kills the process and all below it, as a node's end does."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        self.process.kill()
        for child in children:
            if child.is_running():
                child.kill()
        self.ended.wait()


def one(loaded: LoadedRecipe, name: str, folder: Path, trace: Trace, start: float) -> dict[str, Any]:
    """Trains one run under a trace, and returns its figures."""
    began: float | None = None  # of the trace's clock: the first step
    kills, waited = 0, 0.0
    while True:
        training = Training(loaded, name, folder)
        while not training.ended.wait(0.05):
            if not training.trains.is_set():
                continue
            began = began or time.monotonic()
            is_there, change = trace.state(start + (time.monotonic() - began) / SCALE)
            if not is_there:
                training.kill()
                kills += 1
                pause = (change - start) * SCALE - (time.monotonic() - began)
                time.sleep(pause)
                waited += pause
                break
        else:
            break
    run = Run(Storage(loaded.localised().store.uri), name)
    told, paid = results.result(run), bill(run)
    ended = max(moment(stage.at) for stage in run.records())
    assert paid
    return {
        "run": name,
        "state": told["state"],
        "model": told["model_uri"] is not None,
        "steps": told["steps"],
        "kills": kills,
        "waited": round(waited, 1),
        "seconds": round(ended - moment(run.need(RunInfo).created), 1),
        "device_seconds": round(paid.total - paid.after, 1),
        "budget": told["budget"],
    }


def again_after(training: Training, start: Callable[[], Training]) -> float:
    """Kills a run in training, and returns the seconds from its second start to the first step."""
    training.trains.wait()
    time.sleep(5)
    training.kill()
    training = start()
    training.trains.wait()
    first_step = training.first_step
    training.ended.wait()
    return first_step


def starts(trace: Trace, chance: random.Random, seconds: float) -> tuple[float, float, float]:
    """Returns a start with a machine, with the rate of its loss a day here and the mean time without one."""
    for _ in range(10_000):
        start = chance.uniform(0, max(trace.length - HOURS * 3600, 0))
        now, losses, gone = start, 0, 0.0
        while now < start + HOURS * 3600:
            is_there, change = trace.state(now)
            end = min(change, start + HOURS * 3600)
            if now == start and not is_there:
                break
            if not is_there:
                gone += end - now
            elif change == end:
                losses += 1
            now = end
        else:
            if 0 < losses <= MOST_LOSSES and gone * SCALE < seconds:
                there = HOURS * 3600 - gone
                return start, losses / (there * SCALE) * DAY, gone * SCALE / losses
    raise ValueError("no start with a loss, few of them, and enough capacity")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--limit", type=float, default=1.5, help="budget as a multiple of the expected device time")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    os.environ["BATON_CACHE"] = str(given.folder / "cache")
    store, chance = str(given.folder / "store"), random.Random(0)
    undisturbed = api.load("quickstart", {**CHANGES, "budget.limit": "100 USD"}, store=store)
    Training(undisturbed, "undisturbed", given.folder).ended.wait()
    again = again_after(
        Training(undisturbed, "again", given.folder), lambda: Training(undisturbed, "again", given.folder)
    )
    known = measured(Run(Storage(undisturbed.localised().store.uri), "undisturbed"), "the undisturbed run")
    assert known
    whole = forecast(undisturbed.localised(), known)
    rows: list[dict[str, Any]] = []
    document = {"date": time.strftime("%-d %B %Y"), "commit": commit(), "rows": rows}
    for place, recorded in itertools.cycle(json.loads(TRACES.read_text()).items()):
        if len(rows) == given.runs:
            break
        trace = Trace(recorded)
        try:
            start, rate, wait = starts(trace, chance, whole.seconds.expected)
        except ValueError:
            continue
        changes = {**CHANGES, "resources.interruptions_per_day": rate, "budget.limit": "100 USD"}
        wait += again - known.start
        told = forecast(api.load("quickstart", changes, store=store).localised(), known, wait)
        limit = told.device_seconds.expected * given.limit / 3600
        loaded = api.load("quickstart", {**changes, "budget.limit": f"{limit:.5f} USD"}, store=store)
        row = {"trace": place, "rate": rate, "wait": wait, "limit": limit * 3600, "forecast": told.to_json()}
        rows.append({**row, **one(loaded, f"trace-{len(rows)}", given.folder, trace, start)})
        (given.folder / RUNS.name).write_text(json.dumps(document, indent=1) + "\n")
        show(rows)


def show(rows: list[dict[str, Any]]) -> None:
    table = Table("trace", "kills", "device time", "forecast", "end", "forecast", "limit", "steps", "state")
    for row in rows:
        ranges = [[f"{value:.0f}" for value in row["forecast"][key][1:]] for key in ("device_seconds", "seconds")]
        table.add_row(
            row["trace"].rpartition("/")[2],
            *(str(row["kills"]), f"{row['device_seconds']:.0f}", "–".join(ranges[0])),
            *(f"{row['seconds']:.0f}", "–".join(ranges[1]), f"{row['limit']:.0f}", str(row["steps"]), row["state"]),
        )
    Console().print(table)


if __name__ == "__main__":
    main()
