"""Damage to each object of a real run, and the outcome of one start after it.

    python tests/end_to_end/damage.py RUN FOLDER     starts of a run, requested on standard input, answered on output

A start is `baton run` through the local engine. Its stages run in its process: a fork of one that has imported all.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import hashlib
import importlib
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from baton.runs import objects
from baton.runs.objects import Mend, RunObject
from baton.store.manifest import manifest_name
from tests.exactness.matrix import LORA, PROMPTS, SCRATCH, WRITES
from tests.support import tiny

Content = Mapping[str, bytes]
"""Objects of a store by name."""

_GENERATION = re.compile(r"/manifest(?:-\d+)?\.json$")
_STEP = re.compile(r"step-\d{8}")


def _recipe(**sections: Any) -> dict[str, Any]:
    document: dict[str, Any] = {
        "name": "damaged",
        "seed": 11,
        "model": SCRATCH,
        "data": {"source": "docs.jsonl", "max_length": 32, "max_samples": 45, "split": {"eval": 0.2}},
        "training": {"batch_size": 8, "micro_batch_size": 4, "max_steps": 4, "learning_rate": 1.0e-2, "threads": 1},
        "chunks": {"count": 2, "keep": {"last": 9}},
        "evaluation": {"every": 2, "samples": 2, "max_new_tokens": 8},
        "tracking": {"mlflow": None},
    }
    for name, section in sections.items():
        document[name] = {**document.get(name, {}), **section} if isinstance(section, dict) else section
    return document


RUNS: dict[str, dict[str, Any]] = {
    "lora": _recipe(
        model={"base": "base", "from_scratch": None, "tokenizer": None},
        adapter={**LORA, "dropout": 0.3},
        training={"lr_find": {"start": 1.0e-5, "end": 1.0, "steps": 10}, "guard": {"skip": [1]}},
        evaluation={"gate": {"loss": "<= baseline + 1"}},
        export={"formats": ["adapter", "safetensors"]},
    ),
    "virtual workers": _recipe(training={"parallel": {"virtual_workers": 2}}),
    "grpo": _recipe(
        model={"base": "base", "from_scratch": None, "tokenizer": None},
        data={"source": "rows.jsonl", "columns": PROMPTS, "max_samples": 16},
        training={"method": "grpo", "grpo": WRITES},
    ),
    "sweep": _recipe(
        model={"base": "base", "from_scratch": None, "tokenizer": None},
        adapter=LORA,
        sweep={"method": "grid", "parameters": {"training.learning_rate": [1.0e-2, 1.0e-3]}, "halving": {"eta": 2}},
    ),
    "phases": _recipe(
        phases=[
            {
                "name": "pretrain",
                "training": {"method": "pretrain"},
                "data": {"source": "plays.txt", "packing": True},
            },
            {"name": "sft", "adapter": LORA},
        ],
    ),
}


# Damage


def _flip(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


def _swapped(name: str, whole: Content, older: Content) -> Iterator[tuple[str, bytes]]:
    kind, last = kind_of(name), name.rpartition("/")[2]
    alike = [
        other
        for other in whole
        if other != name and whole[other] != whole[name] and kind_of(other) == kind and role(other) == role(name)
    ]
    if not alike and last.endswith(".json"):  # the only one of its kind: the next document of the same folder
        folder = name.rpartition("/")[0]
        alike = [other for other in whole if other != name and other.rpartition("/")[0] == folder and ".json" in other]
    if alike:
        neighbour = min(alike, key=lambda other: (other < name, other))
        yield name, whole[neighbour]
        yield neighbour, whole[name]


def role(name: str) -> str:
    """Returns an object's name without step, attempt and digest: equal for the same file of two bundles."""
    parts = [re.sub(r"^[0-9a-f]{12,64}$|^files-\d+$", "", part) for part in name.split("/")]
    return re.sub(r"\d+", "", "/".join(parts)) if not name.startswith("data/") else parts[-1].rpartition(".")[2]


