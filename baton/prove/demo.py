"""`baton demo`: a model fine-tuned twice, left alone and killed three times, and compared byte for byte."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from baton import events
from baton.errors import UserError
from baton.kfp import processes
from baton.kfp.processes import TRAIN_CHUNK, Launcher, Process
from baton.local import begun, forkserver
from baton.models import gguf_file
from baton.prove import prove
from baton.recipe import extras, load
from baton.recipe.recipe import Recipe
from baton.runs.documents import Progress, StagePhase
from baton.runs.run import Run, now
from baton.source import prepare

RECIPE = "demo"
STEADY = ["chunks.wait_for_commit=true"]  # a kill costs the steps since the last checkpoint, on every machine
# Steps and rows for a minute or two on two CPU cores.
QUICK = [
    *STEADY,
    "training.max_steps=24",
    "training.batch_size=4",
    "training.micro_batch_size=4",
    "chunks.checkpoint_every=4",
    "evaluation.samples=12",
]
SCRATCH: dict[str, Any] = {
    "model": {
        "from_scratch": {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4},
        "tokenizer": {"train": {"vocab_size": 512}},
    },
    "data.system": None,
    "adapter": None,
    "training.learning_rate": 3e-3,
}
"""Changes to the recipe where its model cannot be had."""


@dataclass(frozen=True)
class Kill:
    """A process that was killed: at a step, and the step that the next one resumed from."""

    step: int
    resumed: int


@dataclass(frozen=True)
class Demo:
    """Outcome of a demo.

    Attributes:
        proof: The comparison of both runs, the undisturbed one first.
        kills: The kills of the second run.
        evaluation: Figures and samples before and after training.
        seconds: Training of the undisturbed run, from the start of its process to its end.
        peak_bytes: Largest resident memory of a training process.
    """

    proof: prove.ProofResult
    kills: Sequence[Kill]
    evaluation: dict[str, Any]
    seconds: float
    peak_bytes: int


def choose_recipe(store: str | None, overrides: Sequence[str] = ()) -> tuple[Recipe, str]:
    """Returns the demo's recipe, and the reason where a small model from scratch takes the place of its model."""
    loaded = prepare.load(RECIPE, [*QUICK, *overrides], store=store)
    reason = ""
    try:
        extras.require_packages("SmolLM2-135M in a GGUF file", "gguf")
        gguf_file.find(loaded.recipe.model.base or "")
    except UserError as error:
        reason = str(error)
        loaded = prepare.LoadedRecipe(load.with_values(loaded.recipe, SCRATCH), loaded.origin)
    return loaded.localised(), reason


def run(
    recipe: Recipe,
    name: str,
    *,
    on_event: Callable[[events.Event], None] = lambda event: None,
    on_run: Callable[[str], None] = lambda words: None,
    on_kill: Callable[[Kill], None] = lambda kill: None,
    on_proof: Callable[[prove.ProofResult], None] = lambda proof: None,
) -> Demo:
    """Compares a recipe as `compare_killed` does, and evaluates its model on held-out rows."""
    proof, kills = compare_killed(recipe, name, on_event=on_event, on_run=on_run, on_kill=on_kill)
    on_proof(proof)
    on_run("evaluated")
    first, second = (Run.open(variant["uri"]) for variant in proof["variants"])
    processes.run("baton.kfp.process evaluate", [second.uri], on_event, forkserver.launcher())
    attempts = first.attempts()
    peak = max(attempt.peak_bytes or 0 for attempt in [*attempts, *second.attempts()])
    seconds = sum(attempt.total_seconds or 0.0 for attempt in attempts)
    return Demo(proof, kills, second.require("evaluation.json"), seconds, peak)


def compare_killed(
    recipe: Recipe,
    name: str,
    *,
    on_event: Callable[[events.Event], None] = lambda event: None,
    on_run: Callable[[str], None] = lambda words: None,
    on_kill: Callable[[Kill], None] = lambda kill: None,
) -> tuple[prove.ProofResult, list[Kill]]:
    """Trains a recipe of several chunks in one go, then in its chunks with a kill in each, and compares both runs."""
    created, launch = now(), forkserver.launcher()
    on_run("undisturbed")
    whole = load.with_values(recipe, {"chunks.count": 1})
    undisturbed = begun.begin(whole, f"{name}-undisturbed", on_event, launch)
    processes.train_chunk(undisturbed.uri, 1, on_event, launch)
    on_run("killed")
    second = begun.begin(recipe, f"{name}-killed", on_event, launch)
    kills = _train_killed(second, recipe, launch, on_event, on_kill)
    variants = [prove.outcome(undisturbed, 1), prove.outcome(second, recipe.num_chunks)]
    return prove.compare(variants, recipe=recipe.name, created=created), kills


def _train_killed(
    run: Run,
    recipe: Recipe,
    launch: Launcher,
    on_event: Callable[[events.Event], None],
    on_kill: Callable[[Kill], None],
) -> list[Kill]:
    """Trains all chunks of a run; kills each one's process once, two steps after a checkpoint, and starts another."""
    kills: list[Kill] = []
    killed_at: int | None = None
    begins = 0
    for index, target in enumerate(run.plan().targets, 1):
        wanted: int | None = min(target, begins + (recipe.chunks.every_steps or 1) + 2)
        while wanted is not None or killed_at is not None:
            process = launch(TRAIN_CHUNK, arguments := [run.uri, str(index)])

            def heard(event: events.Event, process: Process = process) -> None:
                nonlocal killed_at, wanted
                match event:
                    case events.Phase(phase=StagePhase.RESTORE) if killed_at is not None:
                        kills.append(Kill(killed_at, event.step or 0))
                        killed_at = None
                        on_kill(kills[-1])
                    case events.Step() if wanted is not None and event.step >= wanted:
                        killed_at, wanted = event.step, None
                        process.kill()
                on_event(event)

            failure = processes.follow(process, heard)
            if killed_at is None or process.wait() != -signal.SIGKILL:
                processes.require_success(TRAIN_CHUNK, arguments, process, failure)
                killed_at = None  # it ended before the signal arrived
                break
            process.output()
            processes.clear_staging(process.pid)
            # Seen here, and perhaps not noted there yet.
            before = run.read(Progress)
            pace = before.seconds_per_step if before else 0.0
            run.write(Progress(step=killed_at, chunk=index, seconds_per_step=pace))
        begins = target
    return kills
