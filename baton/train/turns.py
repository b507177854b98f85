"""Trials that take turns inside one process, which loads their base once: chunk by chunk, each a turn.

A turn is the chunk that a process of its own would train: it restores the trial's checkpoint by the same code, compares
the whole state before its first step, trains, and commits. `fresh` then makes the process as it was before the turn.
"""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from baton import events, machine
from baton.checkpoint import proof
from baton.checkpoint.staging import Staging
from baton.errors import BatonError
from baton.recipe.sharing import share
from baton.runs.outcomes import TrialFailure, TrialInfo, TrialJoin
from baton.runs.plan import Plan
from baton.runs.run import Run, Sweep
from baton.store.cache import NodeCache
from baton.train import imports
from baton.train.chunk import Ending, run_chunk
from baton.train.context import Clock
from baton.train.kept import Kept

CACHED = 0.25  # share of the free memory for tokens and checkpoints of trials whose turn is not now


class Device(NamedTuple):
    """One of several with a share each of a rung's trials; a trial that was asked to go joins one of them."""

    rung: int
    name: str  # the same for a process that is started again


def take_turns(
    runs: Sequence[str], first: int, last: int, leave_out: tuple[str, ...] = (), device: Device | None = None
) -> None:
    """Trains chunks `first` to `last` of trials, given by their runs' addresses, each for all before the next one.

    Trials that are asked to stop, or have a score of the chunk, train nothing. Those asked to go meanwhile join before
    the next chunk. `BatonError` for a preemption. For `leave_out` see `run_chunk`.
    """
    clock = Clock()
    opened = [Run.open(uri) for uri in runs]
    trials = {run.need(TrialInfo).id: run for run in opened}
    sweep = Sweep(opened[0].storage, opened[0].need(TrialInfo).sweep)
    imports.import_training_stack(opened[0].recipe())
    gc.freeze()  # no collection between turns visits the libraries' objects
    with Staging() as staging:
        folder = staging.folder(0)
        free = min(machine.available_memory(), shutil.disk_usage(folder).free)
        kept = Kept(NodeCache(folder, CACHED * free))
        for run, turn in _turns(trials, sweep, range(first, last + 1), device):
            events.emit(turn)
            with fresh():
                outcome = run_chunk(run.uri, turn.chunk, leave_out, clock, kept)
            assert outcome  # of the only rank
            if outcome.ending is Ending.PARTIAL:
                raise BatonError(f"this machine is preempted; trial {turn.trial} is saved at step {outcome.step}.")
            events.emit(replace(turn, state="done"))
            if outcome.notice:  # in the chunk's last step
                events.emit(events.Partial(turn.chunk, outcome.step, outcome.step, outcome.notice))
                raise BatonError(f"this machine is preempted; trial {turn.trial} has ended chunk {turn.chunk}.")
            clock.restart()


def _turns(
    runs: dict[str, Run], sweep: Sweep, chunks: range, device: Device | None
) -> Iterator[tuple[Run, events.Turn]]:
    for index in chunks:
        runs |= _joining(runs, sweep, device)
        for trial, run in runs.items():
            request = sweep.request(trial)
            if not proof.has_ended(run, index) and (request is None or request.state != "stop"):
                yield run, events.Turn(trial=trial, chunk=index, state="started")


def _joining(runs: Mapping[str, Run], sweep: Sweep, device: Device | None) -> dict[str, Run]:
    """Returns trials that were asked to go since, such as forks, if they may share the process."""
    joining: dict[str, Run] = {}
    asked = {trial for trial, request in sweep.requests().items() if request.state == "go"} - runs.keys()
    if not asked:
        return joining
    head = sweep.document()
    if device:  # the others of the rung are another device's
        asked -= set(sweep.entered(head, device.rung))
    for entry in head.trials:
        if entry.id not in asked:
            continue
        run = sweep.run(entry)
        # Without a failure: the sweep has begun this process again without a trial that failed.
        if run.read(TrialInfo) and run.read(Plan) and run.read(TrialFailure) is None:
            both = {"first": next(iter(runs.values())), "other": run}
            shares = len(share({name: each.resolved_recipe() for name, each in both.items()}).groups) == 1
            if shares and (device is None or _is_first(sweep, entry.id, device)):
                joining[entry.id] = run
    return joining


def _is_first(sweep: Sweep, trial: str, device: Device) -> bool:
    """Tells whether a trial joins this device, the first one of the rung that asks."""
    if sweep.write_new(TrialJoin(device=device.name), device.rung, trial):
        return True
    joined = sweep.read(TrialJoin, device.rung, trial)
    return joined is not None and joined.device == device.name


@contextlib.contextmanager
def fresh() -> Iterator[None]:
    """Puts a process back after a block: random state, variables, threads, and what Accelerate keeps.

    Settings that are equal for all trials of a process, such as the precision, stay.
    """
    import torch
    from accelerate.state import AcceleratorState, GradientState

    from baton.models import rng

    variables, threads = dict(os.environ), torch.get_num_threads()
    try:
        with warnings.catch_warnings(), rng.undisturbed():
            yield
    finally:
        os.environ.clear()
        os.environ.update(variables)
        torch.set_num_threads(threads)
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        # The trainer and its model are in circles, and the next one needs their memory.
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
