"""A chunk of somebody's run, trained again by somebody else, and held against what the run has."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from typing import TypedDict

from baton.components.shared.checkpoints.store import Checkpoint, CheckpointStore
from baton.components.shared.core.events import Event
from baton.components.shared.core.fingerprint import Fingerprint
from baton.components.shared.core.scratch import scratch_folder
from baton.components.shared.core.signing import PublicKey
from baton.components.shared.recipe import Recipe
from baton.components.shared.runs.run import Run, now
from baton.pipelines.proving.comparing import MAX_TOLD, Comparison, Entry, Value, compare
from baton.pipelines.proving.replaying import Replay, Stretch, fetch, stretch


class Audit(TypedDict):
    """Result of an audit.

    `expected` is what the run has, `found` what was trained here; `claims` are the parts of the state whose digest the
    run's manifest states otherwise, `data` the parts of the data that came out otherwise, and `differences` the entries
    in which this machine is not the run's.
    """

    run: str
    run_uri: str
    recipe: str
    chunk: int
    start: int
    end: int
    created: str
    equal: bool
    verdict: str
    signed_by: str | None
    rows: str
    data: list[str]
    losses: int
    files: int
    tensors: int
    numbers: int
    first_difference: Entry | None
    first_loss: Entry | None
    num_differing: int
    differing: list[Value]
    claims: list[str]
    expected: dict[str, str]
    found: dict[str, str]
    machine: str
    fingerprint: dict[str, object]
    differences: list[str]
    seconds: float


def audit(
    run: Run,
    index: int,
    *,
    recipe: Recipe | None = None,
    key: PublicKey | None = None,
    on_event: Callable[[Event], None] = lambda event: None,
) -> Audit:
    """Trains a chunk of a run again, in a store of its own, and compares all that it comes to.

    Args:
        run: The run. It is read, and nothing is written to it.
        index: Number of the chunk.
        recipe: The recipe, its paths absolute, by which rows are read and tokenized anew; without one the run's own and
            its tokens are taken.
        key: Key by which the checkpoints must be signed.
        on_event: Called with each event of the processes.

    Raises:
        UserError: the recipe is another, or a checkpoint that it takes is gone.
        DamagedError: a checkpoint is not what was committed.
        BatonError: a process failed, with its message.
    """
    began, created = time.monotonic(), now()
    store = CheckpointStore(run, key)
    chunk = stretch(store, index)
    with scratch_folder("audit") as scratch:
        replay = Replay(store, chunk, f"{scratch}/store", on_event)
        if recipe is None:
            replay.copy_data()
        elif differing := replay.make_data(recipe):
            return _told(run, chunk, created, began, Comparison(), None, recipe, key, differing)
        again = replay.train()
        prefix = store.prefix(chunk.after.step)
        theirs = fetch(store.storage, prefix, chunk.after.manifest, f"{scratch}/theirs")
        comparison = compare(theirs, replay.folder(again), chunk.start)
        return _told(run, chunk, created, began, comparison, again, recipe, key, [])


def _told(
    run: Run,
    chunk: Stretch,
    created: str,
    began: float,
    comparison: Comparison,
    again: Checkpoint | None,
    recipe: Recipe | None,
    key: PublicKey | None,
    data: list[str],
) -> Audit:
    theirs = chunk.after.meta
    ours = again.meta.fingerprint if again else Fingerprint()
    found = again.meta.state if again else {}
    # Of a state that is the same, another digest was written down.
    claims = [part for part, digest in found.items() if theirs.state.get(part) != digest] if again else []
    is_equal = again is not None and again.step == chunk.after.step and comparison.is_equal and not claims
    return {
        "run": run.name,
        "run_uri": run.uri,
        "recipe": run.recipe().name,
        "chunk": chunk.index,
        "start": chunk.start,
        "end": chunk.after.step,
        "created": created,
        "equal": is_equal,
        "verdict": _verdict(chunk, comparison, claims, data, again),
        "signed_by": key.name if key else None,
        "rows": "recipe" if recipe else "run",
        "data": data,
        "losses": comparison.logged,
        "files": comparison.files,
        "tensors": comparison.tensors,
        "numbers": comparison.numbers,
        "first_difference": comparison.first,
        "first_loss": comparison.first_loss,
        "num_differing": len(comparison.differing),
        "differing": comparison.differing[:MAX_TOLD],
        "claims": claims,
        "expected": dict(theirs.state),
        "found": dict(found),
        "machine": platform.node(),
        "fingerprint": dict(ours.to_json()),
        "differences": ours.differences(theirs.fingerprint) if again else [],
        "seconds": round(time.monotonic() - began, 1),
    }


def _verdict(
    chunk: Stretch, comparison: Comparison, claims: list[str], data: list[str], again: Checkpoint | None
) -> str:
    """Returns the sentence that an audit comes down to."""
    name = f"chunk {chunk.index}, steps {chunk.start + 1} to {chunk.after.step},"
    if data:
        return f"differs: from this recipe and data come other {' and '.join(data)} than the run has"
    assert again
    if again.step != chunk.after.step:
        return f"differs: trained again, {name} ends at step {again.step}"
    if first := comparison.first:
        loss = comparison.first_loss
        more = f", another loss from step {loss['step']} on" if loss and loss != first else ""
        return f"differs: {name} logs another {first['name']} from step {first['step']} on{more}"
    if comparison.differing:
        count = len(comparison.differing)
        values = "value differs" if count == 1 else "values differ"
        return f"differs: {name} logs the same, and {count} {values} in the checkpoint that it ends on"
    if claims:
        return f"differs: {name} holds the same, and its manifest states another digest of {', '.join(claims)}"
    return f"equal: {name} comes to the same bits when it is trained again"
