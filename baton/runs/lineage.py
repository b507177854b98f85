"""The family of runs in a store, and the models that were accepted under a recipe's name.

A run's parent is the run it forked, else the source of its weights, else the run it replaced.
models/<name>/accepted/000001.json, 000002.json, …: put-if-absent, and the highest is the model in use. A new model
takes the number after its rival's, so one of several writers succeeds.
"""

import logging
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeVar

from baton.documents import NamedDocument
from baton.errors import BatonError, DamagedError, FormatError
from baton.runs import documents
from baton.runs.outcomes import AcceptedModel, EvaluationResult, ExportedModel, ReportPage, RunFailure, TrialInfo
from baton.runs.plan import Plan
from baton.runs.run import Run, Sweep, as_json
from baton.runtime import SYSTEM
from baton.store.manifest import read_manifest
from baton.store.storage import Storage

logger = logging.getLogger("baton")
D = TypeVar("D", bound=NamedDocument)

MOST = 200  # runs of a store up to which a report reads all of them to find a run's children
_OPEN = ("new", "unfinished")
_STEP = re.compile(r"step-(\d{8,})")
_ACCEPTED_FILE = re.compile(r"(\d{6})\.json")


@dataclass(frozen=True)
class Accepted:
    """The newest accepted model; number 0 and None before there is one."""

    number: int = 0
    model: AcceptedModel | None = None

    @property
    def model_uri(self) -> str | None:
        return self.model.model_uri if self.model else None


def newest_accepted(storage: Storage, name: str) -> Accepted:
    """Returns the model in use."""
    numbers = _accepted_numbers(storage, name)
    return _read_accepted(storage, name, max(numbers)) if numbers else Accepted()


def accept(storage: Storage, name: str, after: int, model: AcceptedModel) -> Accepted:
    """Accepts a model in place of its rival, number `after`, 0 for none; BatonError if another run's came first."""
    # The result does not tell whose model is there: the answer to a put may be lost, and a retried stage has written it
    # before. So it is read back.
    storage.create(f"{_accepted_folder(name)}/{after + 1:06d}.json", as_json(model.to_json()))
    committed = _read_accepted(storage, name, after + 1)
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


def _read_accepted(storage: Storage, name: str, number: int) -> Accepted:
    path = f"{_accepted_folder(name)}/{number:06d}.json"
    return Accepted(number, AcceptedModel.read(storage.read(path), storage.uri(path)))


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
    reached: int = 0  # newest step trained, committed or not
    num_steps: int | None = None  # None before it has a plan
    skips: int = 0
    state: str = "gone"  # `new`, `unfinished`, `stopped`, `failed`, `trained`, `done`, `rejected`, or `gone`
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


def family(storage: Storage) -> Family:
    """Reads all runs of a store, with parents and children (oldest first)."""
    names = storage.list("runs")
    members = {member.name: member for member in SYSTEM.each(lambda name: _known(storage, name), names) if member}
    for recipe in storage.list("models"):
        accepted = (_read_accepted(storage, recipe, number).model for number in _accepted_numbers(storage, recipe))
        for before, after in pairwise(model.run for model in accepted if model):
            successor = members.get(after)
            if successor and successor.parent is None and before != after:
                successor.parent, successor.kind = before, "retrained"
    _mark_stopped(storage, members)
    for member in sorted(members.values(), key=lambda one: (one.created, one.name)):
        if member.parent:
            members.setdefault(member.parent, RunNode(member.parent)).children.append(member.name)
    return members


def _mark_stopped(storage: Storage, members: Family) -> None:
    """Gives trials that a rung has stopped their state."""
    open_trials = {member.sweep: member for member in members.values() if member.sweep and member.state in _OPEN}
    for sweep in sorted({sweep for sweep, _ in open_trials}):
        try:
            verdicts = Sweep(storage, sweep).rungs()
        except BatonError as error:
            logger.warning("rungs of sweep %s cannot be read: %s", sweep, error)
            continue
        stopped: set[str] = set()
        for verdict in verdicts:
            stopped = stopped.union(entry.id for entry in verdict.stopped).difference(verdict.kept)
        for trial in stopped:
            if member := open_trials.get((sweep, trial)):
                member.state = "stopped"


def related_runs(run: Run) -> Family:
    """Returns a run with all that share an ancestor with it; in a store of many runs with its ancestors alone."""
    if len(run.storage.list("runs")) <= MOST:
        members = family(run.storage)
        return relatives(members, run.name) if run.name in members else {}
    kin: Family = {}
    name: str | None = run.name
    below: str | None = None
    while name and name not in kin:
        kin[name] = member = _known(run.storage, name) or RunNode(name)
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


def _known(storage: Storage, name: str) -> RunNode | None:
    """Reads a run; None where its documents are not Baton's."""
    try:
        run = Run(storage, name)
        present = set(storage.list(run.path()))

        def read(kind: type[D]) -> D | None:
            return run.read(kind) if kind.NAME in present else None

        head, attached = read(documents.RunInfo), read(documents.AttachedRun)
        failure = read(RunFailure)
        if head:
            created, recipe = head.created, head.recipe_name
        elif attached:
            created, recipe = attached.created, os.path.basename(attached.script.path)
        elif failure:  # before its recipe was written
            created, recipe = failure.at, ""
        else:
            return None
        plan, fork, trial = read(Plan), read(documents.ForkNote), read(TrialInfo)
        progress = read(documents.Progress)
        step, finished = _newest(run) if "checkpoints" in present else (0, False)
        member = RunNode(
            name,
            created=created,
            recipe=recipe,
            step=step,
            reached=max(step, progress.step if progress else 0),
            num_steps=plan.num_steps if plan else None,
            skips=len(run.skips()) if documents.SKIPS_FOLDER in present else 0,
            sweep=(trial.sweep, trial.id) if trial else None,
            values=trial.values if trial else {},
        )
        member.state = _state(member, present, finished=finished)
        if fork:
            member.parent, member.at = fork.parent.rpartition("/runs/")[2], fork.step
            member.kind, member.changed = "fork" if fork.warm else "cold fork", fork.changed
        elif head and (base := (head.base or "")).startswith(runs := f"{storage.uri('runs')}/"):
            parent = base.removeprefix(runs).partition("/")[0]
            if parent not in ("", name):
                member.parent, member.kind = parent, "continues"
        return member
    except (KeyError, TypeError, ValueError, BatonError) as error:
        logger.warning("%s is passed over: %r", storage.uri(f"runs/{name}"), error)
        return None


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


def _state(member: RunNode, present: set[str], *, finished: bool) -> str:
    if ExportedModel.NAME in present:
        return "done"
    if EvaluationResult.NAME in present:
        return "rejected" if ReportPage.NAME in present else "trained"
    if RunFailure.NAME in present:
        return "failed"
    if finished or (member.num_steps and member.step >= member.num_steps):
        return "trained"
    return "unfinished" if member.reached else "new"
