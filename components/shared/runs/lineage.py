"""The family of runs in a store: forks, phases, retrainings and trials of sweeps, as each run says of itself.

A run's parent is the one that it forked, else the one whose model it starts from (a later phase, or a retraining that
begins with the model in use), else the one whose model it took the place of.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from baton.components.shared.core.errors import BatonError, DamagedError, FormatError
from baton.components.shared.runs import accepted
from baton.components.shared.runs.documents import skips
from baton.components.shared.runs.documents.attached import Attached
from baton.components.shared.runs.documents.data import RunHead
from baton.components.shared.runs.documents.outcome import Evaluation, ExportedModel, ReportPage
from baton.components.shared.runs.documents.sweeps import TrialNote
from baton.components.shared.runs.documents.training import ForkNote
from baton.components.shared.runs.plan import Plan
from baton.components.shared.runs.run import Run
from baton.components.shared.store import bundles
from baton.components.shared.store.storage import Storage

logger = logging.getLogger("baton")

MOST = 200
"""Runs of a store up to which a report reads all of them to find a run's children."""

_STEP = re.compile(r"step-(\d{8,})")


@dataclass
class Member:
    """A run and what it comes from.

    Attributes:
        name: The run's name; a parent that is in another store or gone has its name alone.
        created: When it began, ISO 8601; empty for one that is gone.
        recipe: Name of its recipe.
        parent: Name of the run it comes from.
        kind: How: `fork`, `cold fork`, `goes on`, `retrained`, or empty for a run without a parent.
        at: Step of the parent at which it was forked.
        changed: What a fork changed: dotted path → value before and after.
        sweep: The sweep that it is a trial of, and its id there.
        values: A trial's own values.
        step: Its newest checkpoint's step, 0 before there is one.
        num_steps: Steps of its plan, None before it has one.
        skips: How many steps its guard has found and skipped.
        state: `new`, `unfinished`, `trained`, `done`, `rejected`, or `gone`.
        children: Names of the runs that come from it, oldest first.
    """

    name: str
    created: str = ""
    recipe: str = ""
    parent: str | None = None
    kind: str = ""
    at: int | None = None
    changed: dict[str, list[Any]] = field(default_factory=dict)
    sweep: tuple[str, str] | None = None
    values: dict[str, Any] = field(default_factory=dict)
    step: int = 0
    num_steps: int | None = None
    skips: int = 0
    state: str = "gone"
    children: list[str] = field(default_factory=list)

    @property
    def words(self) -> str:
        """What it is to its parent, in a few words."""
        origin = {
            "fork": f"fork at step {self.at}",
            "cold fork": f"cold fork of step {self.at}",
            "goes on": "starts from its model",
            "retrained": "took its place",
        }.get(self.kind, "")
        trial = f"trial {self.sweep[1]} of sweep {self.sweep[0]}" if self.sweep else ""
        changed = ((path.rpartition(".")[2], after) for path, (_, after) in self.changed.items())
        own = ", ".join(f"{name} {'none' if after is None else after}" for name, after in changed)
        return "; ".join(part for part in (origin, own, trial) if part)


Family = dict[str, Member]
"""Runs by name."""


def family(storage: Storage) -> Family:
    """Returns all runs of a store with their parents and children."""
    names = storage.list("runs")
    members = {member.name: member for member in bundles.each(lambda name: _known(storage, name), names) if member}
    _add_successors(storage, members)
    for member in sorted(members.values(), key=lambda one: (one.created, one.name)):
        if member.parent:
            members.setdefault(member.parent, Member(member.parent)).children.append(member.name)
    return members


def around(run: Run) -> Family:
    """Returns a run with all who share an ancestor with it; in a store of many runs with its ancestors alone."""
    if len(run.storage.list("runs")) <= MOST:
        members = family(run.storage)
        return relatives(members, run.name) if run.name in members else {}
    kin: Family = {}
    name: str | None = run.name
    below: str | None = None
    while name and name not in kin:
        kin[name] = member = _known(run.storage, name) or Member(name)
        member.children = [below] if below else []
        name, below = member.parent, name
    return kin


