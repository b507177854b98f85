"""Negative controls: what a chunk comes to without a part of the state, and the cells in which a part is idle."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.checkpoint.store import CheckpointStore
from baton.recipe.recipe import Recipe
from baton.runs.documents import PARTS
from baton.runs.plan import make_plan
from baton.runs.run import Run

TIMED = ("_runtime", "_per_second", "step_time")
"""Ends of the names of logged values that depend on the clock."""
WITNESSES = {"weights": ("optimizer", "logged"), "callbacks": ("weights", "decisions"), "log": ("logged",)}
"""Part → what has to differ where it was left out, any of these; `weights` for all others."""
STATEFUL = "tests.resume.own:Cooling"
"""The callback of the matrix that keeps something."""

PROMPTS = {"grpo": 13, "rloo": 13, "distillation": 29}
"""Training rows of the cells whose model generates."""


@dataclass(frozen=True)
class End:
    """What a chunk has come to.

    Attributes:
        aspects: The digest of each part of the state; values `logged` in the chunk; `decisions`: the steps that were
            saved and evaluated, and whether the run has ended.
        left_out: The parts that it did not restore.
    """

    aspects: Mapping[str, Any]
    left_out: frozenset[str]

    @classmethod
    def of(cls, run: Run, start: int) -> End:
        """Returns it of a chunk that resumed from a step."""
        store = CheckpointStore(run)
        saved = [checkpoint for checkpoint in store.committed() if checkpoint.meta.restored.step == start]
        last = saved[0].meta
        logged = [
            {name: value for name, value in entry.items() if not name.endswith(TIMED)}
            for entry in store.history(saved[0])
            if entry["step"] > start
        ]
        evaluated = [entry["step"] for entry in logged if "eval_loss" in entry]
        decisions = ([checkpoint.step for checkpoint in saved], evaluated, last.finished)
        parts = {part: last.state[part] for part in PARTS}
        checked = last.restored.checked or {}
        assert set(checked.values()) <= {"match", "absent", "left out"}
        left_out = frozenset(part for part, verdict in checked.items() if verdict == "left out")
        return cls({**parts, "logged": logged, "decisions": decisions}, left_out)

    def differences(self, other: End) -> set[str]:
        """Returns the aspects in which another chunk has come to something else."""
        return {name for name, value in self.aspects.items() if other.aspects[name] != value}

    def traces(self, part: str, without: End) -> set[str]:
        """Returns what shows outside a part that it was left out."""
        return self.differences(without) & set(WITNESSES.get(part, ("weights",)))


def ends(run: Run, variants: Sequence[tuple[str, ...]], legs: Any, inside: Any) -> list[End]:
    """Returns what the second chunk of a run comes to.

    Args:
        run: Its first chunk is trained.
        variants: The parts that are left out, once and again.
        legs: The processes.
        inside: What they run.
    """
    start = run.plan().targets[0]
    found = _in_copies(run, variants, legs, inside) if run.recipe().world_size == 1 else []
    for parts in variants[len(found) :]:  # processes that are joined cannot be forked
        code, printed = legs.leg(legs.chunk, run.uri, 2, parts)
        assert code == 0, printed
        found.append(End.of(run, start))
        for folder in Path(run.uri, "checkpoints").iterdir():
            if folder.name != f"step-{start:08d}":
                shutil.rmtree(folder)
    assert [end.left_out for end in found] == [frozenset(parts) for parts in variants]
    return found


def _in_copies(run: Run, variants: Sequence[tuple[str, ...]], legs: Any, inside: Any) -> list[End]:
    copies = {f"{run.uri}-without-{'-'.join(parts) or 'nothing'}": parts for parts in variants}
    for uri in copies:  # the checkpoint is fetched once, for all of them
        shutil.copytree(run.uri, uri, ignore=shutil.ignore_patterns("checkpoints"))
    code, printed = legs.leg(inside.resumed, run.uri, 2, copies)
    assert code == 0, printed
    return [End.of(Run.open(uri), run.plan().targets[0]) for uri in copies]


def idle(recipe: Recipe, step: int) -> dict[str, str]:
    """Returns the parts whose loss changes nothing else of a chunk that resumes from a step, each with the reason."""
    reasons = {part: reason(recipe, step) for part, reason in REASONS.items()}
    return {part: reason for part, reason in reasons.items() if reason}


def _scaler(recipe: Recipe, step: int) -> str:
    return "" if recipe.training.precision == "fp16" else "there is none: gradients are not scaled"


def _rng(recipe: Recipe, step: int) -> str:
    if recipe.parallel.virtual_workers:
        return "each pass is seeded by its step, worker and number"
    return "" if _draws(recipe) else "a step draws nothing, or is seeded by its rows"


def _draws(recipe: Recipe) -> bool:
    """Tells whether a step draws from the generators that a checkpoint has the state of."""
    training, scratch, adapter = recipe.training, recipe.model.from_scratch, recipe.adapter
    if training.spec.generates or training.neftune_alpha or recipe.hooks.trainer:
        return True
    if getattr(getattr(training, training.method, None), "disable_dropout", False):
        return False
    drops = any(value for name, value in scratch.config.items() if "drop" in name) if scratch else False
    # GPT-2's own configuration has dropout.
    return drops or bool(scratch and scratch.architecture == "gpt2") or bool(adapter and adapter.dropout)


def _callbacks(recipe: Recipe, step: int) -> str:
    keeps = recipe.training.early_stopping or any(hook.use == STATEFUL for hook in recipe.hooks.callbacks)
    return "" if keeps else "no callback keeps anything"


def _method(recipe: Recipe, step: int) -> str:
    settings = getattr(recipe.training, recipe.training.method, None)
    if getattr(settings, "sync_reference", None):
        return ""
    if not recipe.training.spec.generates:
        return "the method keeps nothing"
    cycle = recipe.steps_per_generation * getattr(settings, "num_iterations", 1)
    # Prompts that do not fill a round are left out, so an epoch's end is a round's, whatever its last step has of it.
    since = step % make_plan(recipe, PROMPTS[recipe.training.method]).steps_per_epoch
    return "" if since * recipe.gradient_accumulation_steps % cycle else "the next step begins a round"


def _log(recipe: Recipe, step: int) -> str:
    counts_tokens = recipe.training.method not in ("orpo", "cpo")  # whose trainers in TRL log no running total
    return "" if counts_tokens or step % recipe.training.log_every else "what is logged of a step is the step's alone"


REASONS: dict[str, Callable[[Recipe, int], str]] = {
    "scaler": _scaler,
    "rng": _rng,
    "callbacks": _callbacks,
    "log": _log,
    "method": _method,
}
"""Part → why it is idle, empty where it is not."""
