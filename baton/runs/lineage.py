"""The family of runs in a store, and the models that were accepted under a recipe's name.

A run's parent is the run it forked, else the source of its weights, else the run it replaced.
models/<name>/accepted/000001.json, 000002.json, …: put-if-absent, and the highest is the model in use. A new model
takes the number after its rival's, so one of several writers succeeds. With a key each has a signature.
"""

import logging
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, TypeVar

from baton import signing
from baton.documents import NamedDocument, load_object
from baton.errors import BatonError, DamagedError, FormatError
from baton.runs import documents
from baton.runs.outcomes import AcceptedModel, EvaluationResult, ExportedModel, RetrainNote, RunFailure, TrialInfo
from baton.runs.plan import Plan
from baton.runs.run import DocumentFolder, Run, Sweep, as_json, iso
from baton.runtime import SYSTEM
from baton.store.manifest import read_manifest
from baton.store.storage import Storage

logger = logging.getLogger("baton")
D = TypeVar("D", bound=NamedDocument)

MOST = 200  # runs of a store up to which a report reads all of them to find a run's children
_OPEN = ("new", "running", "interrupted")
_STEP = re.compile(r"step-(\d{8,})")
_ACCEPTED_FILE = re.compile(r"(\d{6})\.json")


class Models(DocumentFolder):
    """Models under a recipe's name."""

    KIND = "model"


@dataclass(frozen=True)
class Accepted:
    """The newest accepted model; number 0 and None before there is one."""

    number: int = 0
    model: AcceptedModel | None = None

    @property
    def model_uri(self) -> str | None:
        return self.model.model_uri if self.model else None


def newest_accepted(storage: Storage, name: str) -> Accepted:
    """Returns the model in use; `SignatureError` unless this process's key, if it has one, has signed it."""
    numbers = _accepted_numbers(storage, name)
    return _read_accepted(storage, name, max(numbers), signing.trusted_here()) if numbers else Accepted()


def accept(storage: Storage, name: str, after: int, model: AcceptedModel) -> Accepted:
    """Accepts a model in place of its rival, number `after`, 0 for none; BatonError if another run's came first."""
    # The result does not tell whose model is there: the answer to a put may be lost, and a retried stage has written it
    # before. So it is read back.
    path, public = f"{_accepted_folder(name)}/{after + 1:06d}.json", signing.trusted_here()
    storage.create(path, as_json(signing.stamped(path, model.to_json(), public)))
    committed = _read_accepted(storage, name, after + 1, public)
    assert committed.model is not None
    if committed.model.run != model.run:
        raise BatonError(
            f"run {model.run!r} was judged against model {after} of {name!r}, and meanwhile run "
            f"{committed.model.run!r} was accepted; that model stays.",
            remedy="Retrain again: the model is then judged against the new one.",
        )
    return committed


def _accepted_folder(name: str) -> str:
    return f"models/{name}/accepted"


def _accepted_numbers(storage: Storage, name: str) -> list[int]:
    found = map(_ACCEPTED_FILE.fullmatch, storage.list(_accepted_folder(name)))
    return sorted(int(match[1]) for match in found if match)


def _read_accepted(storage: Storage, name: str, number: int, public: signing.PublicKey | None = None) -> Accepted:
    path = f"{_accepted_folder(name)}/{number:06d}.json"
    return Accepted(number, AcceptedModel.read(_opened(storage, path, public), storage.uri(path)))


def _opened(
    storage: Storage, path: str, public: signing.PublicKey | None, remedy: str = signing.REFUSED
) -> dict[str, Any]:
    where = storage.uri(path)
    try:
        return signing.opened(path, load_object(storage.read(path), where), public)
    except signing.SignatureError as error:
        raise signing.SignatureError(f"{where} is refused: {error.message}", remedy=remedy) from None


def note_retraining(run: Run, note: RetrainNote) -> None:
    """Writes a retraining's note into the run that it trains, before that begins."""
    path = run.path(RetrainNote.NAME)
    run.put(RetrainNote.NAME, signing.stamped(path, note.to_json(), signing.trusted_here()))


def retraining(run: Run) -> RetrainNote:
    """Returns the note of the retraining that trains a run; `SignatureError` as for a model in use."""
    path, remedy = run.path(RetrainNote.NAME), "Find out who wrote it, and retrain again, which replaces it."
    return RetrainNote.read(_opened(run.storage, path, signing.trusted_here(), remedy), run.storage.uri(path))


State = Literal["new", "running", "interrupted", "stopped", "failed", "canceled", "rejected", "succeeded", "gone"]
"""State of a run: `stopped` is a trial that its sweep ended early, `gone` a run whose name alone is known."""


