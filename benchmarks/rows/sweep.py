"""Eight LoRA configurations on one device: in turns inside one process, and one after the other without Baton."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from baton import events
from baton.checkpoint.store import CheckpointStore
from baton.local.sweep import LocalSweep
from baton.recipe import load
from baton.recipe.recipe import Recipe
from baton.runs.documents import TokenizedRows
from baton.runs.run import Run, Sweep
from baton.store.manifest import usable_manifest
from benchmarks.bench import Bench, parse_mark
from benchmarks.ours import ENVIRONMENT, RECIPE, Ours
from benchmarks.process import watch
from benchmarks.rows.virtual import MB, watched
from benchmarks.sizes import Size
from benchmarks.table import Row, faster, keep, share
from benchmarks.theirs import Theirs

NAME = "sweep"
TITLE = "eight LoRA configurations of one base on one device, each trained to the end"
RATES = [1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2]
LORA = {"r": 8, "alpha": 16, "target_modules": ["q_proj", "v_proj"]}
CHUNKS, STEPS, HELD_OUT = 2, 8, 8
"""Chunks of a configuration, steps of a chunk, and rows that score each chunk."""
SIDES = ("shared", "own", "TRL")


def measure(bench: Bench, ours: Ours, theirs: Theirs) -> Row:
    size, steps = bench.options.large, 1 if bench.options.quick else STEPS
    theirs.inputs(size)
    inputs = f"{bench.work}/inputs-{size.name}"
    base = _base(bench, inputs)
    overrides = (
        *("model.from_scratch=null", "model.tokenizer=null", f"model.base={base}"),
        f"adapter={json.dumps({'type': 'lora', **LORA})}",
        *(f"training.max_steps={steps * CHUNKS}", f"chunks.count={CHUNKS}", f"data.split.eval={HELD_OUT}"),
    )
    columns: dict[str, list[float]] = {}
    seconds: dict[str, dict[str, list[float]]] = {"shared": {}, "own": {}}
    digests: dict[str, dict[str, str]] = {}
    rows = 0
    for number in bench.rounds():
        for side in SIDES[:: 1 if number % 2 else -1]:
            with watched(servers=side != "TRL") as most:
                if side == "TRL":
                    took = _by_trl(bench, base, inputs, size, steps, rows)
                else:
                    search = {"method": "grid", "parameters": {"training.learning_rate": RATES}, "device": side}
                    done = run_sweep(bench, ours, f"{side}-{number}", size, search, *overrides)
                    took, rows = done.took, _held_out(done.runs["t000"])
                    digests[side] = {trial: _digest(run) for trial, run in done.runs.items()}
                    phases = {name: value / done.chunks for name, value in done.spent.items()}
                    keep(seconds[side], {**phases, "chunk": sum(phases.values())})
            keep(columns, {f"{side} time": took, f"{side} memory": most.all / MB})
        if digests["shared"] != digests["own"]:
            raise RuntimeError(f"trials that share a process have other bits than alone: {digests}")
    shared = seconds["shared"]
    swap = [a - b - c for a, b, c in zip(*(shared[name] for name in ("chunk", "train", "score")), strict=True)]
    return Row(
        title=TITLE,
        conditions=f"{len(RATES)} learning rates; {size}; {CHUNKS} chunks of {steps} steps, each with a score; "
        "one torch thread",
        preparation="neither side",
        figures=[
            *(
                faster("time", columns["shared time"], columns[f"{other} time"], name, at_least=goal)
                for other, name, goal in (("own", "a process a chunk", 2), ("TRL", "TRL", None))
            ),
            share("swap", swap, shared["chunk"], "chunk", unit="s", at_most=0.03),
            *(
                share(
                    "peak memory", columns["shared memory"], columns[f"{other} memory"], name, unit="MB", at_most=goal
                )
                for other, name, goal in (("own", "a process a chunk", None), ("TRL", "TRL", 1.15))
            ),
        ],
        splits={"a chunk, shared": shared, "a chunk in a process of its own": seconds["own"]},
        notes=[
            "Baton: `sweep.device: shared`; a process a chunk is `own`, forked from a warm server, the next one built "
            "while one trains",
            "TRL: one script, one configuration after the other, the base loaded for each; no checkpoints but the last",
            "each trial has the same digest on both sides of Baton, else this row fails",
            "swap: a turn without training and score: build, restore, save, commit",
            "memory: all processes at one moment (PSS), of Baton with its server",
            "time: from the first configuration to the last score, without imports",
        ],
    )


def _base(bench: Bench, inputs: str) -> str:
    """Returns a folder with a base of random weights and its tokenizer, of the other sides' inputs."""
    folder = f"{bench.work}/base"
    if not os.path.exists(folder):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(inputs)).save_pretrained(folder)
        AutoTokenizer.from_pretrained(inputs).save_pretrained(folder)
    return folder


