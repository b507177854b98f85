"""Verification of a signed run offline, with only the public key: finds every change to its checkpoints.

Each manifest must be signed byte for byte, name exactly the files that are there, name the very parent that is there,
and match the run's sources. The store alone cannot show that newest checkpoints were removed: for that, the caller
gives a step and its manifest's digest as written down elsewhere.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NotRequired, TypedDict

from baton.checkpoint.sharded import code_in
from baton.checkpoint.signatures import changed_sources, manifest_digest, signature_problem, sources_of
from baton.checkpoint.store import Checkpoint, CheckpointStore
from baton.errors import BatonError
from baton.runs.documents import AttachedRun, TokenizedRows
from baton.runs.run import state_identity
from baton.signing import PublicKey
from baton.store import bundle
from baton.store.manifest import DAMAGED, REMOVED, Manifest, parsed, read_manifest

_OBJECT = re.compile(r"step-(\d{8,})/(?:manifest(?:-([1-9]\d*))?\.json|(?:([^/]+)/)?(.+))")


class StepReport(TypedDict):
    """A verified checkpoint; `manifest` is the SHA-256 by which the next one names it."""

    step: int
    ok: bool
    problems: list[str]
    digest: NotRequired[str]
    manifest: NotRequired[str]


class SignatureReport(TypedDict):
    """A row for each step, the newest as `head`, problems of the run as a whole, and notes."""

    ok: bool
    checkpoints: list[StepReport]
    head: StepReport | None
    problems: list[str]
    notes: list[str]


@dataclass
class SignedStep:
    """The objects of a step: manifests by generation, marks, and each attempt's files."""

    generations: dict[int, str] = field(default_factory=dict)
    marks: set[str] = field(default_factory=set)
    attempts: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    manifests: list[Manifest] = field(default_factory=list)
    current: Checkpoint | None = None
    problems: list[str] = field(default_factory=list)

    @property
    def is_hidden(self) -> bool:
        """Whether the newest manifest is marked as being removed."""
        return bool(self.manifests) and f"{REMOVED}{self.manifests[-1].folder}" in self.marks


