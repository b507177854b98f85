"""Proof of checkpoints: the checkpoint stage, which runs during the next chunk, and verification of a signed run.

The stage reads a chunk's checkpoint back, applies retention, and writes the resume proof. `Verification` works offline,
with only the public key, and finds every change: each manifest must be signed byte for byte, name exactly the files
that are there, name the very parent that is there, and match the run's sources. The store alone cannot show that newest
checkpoints were removed: for that, the caller gives a step and its manifest's digest as written down elsewhere.
"""

import re
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NotRequired, TypedDict

from baton import events
from baton.checkpoint import retention, seals
from baton.checkpoint.sharded import code_in
from baton.checkpoint.signatures import changed_sources, manifest_digest, signature_problem, sources_of
from baton.checkpoint.store import Checkpoint, CheckpointStore
from baton.errors import BatonError, DamagedError
from baton.recipe.run import Keep
from baton.runs import documents
from baton.runs.documents import (
    CheckpointRef,
    ChunkAttempt,
    ChunkRecord,
    Promoted,
    ProofPart,
)
from baton.runs.objects import CHECKPOINT, JUDGE
from baton.runs.outcomes import TrialInfo, TrialScore
from baton.runs.run import Run, now, state_identity
from baton.signing import PublicKey
from baton.store import bundle
from baton.store.manifest import DAMAGED, REMOVED, Manifest, parsed, read_manifest

FIGURES = frozenset(ChunkAttempt.model_fields)


def proof_part(store: CheckpointStore, checkpoint: Checkpoint) -> ProofPart:
    """Returns a checkpoint's part of the proof: its parent, comparisons and machine."""
    meta = checkpoint.meta
    return ProofPart(
        step=checkpoint.step,
        digest=meta.digest,
        parent_step=meta.parent.step if meta.parent else None,
        parent_digest=meta.parent.digest if meta.parent else None,
        chain=meta.chain,
        level=meta.restored.level,
        checked=meta.restored.checked,
        restored_step=meta.restored.step,
        skipped=meta.restored.skipped,
        hooks=meta.hooks,
        uri=store.uri(checkpoint),
        bytes=checkpoint.bytes,
        fingerprint=meta.fingerprint,
        seconds=meta.seconds,
        moved=meta.moved,
        work=meta.work,
        forked_from=meta.forked_from,
    )


def differing(store: CheckpointStore, checkpoint: Checkpoint) -> list[str]:
    """Returns what a checkpoint's manifest states otherwise than its part of the proof, if that was written."""
    part, own = store.run.read(ProofPart, checkpoint.meta.chunk), proof_part(store, checkpoint)
    if part is None or part.uri != own.uri:
        return []
    fields = ("step", "digest", "parent_step", "parent_digest", "chain")
    names = [name for name in fields if getattr(part, name) != getattr(own, name)]
    return [f"its {name} is not what {ProofPart.file_name(checkpoint.meta.chunk)} has" for name in names]


def prove(
    store: CheckpointStore,
    checkpoint: Checkpoint,
    index: int,
    attempts: Sequence[ChunkRecord],
    *,
    keep: Keep,
    targets: Sequence[int],
) -> ProofPart:
    """Reads a chunk's checkpoint back, else `RewritableDamageError`; applies retention and writes the proof."""
    started = time.time()
    store.require_whole(checkpoint, store.verify(checkpoint))
    verify_seconds = time.time() - started
    # Before retention, which keeps the newest checkpoint read back and knows it by this mark.
    _mark(store, checkpoint)
    removed = retention.tidy(store, keep, targets=targets)
    # Costs of each attempt, without the proof's other fields.
    figures = [{name: value for name, value in each.to_json().items() if name in FIGURES} for each in attempts]
    part = proof_part(store, checkpoint).model_copy(
        update={
            "chunk": index,
            "attempts": [ChunkAttempt.model_validate(each) for each in figures],
            "verified": True,
            "verified_at": now(),
            "verify_seconds": verify_seconds,
            "removed": retention.summary(removed),
        }
    )
    # Last: once the proof is written, these bytes need no second reading, and retention may take them. A
    # crash before this line repeats the stage.
    store.run.write(part, index)
    events.emit(events.Verified(step=checkpoint.step, bytes=checkpoint.bytes, digest=checkpoint.digest))
    return part


def _mark(store: CheckpointStore, checkpoint: Checkpoint) -> None:
    """Records the newest checkpoint and the one with the lowest evaluation loss."""
    run = store.run
    before = run.read(Promoted)
    # A newer one that is gone, or was never there, does not count.
    if before and any(found.step == before.newest.step for found in store.committed(after=checkpoint.step)):
        return
    losses = store.evaluation_losses(checkpoint)
    measured = (found for found in store.committed() if found.step in losses)
    best = min(measured, key=lambda found: (losses[found.step], found.step), default=None)
    promoted = Promoted(newest=CheckpointRef(step=checkpoint.step, uri=store.uri(checkpoint)))
    if best is not None:
        place = CheckpointRef(step=best.step, uri=store.uri(best), eval_loss=losses[best.step])
        promoted = promoted.model_copy(update={"best": place})
    run.write(promoted)