def decide_state(
    *,
    is_running: bool,
    failure: RunFailure | None,
    evaluation: EvaluationResult | None,
    is_exported: bool,
    is_trained: bool,
    until: str,
    has_begun: bool,
    verdict: State | None = None,
) -> State:
    """Returns a run's state, for every command, page and JSON object.

    Args:
        is_running: Whether a live process works on it.
        failure: Its failure; one from before the live process does not count.
        evaluation: Its evaluation, with the gate's verdict.
        is_exported: Whether its model is exported.
        is_trained: Whether its last step is saved.
        until: As `RunInfo.until`.
        has_begun: Whether it has planned its steps.
        verdict: State of a trial that a rung has ended, as `rung_verdicts` has it.
    """
    if failure and not is_running:
        return "canceled" if failure.is_cancelled else "failed"
    if not is_running and evaluation and evaluation.gate and not evaluation.gate.passed:
        return "rejected"
    if {"data": has_begun, "train": is_trained}.get(until):
        return "succeeded"
    if verdict:
        return verdict
    if is_running:
        return "running"
    if is_exported:
        return "succeeded"
    return "interrupted" if has_begun else "new"


@dataclass
class RunNode:
    """A run with its origin; one in another store, or deleted, has only its name."""

    name: str
    created: str = ""
    recipe: str = ""
    parent: str | None = None
    kind: str = ""  # `fork`, `cold fork`, `continues`, `retrained`, or empty for a run without a parent
    at: int | None = None  # step of the parent at which it was forked
    # Changes of a fork: dotted path → value before and after.
    changed: dict[str, list[Any]] = field(default_factory=dict)
    sweep: tuple[str, str] | None = None  # sweep of a trial, and its id there
    values: dict[str, Any] = field(default_factory=dict)
    step: int = 0  # newest checkpoint's, 0 before there is one
    reached: int = 0  # newest step trained, committed or not; of a run that resumes, the checkpoint's until it trains
    num_steps: int | None = None  # None before it has a plan
    skips: int = 0
    state: State = "gone"
    children: list[str] = field(default_factory=list)

    @property
    def words(self) -> str:
        origin = {
            "fork": f"fork at step {self.at}",
            "cold fork": f"cold fork of step {self.at}",
            "continues": "starts from its model",
            "retrained": "took its place",
        }.get(self.kind, "")
        trial = f"trial {self.sweep[1]} of sweep {self.sweep[0]}" if self.sweep else ""
        changed = ((path.rpartition(".")[2], after) for path, (_, after) in self.changed.items())
        own = ", ".join(f"{name} {'none' if after is None else after}" for name, after in changed)
        return "; ".join(part for part in (origin, own, trial) if part)


Family = dict[str, RunNode]  # runs by name


LiveSince = Callable[[Run], float | None]
"""Returns when a live process began to work on a run, in seconds since the epoch; None where none does."""


def family(storage: Storage, live_since: LiveSince = lambda run: None) -> Family:
    """Reads all runs of a store, with parents and children (oldest first)."""
    names = storage.list("runs")
    found = SYSTEM.each(lambda name: _known(Run(storage, name), live_since), names)
    members = {member.name: member for member in found if member}
    for recipe in storage.list("models"):
        accepted = (_read_accepted(storage, recipe, number).model for number in _accepted_numbers(storage, recipe))
        for before, after in pairwise(model.run for model in accepted if model):
            successor = members.get(after)
            if successor and successor.parent is None and before != after:
                successor.parent, successor.kind = before, "retrained"
    _judge_trials(storage, members)
    for member in sorted(members.values(), key=lambda one: (one.created, one.name)):
        if member.parent:
            members.setdefault(member.parent, RunNode(member.parent)).children.append(member.name)
    return members


def read_run(run: Run, live_since: LiveSince = lambda run: None) -> RunNode:
    """Reads one run, without its children; one that is not there yet is `new`."""
    member = _read(run, live_since) or RunNode(run.name, state="new")
    _judge_trials(run.storage, {run.name: member})
    return member


def _judge_trials(storage: Storage, members: Family) -> None:
    """Gives trials that a rung has ended their state."""
    open_trials = {member.sweep: member for member in members.values() if member.sweep and member.state in _OPEN}
    for sweep in sorted({sweep for sweep, _ in open_trials}):
        for trial, state in rung_verdicts(storage, sweep).items():
            if member := open_trials.get((sweep, trial)):
                member.state = state


def rung_verdicts(storage: Storage, sweep: str) -> dict[str, State]:
    """Returns the state of each trial that a rung has ended."""
    ended: dict[str, State] = {}
    try:
        for verdict in Sweep(storage, sweep).rungs():
            for entry in verdict.stopped:
                ended[entry.id] = "failed" if verdict.has_failed(entry) else "stopped"
            for kept in verdict.kept:
                ended.pop(kept, None)
    except BatonError as error:
        logger.warning("rungs of sweep %s cannot be read: %s", sweep, error)
    return ended