def _stale(name: str, whole: Content, older: Content) -> Iterator[tuple[str, bytes]]:
    if name in older and older[name] != whole[name]:
        yield name, older[name]
    elif (step := _STEP.search(name)) and (before := _before(name, step[0], whole)):
        yield name, whole[before]


def _next_generation(name: str, whole: Content, older: Content) -> Iterator[tuple[str, bytes]]:
    if (step := _STEP.search(name)) and name.endswith("/manifest.json") and (before := _before(name, step[0], whole)):
        yield name.replace("manifest.json", manifest_name(2)), whole[before]


def _before(name: str, step: str, whole: Content) -> str | None:
    """Returns the same object of the previous step."""
    return max((other for other in whole if role(other) == role(name) and _STEP.search(other)[0] < step), default=None)  # type: ignore[index]


Change = Callable[[str, Content, Content], Iterator[tuple[str, bytes | None]]]
DAMAGE: dict[str, Change] = {
    "flipped bit": lambda name, whole, _: iter([(name, _flip(whole[name]))] if whole[name] else []),
    "emptied": lambda name, whole, _: iter([(name, b"")] if whole[name] else []),
    "cut": lambda name, whole, _: iter([(name, whole[name][: len(whole[name]) // 2])] if whole[name] else []),
    "deleted": lambda name, whole, _: iter([(name, None)]),
    "swapped": _swapped,
    "older": _stale,
    "older as a new generation": _next_generation,
}


def kind_of(name: str) -> RunObject | None:
    """Returns the kind of an object by its name in the store; that of its bundle for a bundle's file."""
    parts = name.split("/")
    if parts[0] == "runs":
        parts = parts[2:]
    # The longest beginning that is an object: a bundle's files are below its prefix.
    names = ("/".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next((found for each in names if (found := objects.find(each))), None)


def pattern_of(name: str) -> str:
    """Returns the pattern of an object's kind by its name in the store, or that of a sweep's document."""
    kind = kind_of(name)
    return kind.pattern if kind else re.sub(r"/sweep/|\d+", lambda part: "/*/" if part[0][0] == "/" else "*", name)


# A run, and starts of it


def content_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@dataclass(frozen=True)
class Outcome:
    """One start: the run's bits and what it told.

    Attributes:
        bits: Name → digest: of the state at each step, of exported weights, of figures.
        problems: What verification finds afterwards.
        named: Objects of bundles in use.
        error: The error with which it ended, without a remedy.
        remedy: Its remedy.
        broken: A traceback.
    """

    bits: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    named: list[str] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    error: str = ""
    remedy: str = ""
    broken: str = ""


@dataclass(frozen=True)
class Case:
    """A damaged object: changes are contents by name, None for an object that is gone."""

    state: str
    name: str
    damage: str
    changes: Mapping[str, bytes | None]


ALLOWED = {
    Mend.SEAL: ("repaired", "ended", "left"),  # without a key nothing tells a changed value
    Mend.NOTE: ("repaired", "left"),
    Mend.STAGE: ("repaired",),
    Mend.BUNDLE: ("repaired",),
    Mend.CHAIN: ("repaired", "left"),  # of an older one `verify run` tells
    Mend.STEPS: ("repaired", "told"),  # an older checkpoint that nothing needs
}


def number(case: Case) -> int:
    """Returns a number that decides to which part of a table a case belongs: whatever attempts are called."""
    return int(hashlib.sha256(f"{case.state} {role(case.name)} {case.damage}".encode()).hexdigest(), 16)


def fault(case: Case, word: str, outcome: Outcome) -> str | None:
    """Returns how an outcome is none that the kinds of the damaged objects allow, else None."""
    kinds = [found.mend for name in case.changes if (found := kind_of(name))]
    allowed = {each for mend in kinds for each in ALLOWED[mend]}
    if case.name.startswith("sweeps/"):
        allowed |= {"repaired", "left", "ended"}  # the sweep's own documents
    if case.damage == "flipped bit" and _GENERATION.search(case.name):
        allowed |= {"left"}  # a figure that nothing else has, such as a time
    if word in allowed:
        return None
    why = outcome.broken or f"{outcome.error} {outcome.remedy}" if word not in ("told", "left") else outcome.problems
    return f"{case.state} {case.name} {case.damage}: {word}: {why}"


class Subject:
    """A run made once, its content when it was `half` done and `whole`, and a server for starts of it."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder, self.store = name, folder, folder / "store"
        environment = {
            **os.environ,
            "BATON_CACHE": str(folder / "cache"),
            "BATON_FORKSERVER": "0",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(Path(__file__).parents[2]),
        }
        tiny.make_base(folder / "base")
        rows = [{"question": row["prompt"], "good": row["chosen"]} for row in tiny.PAIRS]
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        docs = [{"prompt": f"{row['prompt']} {n}", "completion": row["chosen"]} for n in range(9) for row in tiny.PAIRS]
        (folder / "docs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in docs), encoding="utf-8")
        lines = [f"the {n} quick foxes jump over {n * n} lazy dogs" for n in range(300)]
        (folder / "plays.txt").write_text("\n".join(lines), encoding="utf-8")
        self._server = subprocess.Popen(
            [sys.executable, "-P", __file__, name, str(folder)],  # -m has frames without a file, slow for kfp
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.first = self.start()
        assert self.first.bits, self.first
        self.whole = content_of(self.store)
        self.half = content_of(folder / "half")

    def start(self) -> Outcome:
        """Runs it, again where it was."""
        assert self._server.stdin
        assert self._server.stdout
        self._server.stdin.write("start\n")
        self._server.stdin.flush()
        return Outcome(**json.loads(self._server.stdout.readline()))

    def close(self) -> None:
        assert self._server.stdin
        self._server.stdin.close()
        self._server.wait()

    def put(self, content: Content, changes: Mapping[str, bytes | None]) -> None:
        """Gives the store a content, with changes; None removes an object."""
        shutil.rmtree(self.store)
        for name, data in {**content, **changes}.items():
            if data is not None:
                path = self.store / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)

    def cases(self) -> Iterator[Case]:
        """Yields every damage to every object of the half and the whole run."""
        older = {"half": {}, "whole": self.half}
        for state, content in (("half", self.half), ("whole", self.whole)):
            for name in content:
                for damage, change in DAMAGE.items():
                    if changes := dict(change(name, content, older[state])):
                        yield Case(state, name, damage, changes)

    def after(self, case: Case) -> tuple[str, Outcome]:
        """Starts the damaged run, and returns what that came to in a word, and in all."""
        changes = case.changes
        self.put(getattr(self, case.state), changes)
        outcome = self.start()
        if outcome.broken:
            return "TRACEBACK", outcome
        if outcome.error:
            if not outcome.remedy:
                return "NO REMEDY", outcome
            return ("SECOND START" if re.search(r"[Rr]un again", outcome.remedy) else "ended"), outcome
        if outcome.bits != self.first.bits:
            return "OTHER BITS", outcome
        now = content_of(self.store)
        left = [name for name, data in changes.items() if now.get(name) == data != self.whole.get(name)]
        # Files of an attempt that no manifest names any more are never read.
        is_used = [name for name in left if name in outcome.named or not (kind := kind_of(name)) or not kind.is_bundle]
        return "told" if outcome.problems else "left" if is_used else "repaired", outcome


# The server


_folder = Path(sys.argv[-1])
failures: list[BaseException | None] = []
"""Errors of stages in this process."""
HANGS = 600
"""Seconds after which a start ends with its threads' frames; most take three, a sweep's a minute."""
CAUSE = "cause.json"
"""The last error of a stage in a process of its own."""


def _in_process(full_command: list[str], env_vars: dict[str, str] | None = None) -> int:
    """Runs a stage here, in place of kfp's runner of processes."""
    from baton.kfp import executor
    from baton.kfp.component import RUNTIME

    _, _, module, *arguments = full_command
    argv, environment = sys.argv, dict(os.environ)
    for name in [name for name in sys.modules if name.startswith("baton.components.")]:
        del sys.modules[name]  # declared to the compiler; a stage has the plain functions
    sys.argv = [module, *arguments]
    os.environ.update(env_vars or {}, **{RUNTIME: "true"})
    try:
        executor.main()
    except SystemExit as error:
        failures.append(error.__cause__)
        return error.code if isinstance(error.code, int) else 1
    except Exception:
        traceback.print_exc()
        return 1
    finally:
        sys.argv = argv
        os.environ.clear()
        os.environ.update(environment)
        if arguments[0] == "train_chunk":
            _keep_half()
    return 0


class _Forked(subprocess.Popen[Any]):
    """A process whose `python -m` is a fork of this one."""

    def _execute_child(self, args: Any, *rest: Any) -> None:
        if list(args[:2]) != [sys.executable, "-m"]:
            super()._execute_child(args, *rest)  # type: ignore[misc]
            return
        environment, pipes = rest[5], rest[9:15]
        self.pid = os.fork()
        if self.pid == 0:
            for mine, theirs in enumerate((pipes[0], pipes[3], pipes[5])):
                if theirs != -1:  # inherited
                    os.dup2(theirs, mine)
            for theirs in {*pipes} - {-1}:  # one that writes to itself never sees its input's end
                os.close(theirs)
            os.setpgid(0, 0)
            os._exit(_run_module(list(args[2:]), environment))
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def _run_module(words: list[str], environment: Mapping[str, str]) -> int:
    sys.argv = words
    os.environ.clear()
    os.environ.update(environment)
    code = 1
    try:
        runpy.run_module(words[0], run_name="__main__")
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
        if error.__cause__:
            (_folder / CAUSE).write_text(json.dumps({**vars(error.__cause__), "broken": traceback.format_exc()}))
    except BaseException:
        traceback.print_exc()
    if "train_chunk" in words:
        _keep_half()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def _keep_half() -> None:
    if not (_folder / "half").exists():
        shutil.copytree(_folder / "store", _folder / "half")


def _start(name: str, folder: Path) -> Outcome:
    from baton import api
    from baton.errors import BatonError
    from baton.events import Event
    from baton.local import results
    from baton.local.sweep import run_sweep

    told: list[str] = []

    def heard(event: Event) -> None:
        if type(event).__name__ in ("StageRepaired", "Warned", "Skipped"):
            told.append(f"{type(event).__name__} {vars(event)}")

    (folder / CAUSE).unlink(missing_ok=True)
    store, log = str(folder / "store"), folder / f"cache/logs/{name.replace(' ', '-')}.log"
    with contextlib.suppress(FileNotFoundError):
        log.unlink()
    run_name = name.replace(" ", "-")
    os.chdir(folder)  # paths of a recipe without a file start here
    try:
        if "sweep" in RUNS[name]:
            recipe = api.load(RUNS[name], store=store).localised()
            result = results.result(run_sweep(recipe, run_name, heard))
        else:
            result = api.run(RUNS[name], run_name, store=store, on_event=heard)
    except BatonError as error:
        printed = log.read_text(encoding="utf-8") if log.exists() else ""
        cause = vars(failures[-1] if failures else error)
        if not failures and (folder / CAUSE).exists():
            cause = json.loads((folder / CAUSE).read_text(encoding="utf-8"))
        broken = printed[printed.index("Traceback (most") :][:6000] if "Traceback (most" in printed else ""
        message, remedy = cause.get("message", str(error)), cause.get("remedy") or ""
        return Outcome(error=message, remedy=remedy, told=told, broken=broken)
    except Exception:
        return Outcome(told=told, broken=traceback.format_exc())
    problems, named = _verified(store)
    return Outcome(bits=_bits(store, result), problems=problems, named=named, told=told)


def _storage(uri: str) -> Any:
    from baton.store.storage import Storage

    return Storage(uri)


def _bits(store: str, result: Mapping[str, Any]) -> dict[str, str]:
    """Returns digests of all that a run comes to, without names and times of attempts."""
    from baton.checkpoint.store import CheckpointStore
    from baton.runs.run import Run
    from baton.store.manifest import usable_manifest

    storage = _storage(store)
    found = {key: json.dumps(result[key], sort_keys=True) for key in ("state", "steps", "evaluation", "metrics")}
    found["gate"] = json.dumps(result["gate"], sort_keys=True)
    for name in storage.list("runs"):
        run = Run(storage, name)
        checkpoints = CheckpointStore(run)
        if (newest := next(checkpoints.whole(), None)) is None:
            continue  # a sweep's rows and tokens
        found[f"{name} {newest.step}"] = newest.digest
        weights = [file for file in newest.manifest.files if file.endswith((".safetensors", "optimizer.pt"))]
        found |= {f"{name} {newest.step} {file}": newest.manifest.files[file]["sha256"] for file in weights}
        for export in [each for each in storage.list(run.path()) if each.startswith("export") and "." not in each]:
            for prefix in [export] if export != "exports" else [f"exports/{x}" for x in storage.list(run.path(export))]:
                if manifest := usable_manifest(storage, run.path(prefix)):
                    files = {file: each["sha256"] for file, each in manifest.files.items() if "tensors" in file}
                    found |= {f"{name} {prefix} {file}": digest for file, digest in files.items()}
    return found


def _verified(store: str) -> tuple[list[str], list[str]]:
    """Returns what verification finds, without a key, and the objects that manifests name, these included."""
    from baton.local import results
    from baton.runs.run import Run
    from baton.store import bundle
    from baton.store.manifest import newest_usable

    storage, problems, named = _storage(store), [], []
    for name in storage.list("runs"):
        problems += [line for row in results.verify_checkpoints(Run(storage, name)) for line in row["problems"]]
    for prefix in sorted({name.rpartition("/")[0] for name in storage.find("") if _GENERATION.search(name)}):
        manifest, generation = newest_usable(storage, prefix)
        if manifest:
            named += [
                f"{prefix}/{manifest_name(generation)}",
                *(manifest.path(prefix, file) for file in manifest.files),
            ]
            problems += bundle.verify(storage, prefix, manifest)
    return problems, named


def _serve(name: str, folder: Path) -> None:
    requests, output = os.fdopen(os.dup(0)), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    import torch
    from kfp.local import subprocess_task_handler as handler

    from baton import api  # noqa: F401
    from baton.compiler.pipeline_file import packaged
    from baton.data import quality
    from baton.local import engine  # noqa: F401
    from baton.pages import run_page
    from baton.recipe import load

    for module in ("train.attempt", "train.methods.sft", "train.methods.grpo", "data.tokenize", "data.split"):
        importlib.import_module(f"baton.{module}")
    for module in ("evaluate.evaluate", "evaluate.gate", "export.export", "pages.run_page", "kfp.executor"):
        importlib.import_module(f"baton.{module}")
    importlib.import_module("kfp.dsl.executor")
    torch.set_num_threads(1)
    handler.run_local_subprocess = _in_process
    subprocess.Popen = _Forked  # type: ignore[misc]
    os.chdir(folder)
    with packaged(load.loads(json.dumps(RUNS[name])), "warm"):
        quality._classifier()
    run_page.environment().get_template("run_page.html.j2")
    gc.collect()
    gc.freeze()
    for _ in requests:
        answer = folder / "answer.json"
        if (child := os.fork()) == 0:
            with open(folder / "output.log", "wb", buffering=0) as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
                faulthandler.dump_traceback_later(HANGS, exit=True)
                try:
                    outcome = _start(name, folder)
                except BaseException:
                    outcome = Outcome(broken=traceback.format_exc())
            answer.write_text(json.dumps(vars(outcome)))
            os._exit(0)
        os.waitpid(child, 0)
        if not answer.exists():
            printed = (folder / "output.log").read_text(encoding="utf-8", errors="replace")
            answer.write_text(json.dumps(vars(Outcome(broken=f"ended without an answer: {printed[-9000:]}"))))
        os.write(output, answer.read_bytes() + b"\n")
        answer.unlink()


if __name__ == "__main__":
    _serve(sys.argv[1], Path(sys.argv[2]))
