"""Sweeps to look at: documents as a sweep leaves them in the store, with curves as trainings have them."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

from baton.checkpoint.store import CheckpointMeta, CheckpointStore
from baton.recipe import load
from baton.runs.outcomes import RungVerdict, SweepHead, TrialEntry, TrialInfo
from baton.runs.plan import Plan
from baton.runs.run import Run, Sweep
from baton.store.storage import Storage

STEPS = 40
"""Steps of a chunk."""
SEVEN: dict[str, Any] = {
    "training.learning_rate": {"min": 1e-5, "max": 1e-2, "log": True},
    "training.weight_decay": {"min": 0.0, "max": 0.1},
    "training.warmup_steps": [0, 10, 50],
    "training.lr_scheduler": ["linear", "cosine", "constant"],
    "adapter.r": [4, 8, 16, 32],
    "adapter.dropout": {"min": 0.0, "max": 0.3},
    "training.gradient_checkpointing": [True, False],
}


class Swept:
    """A sweep in the making.

    Args:
        folder: Where to.
        count: How many trials.
        parameters: The recipe's `sweep.parameters`.
        rungs: Chunk and number of those kept, of each rung there will be.
        gpus: Accelerators of a trial.
        store: Address of its store; by default a folder.
    """

    def __init__(
        self,
        folder: Path,
        count: int,
        parameters: dict[str, Any],
        rungs: list[tuple[int, int]],
        gpus: int = 1,
        store: str = "",
    ) -> None:
        self.storage = Storage(store or str(folder / "store"))
        self.folder = folder
        self.sweep = Sweep(self.storage, "sweep")
        self.rungs = rungs
        self.random = random.Random(7)
        self.trials = [
            {
                "id": f"t{number:03d}",
                "run": f"sweep-t{number:03d}",
                "bracket": 1,
                "values": {path: self._value(choices) for path, choices in parameters.items()},
                "parent": None,
            }
            for number in range(count)
        ]
        recipe = {
            "name": "swept",
            "resources": {"gpus": gpus, "nodes": 1},
            "chunks": {"count": rungs[-1][0]},
            "sweep": {"parameters": parameters},
        }
        head = SweepHead.model_validate(
            {
                "name": "sweep",
                "created": "2026-11-21T10:00:00.000Z",
                "recipe": recipe,
                "metric": "eval_loss",
                "mode": "min",
                "rungs": [{"chunk": chunk, "keep": keep} for chunk, keep in rungs],
                "trials": self.trials,
            }
        )
        self.sweep.write_new(head)

    def _value(self, choices: Any) -> Any:
        if isinstance(choices, list):
            return self.random.choice(choices)
        if choices.get("log"):
            return math.exp(self.random.uniform(math.log(choices["min"]), math.log(choices["max"])))
        return self.random.uniform(choices["min"], choices["max"])

    def loss(self, trial: dict[str, Any], step: int) -> float:
        """How well a trial does at a step: best at a learning rate of 1e-3."""
        rate = trial["values"].get("training.learning_rate", 1e-3)
        off = abs(math.log10(rate) + 3)
        return 1.7 + 0.25 * off**2 + 2.3 * math.exp(-step / (30 + 25 * off))

    def train(self, trial: dict[str, Any], chunk: int) -> None:
        """Leaves what the run of a trial has behind a chunk."""
        run, steps = Run(self.storage, trial["run"]), chunk * STEPS
        recipe = {"name": "swept", "model": {"base": "org/model"}}
        run.put("recipe.json", {"recipe": recipe, "created": "2026-11-21T10:00:00.000Z", "name": run.name})
        run.put("trial.json", {"sweep": "sweep", "id": trial["id"], "values": trial["values"]})
        targets = tuple(at * STEPS for at in range(1, self.rungs[-1][0] + 1))
        run.write(Plan(rows=1, steps_per_epoch=1, num_steps=targets[-1], targets=targets))
        noise = random.Random(trial["id"])
        log = [{"step": at, "loss": self.loss(trial, at) + noise.gauss(0, 0.06)} for at in range(1, steps + 1)]
        local = self.folder / f"{run.name}-{steps}"
        local.mkdir()
        (local / "trainer_state.json").write_text(json.dumps({"log_history": log}))
        store = CheckpointStore(run)
        writer = store.open_writer(steps)
        writer.send(str(local))
        store.commit(steps, writer, CheckpointMeta(digest=f"{run.name} {steps}"))
        value = self.loss(trial, steps)
        score = {"chunk": chunk, "step": steps, "value": value, "metrics": {"eval_loss": value}, "seconds": 20.0}
        run.put(f"scores/chunk-{chunk:03d}.json", {**score, "at": "2026-11-21T10:10:00.000Z"})

    def go(self, rungs: int, *, failing: tuple[str, ...] = ()) -> Sweep:
        """Goes through the first so many rungs; some trials fail in their first chunk."""
        alive, done = self.trials, 0
        for number, (chunk, keep) in enumerate(self.rungs[:rungs], 1):
            for trial in alive:
                if trial["id"] in failing:
                    run = Run(self.storage, trial["run"])
                    run.put("failure.json", {"chunk": 1, "message": "CUDA out of memory."})
                    continue
                for each in range(done + 1, chunk + 1):
                    self.train(trial, each)
            scored = [trial for trial in alive if trial["id"] not in failing]
            ranked = sorted(scored, key=lambda trial: self.loss(trial, chunk * STEPS))
            of = len(ranked)
            stopped: list[dict[str, Any]] = [
                {"id": x["id"], "why": f"{place} of {of}, {keep} go on", "cause": "beaten", "place": place, "of": of}
                for place, x in enumerate(ranked[keep:], keep + 1)
            ]
            stopped += [
                {"id": x["id"], "why": "chunk 1 failed: CUDA out of memory.", "cause": "failed"}
                for x in alive
                if x["id"] in failing
            ]
            scores = {x["id"]: {"value": self.loss(x, chunk * STEPS), "step": chunk * STEPS} for x in ranked}
            verdict = RungVerdict.model_validate(
                {
                    "rung": number,
                    "bracket": 1,
                    "chunk": chunk,
                    "scores": scores,
                    "kept": [x["id"] for x in ranked[:keep]],
                    "stopped": stopped,
                    "at": "2026-11-21T10:20:00.000Z",
                }
            )
            self.sweep.write(verdict, verdict.rung)
            alive, done = ranked[:keep], chunk
        if rungs == len(self.rungs):
            self.sweep.put("winner.json", {"id": alive[0]["id"], "run": alive[0]["run"], "value": 0.0})
        return self.sweep

    def fork(self, parent: str, child: str, step: int, changed: dict[str, list[Any]]) -> None:
        """Adds a trial that was forked from another."""
        origin = next(trial for trial in self.trials if trial["id"] == parent)
        values = {**origin["values"], **{path: after for path, (_, after) in changed.items()}}
        trial = {
            "id": child,
            "run": f"sweep-{child}",
            "bracket": 1,
            "values": values,
            "parent": {"run": origin["run"], "step": step},
        }
        self.sweep.add(TrialEntry.model_validate(trial))
        self.trials.append(trial)
        self.train(trial, step // STEPS + 1)
        uri = Run(self.storage, origin["run"]).uri
        note = {"parent": uri, "step": step, "digest": "d", "warm": True, "changed": changed}
        Run(self.storage, trial["run"]).put("fork.json", note)


RATES = [1e-4, 1e-3, 1e-2, 1e-1]


def in_rungs(folder: Path, **halving: Any) -> Sweep:
    """A sweep of four trials in 4 chunks, none trained yet; two advance after chunk 1, one after chunk 2."""
    recipe = load.validate(
        {
            "name": "swept",
            "model": {"from_scratch": {"architecture": "llama"}, "tokenizer": {"train": {"vocab_size": 300}}},
            "data": {"source": "rows.jsonl"},
            "training": {"max_steps": 8, "batch_size": 8},
            "chunks": {"count": 4},
            "tracking": {"mlflow": None},
            "sweep": {
                "method": "grid",
                "parameters": {"training.learning_rate": RATES},
                "halving": {"eta": 2, **halving},
            },
        },
        origin="test",
    )
    made = Sweep(Storage(str(folder)), "s")
    trials = [
        {"id": f"t{at}", "run": f"s-t{at}", "bracket": 1, "values": {"training.learning_rate": rate}, "parent": None}
        for at, rate in enumerate(RATES)
    ]
    rungs = [{"rung": at, "bracket": 1, "chunk": chunk, "keep": 1} for at, chunk in enumerate((1, 2, 4), 1)]
    document = {"metric": "eval_loss", "mode": "min", "rungs": rungs, "trials": trials}
    head = {"name": "s", "created": "now", "recipe": recipe.model_dump(mode="json"), **document}
    made.write_new(SweepHead.model_validate(head))
    for trial in made.document().trials:
        made.run(trial).put(TrialInfo.NAME, {"sweep": "s", "id": trial.id})
        made.run(trial).put("plan.json", {"rows": 1, "steps_per_epoch": 1, "num_steps": 8, "targets": [2, 4, 6, 8]})
    return made
