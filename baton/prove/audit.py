"""`baton verify replay`: a chunk of another run, trained again here, and compared with the run's own record.

It trains in a store of its own, from the checkpoint at the chunk's start. The run's own store is not written.
"""

import contextlib
import json
import math
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, TypedDict

from baton.checkpoint.sharded import code_in
from baton.checkpoint.store import Checkpoint, CheckpointStore
from baton.errors import BatonError, DamagedError, UserError
from baton.events import Event
from baton.kfp import processes
from baton.local import forkserver
from baton.pages import html
from baton.pages.html import count
from baton.recipe import load
from baton.recipe.recipe import Recipe
from baton.runs import objects
from baton.runs.documents import ORIGINS, ForkNote, LearningRate, MicroBatchSize, OwnCode, RunInfo, TokenizedRows
from baton.runs.run import Run, identity, now
from baton.runs.versions import Fingerprint
from baton.scratch import scratch_folder
from baton.signing import SIGNED_BY, PublicKey
from baton.store.manifest import Manifest, read_manifest
from baton.store.storage import Storage

TIMED = ("_runtime", "_per_second", "step_time")
"""Ends of values' names that depend on the clock."""
HISTORY = "trainer_state.json"
MAX_TOLD = 100
"""Differing values to list one by one, those that differ most first."""


class Value(TypedDict):
    """A tensor, or another value, that differs: in how many of its numbers, and by how much at most."""

    file: str
    name: str
    what: str
    count: int
    of: int
    max_abs: float | None


class LoggedDifference(TypedDict):
    """The first logged value that differs."""

    step: int
    name: str
    expected: float | str | None
    found: float | str | None


@dataclass
class Comparison:
    """Numbers of compared files, tensors in them, numbers in these and logged values; and the differences."""

    files: int = 0
    tensors: int = 0
    numbers: int = 0
    logged: int = 0
    differing: list[Value] = field(default_factory=list)
    """Those that differ most first."""
    first: LoggedDifference | None = None
    first_loss: LoggedDifference | None = None

    @property
    def is_equal(self) -> bool:
        return not self.differing and self.first is None


def compare(expected: str, found: str, after: int) -> Comparison:
    """Compares the files of two checkpoints in local folders, and the values logged after a step.

    Raises:
        DamagedError: a pickle in one of them holds code.
    """
    for folder in (expected, found):
        if problems := code_in(folder):
            raise DamagedError(f"{folder}: {'; '.join(problems)}.")
    result = Comparison()
    names = {
        os.path.relpath(os.path.join(parent, name), folder)
        for folder in (expected, found)
        for parent, _, files in os.walk(folder)
        for name in files
    }
    for name in sorted(names):
        result.files += 1
        paths = os.path.join(expected, name), os.path.join(found, name)
        absent = [path for path in paths if not os.path.isfile(path)]
        if absent:
            where = "in the run's checkpoint" if absent[0] == paths[0] else "in the one trained again"
            result.differing.append(_value(name, "", f"the file is not {where}"))
        elif name == HISTORY:
            _compare_history(*paths, after, result)
        else:
            _compare_file(name, *paths, result)
    result.differing.sort(key=lambda value: -(value["max_abs"] if value["max_abs"] is not None else math.inf))
    return result


def _compare_file(name: str, expected: str, found: str, result: Comparison) -> None:
    if name.endswith(".safetensors"):
        from safetensors.torch import load_file

        _compare_leaves(name, load_file(expected), load_file(found), result)
    elif name.endswith((".pt", ".pth", ".bin")) and os.sep not in name:
        _compare_leaves(name, _pickled(expected), _pickled(found), result)
    elif Path(expected).read_bytes() != Path(found).read_bytes():
        result.differing.append(_value(name, "", "the file's bytes differ"))


def _compare_leaves(name: str, expected: Mapping[str, Any], found: Mapping[str, Any], result: Comparison) -> None:
    import torch

    for key in sorted(expected.keys() | found.keys()):
        if key.endswith(TIMED):
            continue
        if key not in expected or key not in found:
            where = "trained again" if key not in found else "run's checkpoint"
            result.differing.append(_value(name, key, f"not in the {where}"))
            continue
        ours, theirs = expected[key], found[key]
        if isinstance(ours, torch.Tensor):
            result.tensors += 1
            result.numbers += ours.numel()
        if difference := _differs(name, key, ours, theirs):
            result.differing.append(difference)