def related_runs(run: Run) -> Family:
    """Returns a run with all that share an ancestor with it; in a store of many runs with its ancestors alone."""
    if len(run.storage.list("runs")) <= MOST:
        members = family(run.storage)
        return relatives(members, run.name) if run.name in members else {}
    kin: Family = {}
    name: str | None = run.name
    below: str | None = None
    while name and name not in kin:
        kin[name] = member = _known(Run(run.storage, name), lambda run: None) or RunNode(name)
        member.children = [below] if below else []
        name, below = member.parent, name
    return kin


def relatives(members: Family, name: str) -> Family:
    """Returns a run with all that share an ancestor with it."""
    top = name
    seen = {name}
    while (parent := members[top].parent) and parent not in seen:
        top = parent
        seen.add(top)
    kin: Family = {}
    waiting = [top]
    while waiting:
        one = waiting.pop()
        if one not in kin:
            kin[one] = members[one]
            waiting += members[one].children
    return kin


def walk(members: Family) -> Iterator[tuple[int, RunNode, bool]]:
    """Yields depth, run and whether it is its parent's last, each run below its parent, oldest first."""
    roots = [member for member in members.values() if member.parent is None or member.parent not in members]
    starts = sorted(roots, key=lambda one: (one.created, one.name))
    waiting = [(0, member, index == len(starts) - 1) for index, member in enumerate(starts)][::-1]
    seen: set[str] = set()
    while waiting:
        depth, member, last = waiting.pop()
        if member.name in seen:
            continue
        seen.add(member.name)
        yield depth, member, last
        below = [members[name] for name in member.children if name in members]
        waiting += [(depth + 1, child, index == len(below) - 1) for index, child in enumerate(below)][::-1]


def _known(run: Run, live_since: LiveSince) -> RunNode | None:
    """Reads a run; None where its documents are not Baton's."""
    try:
        return _read(run, live_since)
    except (KeyError, TypeError, ValueError, BatonError) as error:
        logger.warning("%s is passed over: %r", run.uri, error)
        return None


def _read(run: Run, live_since: LiveSince) -> RunNode | None:
    present = set(run.storage.list(run.path()))

    def read(kind: type[D]) -> D | None:
        return run.read(kind) if kind.NAME in present else None

    head, attached, failure = read(documents.RunInfo), read(documents.AttachedRun), read(RunFailure)
    if head:
        created, recipe = head.created, head.recipe_name
    elif attached:
        created, recipe = attached.created, os.path.basename(attached.script.path)
    elif failure:  # before its recipe was written
        created, recipe = failure.at, ""
    else:
        return None
    plan, fork, trial = read(Plan), read(documents.ForkNote), read(TrialInfo)
    progress, since = read(documents.Progress), live_since(run)
    if since is not None and progress:
        restarts = run.restarts() if "restarts" in present else []
        progress = progress if progress.at >= max([iso(since), *(restart.at for restart in restarts)]) else None
    step, finished = _newest(run) if "checkpoints" in present else (0, False)
    member = RunNode(
        run.name,
        created=created,
        recipe=recipe,
        step=step,
        reached=max(step, progress.step if progress else 0),
        num_steps=plan.num_steps if plan else None,
        skips=len(run.skips()) if documents.SKIPS_FOLDER in present else 0,
        sweep=(trial.sweep, trial.id) if trial else None,
        values=trial.values if trial else {},
    )
    member.state = decide_state(
        is_running=since is not None,
        failure=failure,
        evaluation=read(EvaluationResult),
        is_exported=ExportedModel.NAME in present,
        is_trained=finished or bool(member.num_steps and step >= member.num_steps),
        until="train" if trial or not head else head.until,
        has_begun=bool(plan or member.reached),
    )
    if fork:
        member.parent, member.at = fork.parent.rpartition("/runs/")[2], fork.step
        member.kind, member.changed = "fork" if fork.warm else "cold fork", fork.changed
    elif head and (base := (head.base or "")).startswith(runs := f"{run.storage.uri('runs')}/"):
        parent = base.removeprefix(runs).partition("/")[0]
        if parent not in ("", run.name):
            member.parent, member.kind = parent, "continues"
    return member


def _newest(run: Run) -> tuple[int, bool]:
    folder = run.path("checkpoints")
    found = (match for name in run.storage.list(folder) if (match := _STEP.fullmatch(name)))
    for match in sorted(found, key=lambda match: int(match[1]), reverse=True):
        try:  # a folder alone may be an upload on its way, or one that was never committed
            manifest = read_manifest(run.storage, f"{folder}/{match[0]}")
        except DamagedError:
            continue
        except FormatError:  # a newer Baton's
            return int(match[1]), False
        if manifest:
            return int(match[1]), bool(manifest.meta.get("finished"))
    return 0, False