def read_back(run_uri: str, index: int) -> str:
    """Verifies a chunk's checkpoint, see `promote`, and returns its part of the proof in Markdown."""
    run = Run.open(run_uri)
    try:
        return proof_as_markdown(promote(run, index))
    except DamagedError as error:
        # After the last chunk only: a later one passes over the damaged checkpoint and trains its steps again.
        if index >= run.plan().slots(run.recipe().chunks.spare):
            raise
        run.warn(f"{error} A later chunk makes up for it.")
        return f"# Chunk {index}: not proven\n\n{error}\n\nA later chunk makes up for it.\n"


@seals.sealed(CHECKPOINT)
def promote(run: Run, index: int) -> ProofPart | None:
    """Verifies a chunk's checkpoint, which is before the target after a preemption, and returns its part of the proof.

    None for a chunk preempted before its first checkpoint, and for one before the step at which a fork began.
    `DamagedError` if the store does not hold the commit.
    """
    started = time.time()
    plan, recipe = run.plan(), run.recipe()
    store, target = CheckpointStore.of(run, recipe), plan.target(index)
    attempts = run.attempts(index)
    part = _gone_since(store, index, target, is_last=index >= plan.slots(recipe.chunks.spare))
    if part is None and target >= run.began():
        checkpoint = _left_by(store, target, attempts[-1] if attempts else ChunkAttempt())
        if checkpoint:
            part = prove(store, checkpoint, index, attempts, keep=recipe.chunks.keep, targets=plan.targets)
    run.record(f"checkpoint-{index:03d}", {"seconds": time.time() - started, "chunk": index})
    return part


def has_ended(run: Run, chunk: int) -> bool:
    """Tells whether a sweep's trial has ended a chunk: with a score, and a checkpoint that was checked and is there.

    Damage in either, or in what the check has written, makes the chunk begin again, which repairs it.
    """
    try:
        with seals.stage(run, JUDGE, appends=False) as ledger:
            steps = {score.chunk: score.step for score in run.read_all(TrialScore, "scores")}
            last = max(steps, default=0)
            is_checked = run.read(ProofPart, chunk) is not None
            is_lost = not is_checked and ledger.expected(ProofPart.file_name(chunk)) is not None
            if chunk > last or is_lost or (chunk == last and not (is_checked and run.read(Promoted))):
                return False
    except DamagedError:
        return False
    newest = next(CheckpointStore(run).whole(), None)
    return newest is not None and newest.step >= steps.get(chunk, 0)


def _gone_since(store: CheckpointStore, index: int, target: int, *, is_last: bool) -> ProofPart | None:
    """Returns an earlier run's part of the proof if the checkpoint has gone since.

    Retention has taken it, or it is lost while Kubeflow's cache skips the chunk; a later chunk makes up for it.
    """
    before = store.run.read(ProofPart, index)
    if before is None or before.step != target or store.read(target) is not None:
        return None
    later = any(store.committed(after=target))
    if not later and not is_last:
        store.run.warn(f"{store.storage.uri(store.prefix(target))} is no longer there; a later chunk makes up for it.")
    return before if later or not is_last else None


def _left_by(store: CheckpointStore, target: int, attempt: ChunkAttempt) -> Checkpoint | None:
    checkpoint = store.read(attempt.to_step if attempt.outcome in ("partial", "finished") else target)
    if checkpoint is None and attempt.outcome == "already_done":
        # Early stopping ended the run before the target, or a trial that caught up has only a later checkpoint.
        reached = store.read(attempt.to_step)
        checkpoint = reached if reached and (reached.meta.finished or store.run.read(TrialInfo)) else None
    if checkpoint is not None:
        return checkpoint
    if attempt.outcome != "partial":
        raise DamagedError(f"{store.storage.uri(store.prefix(target))}: the chunk left no checkpoint there.")
    # The next chunk may have passed it and let retention take it. None: preempted before the first checkpoint.
    return store.newest()