def _differs(file: str, name: str, ours: Any, theirs: Any) -> Value | None:
    import torch

    if not (isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor)):
        return None if repr(ours) == repr(theirs) else _value(file, name, f"{_short(ours)} → {_short(theirs)}")
    kinds = (ours.dtype, tuple(ours.shape)), (theirs.dtype, tuple(theirs.shape))
    if kinds[0] != kinds[1]:
        return _value(file, name, f"{kinds[0][0]} {kinds[0][1]} → {kinds[1][0]} {kinds[1][1]}", of=ours.numel())
    flat = [tensor.detach().cpu().contiguous().flatten() for tensor in (ours, theirs)]
    # By their bits: NaN equals itself, and −0 is not 0.
    bits = [tensor.view(torch.uint8) for tensor in flat]
    if torch.equal(*bits):
        return None
    unlike = (bits[0] != bits[1]).view(-1, flat[0].element_size()).any(dim=1)
    gap = (flat[0].double() - flat[1].double()).abs()[unlike]
    finite = gap[gap.isfinite()]
    return {
        "file": file,
        "name": name,
        "what": str(ours.dtype).removeprefix("torch."),
        "count": int(unlike.sum()),
        "of": ours.numel(),
        "max_abs": float(finite.max()) if len(finite) == len(gap) else None,
    }


def _compare_history(expected: str, found: str, after: int, result: Comparison) -> None:
    ours, theirs = (_logged(path, after) for path in (expected, found))
    result.logged = sum(len(entry) - 1 for entry in ours)
    for mine, other in zip(ours, theirs, strict=False):
        for name in sorted(mine.keys() | other.keys(), key=lambda name: (name != "step", name != "loss", name)):
            if repr(mine.get(name)) == repr(other.get(name)):
                continue
            step = int(min(mine["step"], other["step"]))
            entry: LoggedDifference = {"step": step, "name": name, "expected": mine.get(name), "found": other.get(name)}
            result.first = result.first or entry
            result.first_loss = result.first_loss or (entry if name == "loss" else None)
    if len(ours) != len(theirs) and result.first is None:
        longer = max(ours, theirs, key=len)
        step = int(longer[min(len(ours), len(theirs))]["step"])
        result.first = {"step": step, "name": "number of entries", "expected": len(ours), "found": len(theirs)}


def _logged(path: str, after: int) -> list[dict[str, float]]:
    with open(path, encoding="utf-8") as file:
        history = json.load(file)["log_history"]
    return [
        {name: value for name, value in entry.items() if not name.endswith(TIMED)}
        for entry in history
        if entry["step"] > after
    ]


def _pickled(path: str) -> dict[str, Any]:
    """Returns the values of a pickle by their paths in it; `code_in` has looked through it."""
    import torch
    from transformers.trainer_pt_utils import safe_globals

    with safe_globals():
        return dict(_leaves(torch.load(path, weights_only=True, map_location="cpu"), ""))