def relatives(members: Family, name: str) -> Family:
    """Returns a run with all who share an ancestor with it."""
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


def walk(members: Family) -> Iterator[tuple[int, Member, bool]]:
    """Yields every run below its parent: how deep it lies, the run, and whether it is its parent's last.

    Those that come from no other are first, the oldest of them first.
    """
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


def _known(storage: Storage, name: str) -> Member | None:
    """Returns what is known of a run, None where its documents are not as Baton writes them."""
    try:
        run = Run(storage, name)
        present = set(storage.list(run.path()))
        head = run.read(RunHead) if RunHead.NAME in present else None
        attached = run.read(Attached) if Attached.NAME in present and not head else None
        if head is None and attached is None:
            return None
        plan = run.read(Plan) if Plan.NAME in present else None
        fork = run.read(ForkNote) if ForkNote.NAME in present else None
        trial = run.read(TrialNote) if TrialNote.NAME in present else None
        step, finished = _newest(run) if "checkpoints" in present else (0, False)
        member = Member(
            name,
            created=head.created if head else attached.created if attached else "",
            recipe=head.recipe_name if head else os.path.basename(attached.script.path) if attached else "",
            step=step,
            num_steps=plan.num_steps if plan else None,
            skips=len(run.skips()) if skips.FOLDER in present else 0,
            sweep=(trial.sweep, trial.id) if trial else None,
            values=trial.values if trial else {},
        )
        member.state = _state(member, present, finished=finished)
        if fork:
            member.parent, member.at = fork.parent.rpartition("/runs/")[2], fork.step
            member.kind, member.changed = "fork" if fork.warm else "cold fork", fork.changed
        elif head and (base := _run_of(head.base, storage)):
            member.parent, member.kind = (base, "goes on") if base != name else (None, "")
        return member
    except (KeyError, TypeError, ValueError, BatonError) as error:
        logger.warning("%s is passed over: %r", storage.uri(f"runs/{name}"), error)
        return None


def _newest(run: Run) -> tuple[int, bool]:
    """Returns the step of the newest committed checkpoint, 0 for none, and whether early stopping ended the run."""
    folder = run.path("checkpoints")
    found = (match for name in run.storage.list(folder) if (match := _STEP.fullmatch(name)))
    for match in sorted(found, key=lambda match: int(match[1]), reverse=True):
        try:  # a folder alone may be an upload on its way, or one that was never committed
            manifest = bundles.read_manifest(run.storage, f"{folder}/{match[0]}")
        except DamagedError:
            continue
        except FormatError:  # a newer Baton's
            return int(match[1]), False
        if manifest:
            return int(match[1]), bool(manifest.meta.get("finished"))
    return 0, False


def _state(member: Member, present: set[str], *, finished: bool) -> str:
    if ExportedModel.NAME in present:
        return "done"
    if Evaluation.NAME in present:
        return "rejected" if ReportPage.NAME in present else "trained"
    if finished or (member.num_steps and member.step >= member.num_steps):
        return "trained"
    return "unfinished" if member.step else "new"


def _run_of(uri: str | None, storage: Storage) -> str | None:
    """Returns the run of this store below whose folder an address lies."""
    runs = f"{storage.uri('runs')}/"
    return uri.removeprefix(runs).partition("/")[0] if uri and uri.startswith(runs) else None


def _add_successors(storage: Storage, members: Family) -> None:
    """Gives each run whose model took another's place that one for a parent, where it has none."""
    for recipe in storage.list("models"):
        for before, after in pairwise(accepted.runs(storage, recipe)):
            member = members.get(after)
            if member and member.parent is None and before != after:
                member.parent, member.kind = before, "retrained"