class Verification:
    def __init__(self, store: CheckpointStore, public: PublicKey) -> None:
        self._store, self._run, self._storage = store, store.run, store.storage
        self._public = public
        self._steps = self._listed()

    def verdict(self, step: int | None = None, digest: str | None = None) -> SignatureReport:
        """Reads everything back; expects at least a step, and the SHA-256 of its manifest, by default of the newest."""
        for number, objects in sorted(self._steps.items()):
            self._read(number, objects)
        here = {number: each for number, each in self._steps.items() if each.manifests and not each.is_hidden}
        for objects in self._steps.values():
            objects.problems += self._chain(objects)
        head = max(here, default=0)
        problems, notes = list(self._of_run(here, head)), list(self._notes(head))
        # Steps that were never committed are not reported: nothing can restore them.
        told = {number: each for number, each in sorted(self._steps.items()) if each.generations or each.problems}
        rows = {number: _row(number, each) for number, each in told.items()}
        problems += self._unexpected(rows, head, step, digest)
        return {
            "ok": not problems and all(row["ok"] for row in rows.values()),
            "checkpoints": list(rows.values()),
            "head": rows.get(head),
            "problems": problems,
            "notes": notes,
        }

    def _listed(self) -> dict[int, SignedStep]:
        steps: dict[int, SignedStep] = defaultdict(SignedStep)
        base = self._run.path("checkpoints")
        for name in self._storage.find(base):
            if (match := _OBJECT.fullmatch(name)) is None:
                continue
            objects = steps[int(match[1])]
            if match[4] is None:
                objects.generations[int(match[2] or 1)] = f"{base}/{name}"
            elif match[3] is None:
                objects.marks.add(match[4])
            else:
                objects.attempts[match[3]].add(match[4])
        return dict(steps)

    def _read(self, number: int, objects: SignedStep) -> None:
        """Reads all manifests of a step back, and the newest one's files."""
        for generation, path in sorted(objects.generations.items()):
            try:
                data = self._storage.read(path)
                manifest = parsed(data, self._storage.uri(path))
                if problem := self._of_manifest(number, manifest, data):
                    objects.problems.append(f"manifest {generation}: {problem}" if generation > 1 else problem)
                objects.manifests.append(manifest)
            except (BatonError, FileNotFoundError) as error:
                objects.problems.append(str(error))
        if objects.is_hidden or not objects.manifests:
            return
        manifest = objects.manifests[-1]
        if f"{DAMAGED}{manifest.folder}" in objects.marks:
            objects.problems.append("it was found damaged before")
        if objects.problems:
            return
        objects.problems += bundle.verify(self._storage, self._store.prefix(number), manifest)
        strange = sorted(objects.attempts[manifest.folder] - manifest.files.keys())
        objects.problems += [f"{name}: not in the manifest" for name in strange]
        if objects.problems:
            return
        try:
            objects.current = self._store.as_checkpoint(number, manifest)
            if self._storage.is_local:
                objects.problems += code_in(self._storage.key(manifest.path(self._store.prefix(number))))
            else:
                objects.problems += self._store.code(objects.current)
        except BatonError as error:
            objects.problems.append(str(error))

    def _of_manifest(self, number: int, manifest: Manifest, data: bytes) -> str | None:
        if problem := signature_problem(manifest, self._public):
            return problem
        if data != manifest.as_written().encode():
            return "its manifest is not written as it was signed"
        stated = manifest.meta.get("run"), manifest.meta.get("step")
        if stated != (self._run.name, number):
            return f"its manifest is that of step {stated[1]} of run {stated[0]!r}"
        return None

    def _chain(self, objects: SignedStep) -> Iterator[str]:
        """Yields what does not fit the parent checkpoint."""
        parent = objects.current.meta.parent if objects.current else None
        before = self._steps.get(parent.step) if parent else None
        if parent is None or before is None:
            return
        is_going = any(mark.startswith(REMOVED) for mark in before.marks)
        if before.manifests and parent.manifest not in map(manifest_digest, before.manifests):
            yield f"continues another checkpoint of step {parent.step} than the one that is here"
        elif before.attempts and not before.generations and not is_going:
            yield f"continues step {parent.step}, whose files are here and whose manifest is gone"

    def _of_run(self, here: dict[int, SignedStep], head: int) -> Iterator[str]:
        """Yields problems of the run as a whole: missing newest steps, changed sources."""
        hidden = [number for number, objects in self._steps.items() if objects.is_hidden and number > head]
        if hidden:
            yield f"step {max(hidden)} is marked as being removed, and nothing newer is here"
        newest = here[head].current if head else None
        try:
            if (reached := self._run.verified_step()) > head:
                yield f"step {reached} was read back once, and the newest here is step {head}"
            if newest is None:
                return
            for name in changed_sources(self._run, newest.meta.sources):
                yield f"{name}: not what step {head} was signed with"
            if self._run.raw(AttachedRun.NAME):
                identity = sources_of(self._run).recipe
            else:
                identity = state_identity(self._run, self._run.resolved_recipe(), self._run.plan())
            for number, objects in sorted(here.items()):
                if objects.current and objects.current.meta.identity != identity:
                    yield f"recipe, data, model, code or plan are not those that step {number} was made from"
            if tokens := self._run.read(TokenizedRows):
                manifest = read_manifest(self._storage, tokens.prefix)
                problems = bundle.verify(self._storage, tokens.prefix, manifest) if manifest else ["they are gone"]
                yield from (f"tokens: {problem}" for problem in problems)
        except (BatonError, ValueError) as error:
            yield str(error)

    def _notes(self, head: int) -> Iterator[str]:
        newest = self._steps[head].current if head else None
        if newest is None or newest.meta.sources is None:
            return
        try:
            if sources_of(self._run).recipe != newest.meta.sources.recipe:
                yield f"recipe.json has changed since step {head} was signed, in settings that change no bits"
        except BatonError:
            return
        if (parent := newest.meta.parent) and parent.step not in self._steps and not newest.meta.forked_from:
            yield f"step {parent.step}, which step {head} continues, is not here: retention takes what is not kept"

    def _unexpected(
        self, rows: dict[int, StepReport], head: int, step: int | None, digest: str | None
    ) -> Iterator[str]:
        """Yields how the store differs from the expected step and digest."""
        if step is not None and head < step:
            yield f"the newest is step {head}, and step {step} was expected: rolled back, or its end is gone"
        elif digest is not None:
            wanted = head if step is None else step
            known = {row.get("manifest") for row in rows.values() if row["step"] == wanted}
            for objects in self._steps.values():
                parent = objects.current.meta.parent if objects.current else None
                if parent and parent.step == wanted:
                    known.add(parent.manifest)
            if digest not in known:
                yield f"step {wanted} has not the manifest that was expected, {digest}"


def _row(number: int, objects: SignedStep) -> StepReport:
    row: StepReport = {"step": number, "ok": not objects.problems, "problems": objects.problems}
    if objects.manifests:
        row["manifest"] = manifest_digest(objects.manifests[-1])
        row["digest"] = str(objects.manifests[-1].meta.get("digest"))
    return row