def _leaves(node: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(node, Mapping) and node:
        for key, value in node.items():
            yield from _leaves(value, f"{path}.{key}".lstrip("."))
    # A list of numbers alone, such as a generator's state, is one value.
    elif isinstance(node, list | tuple) and not all(isinstance(value, int | float) for value in node):
        for number, value in enumerate(node):
            yield from _leaves(value, f"{path}.{number}".lstrip("."))
    else:
        yield path, node


def _value(file: str, name: str, what: str, of: int = 1) -> Value:
    return {"file": file, "name": name, "what": what, "count": of, "of": of, "max_abs": None}


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


@dataclass(frozen=True)
class ChunkSpan:
    """A chunk of the run, from one checkpoint, or the run's start, to another."""

    index: int
    start: int
    before: Checkpoint | None
    after: Checkpoint


def chunk_span(store: CheckpointStore, index: int) -> ChunkSpan:
    """Returns a chunk of a run, by its number from 1; raises `UserError` if it or its checkpoints are gone."""
    plan = store.run.plan()
    if not 1 <= index <= len(plan.targets):
        raise UserError(f"chunk {index} does not exist; run {store.run.name!r} has {len(plan.targets)}.")
    start = max(plan.target(index - 1) if index > 1 else 0, store.run.began())
    if plan.target(index) <= start:
        raise UserError(f"chunk {index} ends before step {start}, at which the fork {store.run.name!r} begins.")
    target = plan.target(index)
    # Early stopping may have ended the run before.
    finished = (each for each in store.committed() if each.meta.finished and each.step < target)
    after = store.read(target) or next(finished, None)
    if after is None:
        raise _gone(store, index, target, "it ended on")
    if after.step <= start:
        ended = f"early stopping ended the run at step {after.step}"
        raise UserError(f"chunk {index} of run {store.run.name!r} was not trained: {ended}.")
    before = store.read(start) if start else None
    if start and before is None:
        raise _gone(store, index, start, "it began with")
    return ChunkSpan(index, start, before, after)


def _gone(store: CheckpointStore, index: int, step: int, which: str) -> UserError:
    steps, began = store.committed_steps(), store.run.began()
    spans = enumerate(pairwise([began, *store.run.plan().targets]), 1)
    rest = [str(number) for number, (start, end) in spans if start in (0, *steps) and end in steps and start < end]
    told = f"Chunks with both checkpoints: {', '.join(rest)}." if rest else "No chunk has both of its checkpoints."
    return UserError(
        f"chunk {index} of run {store.run.name!r} cannot be audited: the checkpoint that {which}, of step {step}, is "
        f"gone; steps {', '.join(map(str, steps)) or '(none)'} are here.",
        remedy=f"{told} Retention removes them unless the recipe sets chunks.keep.audit: true. "
        f"{f'Add --chunk {rest[0]}, or train' if rest else 'Train'} the run again with that setting.",
    )


UNSIGNED = {SIGNED_BY: None}
"""Checkpoints trained here are unsigned, and ask for no signature."""


class ChunkReplay:
    """A run in a store of its own, below a local folder, ready to train one chunk of another."""

    def __init__(
        self, store: CheckpointStore, chunk: ChunkSpan, folder: str, on_event: Callable[[Event], None]
    ) -> None:
        self._theirs, self._chunk = store, chunk
        self._run = Run(Storage(folder), store.run.name)
        self._on_event = on_event

    def make_data(self, recipe: Recipe) -> list[str]:
        """Splits and tokenizes the rows of the auditor's recipe, and returns the parts that differ from the run's.

        Raises:
            UserError: the run was trained by another recipe.
            BatonError: a process failed, with its message.
        """
        theirs = self._theirs.run
        if changed := load.changed_paths(identity(theirs.recipe()), identity(recipe)):
            raise UserError(
                f"run {theirs.name!r} was trained by another recipe: {'; '.join(changed)}.",
                remedy="Give the recipe that it was trained by, or none to use the run's own.",
            )
        # Begun on the same day, which a chat template may write.
        self._run.put(RunInfo.NAME, theirs.require(RunInfo.NAME) | {"recipe": self._plain(recipe)})
        with processes.environment(**UNSIGNED):
            recipe = load.validate(self._plain(recipe), origin=recipe.name)
            processes.prepare(recipe, self._run.name, self._on_event, forkserver.launcher())
        same = {
            "rows": theirs.require("data.json") == self._run.require("data.json"),
            "tokens": _tokens(theirs) == _tokens(self._run),
            "base model": theirs.raw("model.json") == self._run.raw("model.json"),
            "plan": theirs.require("plan.json") == self._run.require("plan.json"),
        }
        return [name for name, is_same in same.items() if not is_same]

    def copy_data(self) -> None:
        """Copies the rows, as tokens, from the run's store, every byte compared with its digest there."""
        theirs = self._theirs.run
        self._run.put(RunInfo.NAME, theirs.require(RunInfo.NAME) | {"recipe": self._plain(theirs.recipe())})
        for name in (*objects.CARRIED, "plan.json"):
            if document := theirs.raw(name):
                self._run.put(name, document)
        tokens, code = theirs.need(TokenizedRows), theirs.read(OwnCode)
        for prefix in (tokens.prefix, *([code.prefix] if code else [])):
            self._copy_bundle(prefix)

    def train(self) -> Checkpoint:
        """Trains the chunk and returns its last checkpoint; raises the `BatonError` of a process that failed."""
        # Facts that the chunk also reads: skipped steps, a fork's beginning, and what earlier stages found out on their
        # machine. Rows read again leave none of them: with a rate or a batch size of this machine no chunk is the same.
        theirs = self._theirs.run
        names = [name for name in theirs.storage.find(theirs.path()) if name.startswith(("skips/", "start/"))]
        for name in (*names, LearningRate.NAME, MicroBatchSize.NAME, ForkNote.NAME, ORIGINS):
            with contextlib.suppress(FileNotFoundError):
                self._run.storage.write(self._run.path(name), theirs.storage.read(theirs.path(name)))
        if self._chunk.before:
            self._copy_bundle(self._theirs.prefix(self._chunk.start))
        with processes.environment(**UNSIGNED):
            processes.train_chunk(self._run.uri, self._chunk.index, self._on_event, forkserver.launcher())
            reached = CheckpointStore(self._run).newest()
        if reached is None or reached.step <= self._chunk.start:
            raise BatonError(f"chunk {self._chunk.index} left no checkpoint when it was trained again.")
        return reached

    def folder(self, checkpoint: Checkpoint) -> str:
        return self._run.storage.key(checkpoint.manifest.path(CheckpointStore(self._run).prefix(checkpoint.step)))

    def _plain(self, recipe: Recipe) -> dict[str, object]:
        """Returns a recipe without tracking, signatures and checkpoints, on which no bit depends."""
        document = recipe.model_dump(mode="json")
        document["store"] = {"uri": str(self._run.storage.key(""))}
        document["tracking"] = {"mlflow": None}
        document["chunks"] |= {
            "signing": None,
            "checkpoint_every": None,
            "checkpoints_per_epoch": None,
            "exactness": "consistent",
        }
        return document

    def _copy_bundle(self, prefix: str) -> None:
        storage = self._theirs.storage
        manifest = read_manifest(storage, prefix)
        if manifest is None:
            raise BatonError(f"{storage.uri(prefix)} is missing: no chunk can be trained again without it.")
        target = Path(self._run.storage.key(prefix))
        fetch_read_only(storage, prefix, manifest, str(target / manifest.folder))
        (target / "manifest.json").write_text(manifest.as_written())


def fetch_read_only(storage: Storage, prefix: str, manifest: Manifest, folder: str) -> str:
    """Downloads a bundle as `bundle.fetch` does, but marks nothing in the store; returns the folder."""
    for name, entry in sorted(manifest.files.items()):
        local = os.path.join(folder, name)
        os.makedirs(os.path.dirname(local), exist_ok=True)
        try:
            digest = storage.download(manifest.path(prefix, name), local, entry["size"])
        except FileNotFoundError:
            digest = "missing"
        if digest != entry["sha256"]:
            raise DamagedError(
                f"{storage.uri(manifest.path(prefix, name))} has changed since its commit: its SHA-256 is {digest}, "
                f"committed was {entry['sha256']}."
            )
    return folder


def _tokens(run: Run) -> object:
    """Returns content and order of the files of tokenized rows, whatever their names."""
    manifest = read_manifest(run.storage, run.need(TokenizedRows).prefix)
    if manifest is None:
        return None
    digests = {name: entry["sha256"] for name, entry in manifest.files.items()}
    listed = {side: [digests[name] for name, _ in files] for side, files in manifest.meta["files"].items()}
    return listed, {name: digest for name, digest in digests.items() if name.startswith("tokenizer/")}


class Audit(TypedDict):
    """Result of an audit.

    `expected` is the run's state, `found` that trained here; `claims` are the parts of the state with another digest in
    the run's manifest, `data` the parts of the data that came out otherwise, and `differences` the entries of the
    fingerprint in which this machine is not the run's.
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
    first_difference: LoggedDifference | None
    first_loss: LoggedDifference | None
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
    """Trains a chunk of a run, which is only read, again in a store of its own, and compares all results.

    With the auditor's `recipe`, its paths absolute, rows are read and tokenized again; without one the run's own recipe
    and tokens are used. `key` must have signed the checkpoints.

    Raises:
        UserError: the recipe is another, or a checkpoint is gone.
        DamagedError: a checkpoint is damaged.
        BatonError: a process failed, with its message.
    """
    began, created = time.monotonic(), now()
    store = CheckpointStore(run, key)
    chunk = chunk_span(store, index)

    def result(comparison: Comparison, again: Checkpoint | None, data: list[str]) -> Audit:
        theirs = chunk.after.meta
        ours = again.meta.fingerprint if again else Fingerprint()
        found = again.meta.state if again else {}
        # The state may be the same and the digest in its manifest wrong.
        claims = [part for part, digest in found.items() if theirs.state.get(part) != digest]
        return {
            "run": run.name,
            "run_uri": run.uri,
            "recipe": run.recipe().name,
            "chunk": chunk.index,
            "start": chunk.start,
            "end": chunk.after.step,
            "created": created,
            "equal": bool(again and again.step == chunk.after.step and comparison.is_equal and not claims),
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

    with scratch_folder("audit") as scratch:
        replay = ChunkReplay(store, chunk, f"{scratch}/store", on_event)
        if recipe is None:
            replay.copy_data()
        elif differing := replay.make_data(recipe):
            return result(Comparison(), None, differing)
        again = replay.train()
        prefix = store.prefix(chunk.after.step)
        theirs = fetch_read_only(store.storage, prefix, chunk.after.manifest, f"{scratch}/theirs")
        return result(compare(theirs, replay.folder(again), chunk.start), again, [])


def _verdict(
    chunk: ChunkSpan, comparison: Comparison, claims: list[str], data: list[str], again: Checkpoint | None
) -> str:
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
    return f"equal: {name} gives the same bits when it is trained again"


def render_page(audit: Audit) -> str:
    """Returns the page as one HTML document, which loads nothing."""
    return (
        html.environment(Path(__file__).parent)
        .get_template("audit.html.j2")
        .render(
            audit=audit,
            tone="good" if audit["equal"] else "bad",
            proven=proven(audit),
            meaning=meaning(audit),
            first=first_differences(audit),
            parts=[(name, audit["found"].get(name), digest) for name, digest in sorted(audit["expected"].items())],
            took=html.duration(audit["seconds"]),
        )
    )


def proven(audit: Audit) -> list[str]:
    """Returns what the audit has shown, and what it has not."""
    if audit["data"]:
        return ["The chunk was not trained again: its rows would differ from the run's."]
    rows = (
        "The rows, read and tokenized again from the auditor's recipe and data, are the run's."
        if audit["rows"] == "recipe"
        else "The rows are the tokens in the run's own store; whether they match the recipe was not checked."
    )
    begin = (
        f"It began with the run's checkpoint of step {audit['start']:,}, itself not audited."
        if audit["start"]
        else "It began at the run's start, with the base model that the recipe names."
    )
    compared = (
        f"Compared bit for bit: {count(audit['losses'], 'logged value')}, {count(audit['tensors'], 'tensor')} with "
        f"{count(audit['numbers'], 'number')} in {count(audit['files'], 'file')}, weights and optimizer among them."
    )
    signed = (
        f"The checkpoints at its start and end are signed by the key {audit['signed_by']}."
        if audit["signed_by"]
        else "Signatures of the checkpoints were not checked (--key)."
    )
    return [begin, rows, compared, signed]


def meaning(audit: Audit) -> list[str]:
    """Returns what a difference can mean here."""
    if audit["equal"]:
        return []
    if audit["data"]:
        lines = ["The data at hand, or a library that turns rows into tokens, has changed since the run began."]
        return [*lines, "Or the run was not trained on the data of its recipe."]
    if audit["differences"]:
        return [
            "This machine is not the run's in what bits depend on (below). Sums that are rounded otherwise give other "
            "last digits, which grow from step to step: such a difference alone proves nothing against the run.",
            "Audit it on the machine and image that its fingerprint names to tell the two apart.",
        ]
    return [
        "This machine has the run's fingerprint, so the same chunk gives the same bits here. So the chunk was trained "
        "with other rows, settings or code than the run records, or its checkpoint was changed.",
        "A setting that is wrong from the start shows in the loss after the first step that it changes. A wrong row "
        "shows in its step. A changed checkpoint shows in its tensors and in no loss.",
        "A device that computes wrongly gives the same picture: audit once more, on another one.",
    ]


def first_differences(audit: Audit) -> list[list[tuple[str, str]]]:
    """Returns the first logged value that differs, and the first loss, as lines with a name and a value."""
    entries = [audit["first_difference"], audit["first_loss"]]
    return [
        [
            ("Step", f"{entry['step']:,}"),
            ("Value", entry["name"]),
            ("In the run", repr(entry["expected"])),
            ("Trained again", repr(entry["found"])),
        ]
        for number, entry in enumerate(entries)
        if entry is not None and entry not in entries[:number]
    ]