def proof_as_markdown(part: ProofPart | None) -> str:
    """Returns a chunk's part of the proof in Markdown."""
    if part is None:
        return (
            "# Resume proof\n\nThis chunk left no checkpoint: it was preempted before the first, and the "
            "next resumes, or the run is a fork that began after it.\n"
        )
    parent = f"step {part.parent_step}, `{part.parent_digest}`" if part.parent_digest else "the start model"
    if fork := part.forked_from:
        parent = f"`{fork.run_uri}` at step {fork.step}, whose fork this run is"
    work = part.work
    facts = [
        f"own digest: `{part.digest}`",
        f"continues: {parent}",
        f"chain: `{part.chain}`",
        f"level: **{part.level}**",
        f"read back and verified: {part.bytes:,} bytes in {part.verify_seconds or 0.0:.1f} s, at `{part.uri}`",
        f"goodput since the run began: {work.goodput:.0%} of the time went into steps that are kept",
        f"work lost to preemption so far: {work.lost_steps} steps, about {work.lost_seconds:.0f} s",
        f"processes that were lost and started again in their pod so far: {work.restarts}",
    ]
    if part.hooks:
        facts += [f"state of `{name}` is carried, `{digest}`" for name, digest in part.hooks.carried.items()]
        facts += [f"**state of `{name}` is not carried**: {why}" for name, why in part.hooks.lost.items()]
    phases = [
        phase for phase in documents.PHASES_OF_A_CHUNK if any(phase in attempt.seconds for attempt in part.attempts)
    ]
    rows = [
        (
            f"{attempt.from_step} → {attempt.to_step}",
            attempt.outcome,
            *(f"{attempt.seconds.get(phase, 0.0):.1f}" for phase in phases),
            f"{attempt.bytes_received / 1e6:.1f}",
            f"{attempt.bytes_sent / 1e6:.1f}",
            f"{(attempt.peak_bytes or 0) / 1e6:.0f}",
        )
        for attempt in part.attempts
    ]
    sections = [
        f"# Resume proof, chunk {part.chunk}: step {part.step}",
        "\n".join(f"- {fact}" for fact in facts),
        *(f"> **Passed over:** {reason}" for reason in part.skipped),
        _table(["restored in this chunk", "compared before the first step"], (part.checked or {}).items()),
        _table(["steps", "outcome", *(f"{phase}, s" for phase in phases), "MB in", "MB out", "peak MB"], rows),
        _table(["fingerprint", ""], part.fingerprint.to_json().items()),
        _table(
            ["step removed by retention", "because", "bytes"],
            [(entry.step, entry.reason, f"{entry.bytes:,}") for entry in part.removed],
        ),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _table(head: list[str], rows: Iterable[Iterable[object]]) -> str:
    lines = ["| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in rows]
    if not lines:
        return ""
    return "\n".join(["| " + " | ".join(head) + " |", "|" + "---|" * len(head), *lines])


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
        problems = list(self._of_run(here, head))
        notes = list(self._notes(head, is_unchanged=not problems))
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
            return "its manifest has changed since it was signed"
        stated = manifest.meta.get("run"), manifest.meta.get("step")
        if stated != (self._run.name, number):
            return f"its manifest belongs to step {stated[1]} of run {stated[0]!r}"
        return None

    def _chain(self, objects: SignedStep) -> Iterator[str]:
        """Yields what does not fit the parent checkpoint."""
        parent = objects.current.meta.parent if objects.current else None
        before = self._steps.get(parent.step) if parent else None
        if parent is None or before is None:
            return
        is_going = any(mark.startswith(REMOVED) for mark in before.marks)
        if before.manifests and parent.manifest not in map(manifest_digest, before.manifests):
            yield f"continues another checkpoint of step {parent.step} than this store's"
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
            # Sealed sources are compared with the seals: see `chain`.
            for name in [] if newest.meta.seal else changed_sources(self._run, newest.meta.sources):
                yield f"{name}: not what step {head} was signed with"
            if self._run.raw(documents.AttachedRun.NAME):
                identity = sources_of(self._run).recipe
            else:
                identity = state_identity(self._run, self._run.resolved_recipe(), self._run.plan())
            for number, objects in sorted(here.items()):
                if objects.current and objects.current.meta.identity != identity:
                    yield f"recipe, data, model, code or plan are not those that step {number} was made from"
            if tokens := self._run.read(documents.TokenizedRows):
                manifest = read_manifest(self._storage, tokens.prefix)
                problems = bundle.verify(self._storage, tokens.prefix, manifest) if manifest else ["they are gone"]
                yield from (f"tokens: {problem}" for problem in problems)
        except (BatonError, ValueError) as error:
            yield str(error)

    def _notes(self, head: int, *, is_unchanged: bool) -> Iterator[str]:
        newest = self._steps[head].current if head else None
        if newest is None or newest.meta.sources is None:
            return
        try:
            if is_unchanged and sources_of(self._run).recipe != newest.meta.sources.recipe:
                yield f"recipe.json has changed since step {head} was signed, in settings that change no bits"
        except BatonError:
            return
        if (parent := newest.meta.parent) and parent.step not in self._steps and not newest.meta.forked_from:
            yield f"step {parent.step}, which step {head} continues, is not here: retention may have removed it"

    def _unexpected(
        self, rows: dict[int, StepReport], head: int, step: int | None, digest: str | None
    ) -> Iterator[str]:
        """Yields how the store differs from the expected step and digest."""
        if step is not None and head < step:
            yield f"the newest is step {head}, and step {step} was expected: rolled back, or its end is missing"
        elif digest is not None:
            wanted = head if step is None else step
            known = {row.get("manifest") for row in rows.values() if row["step"] == wanted}
            for objects in self._steps.values():
                parent = objects.current.meta.parent if objects.current else None
                if parent and parent.step == wanted:
                    known.add(parent.manifest)
            if digest not in known:
                yield f"step {wanted} does not have the expected manifest, {digest}"


def _row(number: int, objects: SignedStep) -> StepReport:
    row: StepReport = {"step": number, "ok": not objects.problems, "problems": objects.problems}
    if objects.manifests:
        row["manifest"] = manifest_digest(objects.manifests[-1])
        row["digest"] = str(objects.manifests[-1].meta.get("digest"))
    return row