def _by_trl(bench: Bench, base: str, inputs: str, size: Size, steps: int, rows: int) -> float:
    """Trains all configurations by TRL, and returns the seconds from the first one's beginning to the last's end."""
    settings = {
        "base": base,
        "inputs": inputs,
        "folder": bench.fresh_folder("TRL"),
        "rates": RATES,
        "lora": LORA,
        "rows": rows,
        "every": steps,
        "steps": steps * CHUNKS,
        "batch": size.batch,
        "length": size.length,
        "threads": 1,
        "seed": 1,
    }
    path = f"{bench.work}/search.json"
    with open(path, "w", encoding="utf-8") as file:
        json.dump(settings, file)
    trace = watch(["-m", "benchmarks.search_script", path], parse_mark, environment=ENVIRONMENT)
    return trace.at("trained", last=True) - trace.at("begun")


def _held_out(run: Run) -> int:
    manifest = usable_manifest(run.storage, run.need(TokenizedRows).prefix)
    assert manifest
    return int(manifest.meta["eval"])


def _digest(run: Run) -> str:
    return next(iter(CheckpointStore(run).committed())).digest


class TimedSweep(LocalSweep):
    """A sweep that keeps the times of its first chunk and last rung."""

    def __init__(self, recipe: Recipe, name: str) -> None:
        self.began = self.ended = 0.0
        super().__init__(recipe, name, self._heard)

    def _heard(self, event: events.Event) -> None:
        match event:
            case events.Stage(stage, "started") if "train chunk" in stage:
                self.began = self.began or time.time()
            case events.Verdict():
                self.ended = time.time()

    def measured(self) -> TimedSweep:
        """Runs it, and sums its chunks."""
        self.winner = self.run().name.rpartition("-")[2]
        self.took = self.ended - self.began
        trials = Sweep(self.sweep.storage, self.sweep.name).document().trials
        self.runs = {trial.id: self.sweep.run(trial) for trial in trials}
        attempts = [attempt for run in self.runs.values() for attempt in run.attempts()]
        self.chunks = len(attempts)
        self.steps = sum(attempt.to_step - attempt.from_step for attempt in attempts)
        self.spent: dict[str, float] = {}
        for attempt in attempts:
            for phase, seconds in attempt.seconds.items():
                self.spent[phase] = self.spent.get(phase, 0.0) + seconds
        return self


def run_sweep(
    bench: Bench, ours: Ours, name: str, size: Size, search: Mapping[str, Any], *overrides: str
) -> TimedSweep:
    """Runs a sweep of the benchmark's recipe on this machine, in a folder.

    Args:
        bench: The benchmark.
        ours: The side that has the rows.
        name: Name of the sweep.
        size: Its model.
        search: The recipe's section `sweep`.
        overrides: Further changes to the recipe.
    """
    os.environ.update({name: value for name, value in ENVIRONMENT.items() if name != "BATON_EVENTS"})
    common = [f"store.uri={bench.work}/sweeps", f"data.source={ours.rows()}", "data.split.eval=128"]
    document = load.load(RECIPE, [*common, *size.overrides, *overrides]).model_dump(mode="json")
    return TimedSweep(load.validate({**document, "sweep": dict(search)}, origin=RECIPE), name).measured()
