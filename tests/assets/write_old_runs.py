"""Writes the stores in the folders beside it: runs, a split, a sweep and an export as Baton left them at some time.

    git worktree add ../before 9e57cd5
    .venv/bin/python tests/assets/write_old_runs.py before-rooms ../before [CASE…]

A set for each time: `before-rooms`, before the redesign; `before-formats`, when nothing said yet with which formats it
was made; `formats-1`, when all of them had the number 1; `loss-1`, when micro-batches and evaluation batches counted
alike; `before-house`, before the redesign of November 2026. Where a number is raised, the checkout before it leaves a
set.

It imports nothing of Baton: every stage is a process of the checkout it is given, so that it writes the same files
whatever the code beside it looks like. Stages run in the case's own folder and are given relative addresses (`store`,
`base`, `./rows.jsonl`), which is what the documents then hold; a case can be unpacked anywhere and resumed there.
The two cases that come from the command line hold absolute addresses of the store and of the rows, which are no part
of a run's identity. Each archive holds `expected.json`: how the same recipe ends when nobody interrupts it, and the
fingerprint of the machine where it did.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
COMMITS = {
    "before-rooms": "9e57cd57aa76431c9c12b02ffe4bac46a1f820ce",
    "before-formats": "0bf954e3b91c00c6cef7620d6596ba653eaf0152",
    "formats-1": "4606123681fe1cab420aab000a98bccc4ea9610d",
    "loss-1": "97ef6027a076896c2f91462f59b7fd1c704c328e",
    "before-house": "1230064c427e8fb8983e4800a3fc61bf1d05d5f0",
}
"""Set → the commit that writes it."""
EVENT = "::baton "
"""What a line that tells an event begins with."""

SCRATCH = {
    "from_scratch": {
        "architecture": "llama",
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "config": {"attention_dropout": 0.2},
    },
    "tokenizer": {"train": {"vocab_size": 300}},
}
LOGGED = ("step", "loss", "grad_norm", "eval_loss")
JUDGING = '''"""A reward that completions of an untrained model differ in."""


def variety(completion_ids, **_):
    """Rewards few different tokens."""
    return [len(set(ids)) / 10 + (ids[0] % 7) / 10 for ids in completion_ids]
'''

Document = dict[str, Any]


def recipe(**sections: Any) -> Document:
    """Returns a recipe of 8 steps in 2 chunks; sections are merged one deep."""
    document: Document = {
        "name": "before-rooms",
        "seed": 7,
        "store": "store",
        "model": SCRATCH,
        "data": {"source": "./rows.jsonl", "max_length": 32, "columns": {"text": "story"}, "split": {"eval": 0.2}},
        "training": {"batch_size": 4, "max_steps": 8, "learning_rate": 1e-2, "threads": 1},
        "chunks": {"count": 2},
        "evaluation": {"samples": 1, "max_new_tokens": 4},
        "tracking": {"mlflow": None},
    }
    for name, section in sections.items():
        document[name] = {**document.get(name, {}), **section} if name != "model" else section
    return document


ASKED = {"prompt": "question", "completion": "good"}
PREFERRED = {"prompt": "question", "chosen": "good", "rejected": "story"}
PARALLEL = {"strategy": "ddp", "processes": 2}
GRPO = {"rewards": ["judging:variety"], "num_generations": 2, "max_completion_length": 6, "num_iterations": 3}
RUNS: dict[str, Document] = {
    "full": recipe(training={"method": "pretrain", "micro_batch_size": 2}, evaluation={"every": 3}),
    "lora": recipe(
        model={"base": "base"},
        data={"columns": ASKED},
        adapter={"type": "lora", "r": 4, "alpha": 8, "dropout": 0.3, "target_modules": ["q_proj", "v_proj"]},
        training={"log_every": 3},
    ),
    "ddp": recipe(training={"method": "pretrain", "parallel": PARALLEL}),
    "grpo": recipe(
        data={"columns": {"prompt": "question", "answer": "good"}},
        training={"method": "grpo", "grpo": GRPO},
        hooks={"source": "judging.py"},
    ),
    "sft": recipe(data={"columns": ASKED}, training={"micro_batch_size": 2}, evaluation={"every": 3}),
    "orpo": recipe(
        data={"columns": PREFERRED, "max_length": 64, "split": {"eval": 13}},
        training={"method": "orpo", "micro_batch_size": 2},
        evaluation={"every": 3, "batch_size": 5},
    ),
}
"""Runs that stop behind the first of two chunks; GRPO's fourth step is the first of the second round of three, ORPO's
sixth has three rows in micro-batches of two and one."""
SPLIT = recipe(data={"columns": ASKED, "split": {"eval": 0.25, "test": 0.1}})
EXPORT = recipe(training={"method": "pretrain", "max_steps": 4}, export={"formats": ["safetensors"]})
SWEPT = recipe(
    training={"method": "pretrain"},
    sweep={
        "method": "grid",
        "parameters": {"training.learning_rate": [1e-4, 3e-2, 1e-2]},
        "halving": {"eta": 2},
    },
)


class Checkout:
    """The code that writes.

    Args:
        of: The set that it writes.
        folder: A checkout of its commit.
    """

    def __init__(self, of: str, folder: str) -> None:
        self.assets, self.folder = HERE / of, os.path.abspath(folder)
        self.package = "baton." if os.path.isdir(f"{folder}/baton") else ""
        head = subprocess.run(
            ["git", "-C", self.folder, "rev-parse", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
        if head != COMMITS[of]:
            raise SystemExit(f"{folder} is at {head}; these files are written by {COMMITS[of]}.")

    def run(self, case: Path, module: str, *arguments: Any) -> list[Document]:
        """Runs a module as a process in a case's folder, and returns the events that it told."""
        environment = {
            **os.environ,
            "PYTHONPATH": self.folder,
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
            "BATON_EVENTS": "stdout",
            "BATON_CACHE": str(case.parent / "cache"),
        }
        print(f"{case.name}: {module} {' '.join(map(str, arguments))}", flush=True)
        done = subprocess.run(
            [sys.executable, "-m", f"{self.package}{module}", *map(str, arguments)],
            cwd=case, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise SystemExit(f"{module} ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        lines = (line for line in done.stdout.splitlines() if line.startswith(EVENT))
        return [json.loads(line.removeprefix(EVENT)) for line in lines]

    def prepare(self, case: Path, document: Document, name: str) -> None:
        """Splits and tokenizes a run's rows."""
        (case.parent / "recipe.json").write_text(json.dumps(document), encoding="utf-8")
        self.run(case, "components.data_split", case.parent / "recipe.json", name)
        self.run(case, "components.tokenize", f"store/runs/{name}")


def write_rows(case: Path) -> None:
    """Writes rows with columns for every case."""
    draw = random.Random(0)
    with (case / "rows.jsonl").open("w", encoding="utf-8") as file:
        for at in range(36):
            a, b = draw.randrange(10), draw.randrange(100)
            row = {
                "question": f"What is {a} and {b}?" + " Think." * draw.randrange(3),
                "good": f"the value of {a + b}",
                "story": f"{at} quick brown foxes return {a + b} of the {b} files and jump over {a} lazy dogs",
            }
            file.write(json.dumps(row) + "\n")


def manifest(case: Path, run: str) -> tuple[int, Document]:
    """Returns the newest checkpoint of a run: its step and its manifest."""
    newest = max((case / "store/runs" / run / "checkpoints").glob("step-*/manifest.json"))
    return int(newest.parent.name.removeprefix("step-")), json.loads(newest.read_text(encoding="utf-8"))


def expected(step: int, ended: Document) -> Document:
    """Returns what a test holds a resumed run to."""
    return {"step": step, **{name: ended["meta"][name] for name in ("digest", "state", "fingerprint")}}


def write_run(checkout: Checkout, case: Path) -> Document:
    """Writes a run in the middle, and runs its recipe through beside it."""
    name, document = case.name, RUNS[case.name]
    if "hooks" in document:
        (case / "judging.py").write_text(JUDGING, encoding="utf-8")
    if "base" in document["model"]:
        write_base(checkout, case)
    checkout.prepare(case, document, name)
    checkout.run(case, "components.train_chunk", f"store/runs/{name}", 1)
    checkout.run(case, "components.checkpoint", f"store/runs/{name}", 1)
    whole = case.parent / "whole" / name
    shutil.copytree(case, whole, ignore=shutil.ignore_patterns("store"))
    undivided = copy.deepcopy(document)
    undivided["chunks"]["count"] = 1
    checkout.prepare(whole, undivided, name)
    checkout.run(whole, "components.train_chunk", f"store/runs/{name}", 1)
    return {**expected(*manifest(whole, name)), "log": log(whole, name)}


def log(case: Path, run: str) -> list[Document]:
    """Returns the figures of each step and evaluation of a run that `LOGGED` names."""
    newest = max((case / "store/runs" / run / "checkpoints").glob("step-*/manifest.json")).parent
    (state,) = newest.rglob("trainer_state.json")
    entries = json.loads(state.read_text(encoding="utf-8"))["log_history"]
    return [{name: entry[name] for name in LOGGED if name in entry} for entry in entries]


def write_base(checkout: Checkout, case: Path) -> None:
    """Trains the model that an adapter is for: a run of a step, its checkpoint without what is Baton's."""
    base = case.parent / "for-base"
    base.mkdir()
    write_rows(base)
    document = recipe(training={"method": "pretrain", "max_steps": 1}, chunks={"count": 1})
    checkout.prepare(base, document, "base")
    checkout.run(base, "components.train_chunk", "store/runs/base", 1)
    (case / "base").mkdir()
    for path in (base / "store/runs/base/checkpoints").rglob("*"):
        if path.name in ("model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"):
            shutil.copy(path, case / "base")


def write_split(checkout: Checkout, case: Path) -> Document:
    """Writes a run whose rows are split and not tokenized yet."""
    (case.parent / "recipe.json").write_text(json.dumps(SPLIT), encoding="utf-8")
    checkout.run(case, "components.data_split", case.parent / "recipe.json", "split")
    (found,) = (case / "store/runs/split").glob("split.json")
    document: Document = json.loads(found.read_text(encoding="utf-8"))
    return {name: document[name] for name in ("digest", "rows", "train", "eval", "test")}


def write_sweep(checkout: Checkout, case: Path) -> Document:
    """Writes a sweep of which one rung is judged, and ends a copy of it."""
    (case / "recipe.json").write_text(json.dumps(SWEPT), encoding="utf-8")
    (begun,) = (
        event
        for event in checkout.run(case, "components.sweep", "begin", "recipe.json", "sweep", "store", 1)
        if event["event"] == "prepares"
    )
    for preparation in begun["preparations"]:
        checkout.prepare(case, json.loads(preparation["recipe"]), preparation["run"])
    checkout.run(case, "components.sweep", "enter", "store/sweeps/sweep", 1)
    for trial in ("t000", "t001", "t002"):
        checkout.run(case, "components.train_chunk", f"store/runs/sweep-{trial}", 1)
    checkout.run(case, "components.sweep", "judge", "store/sweeps/sweep", 1)
    whole = case.parent / "whole" / case.name
    shutil.copytree(case, whole)
    checkout.run(whole, "pipelines", "sweep", "run", "recipe.json", "--run", "sweep", "--store", whole / "store")
    winner = json.loads((whole / "store/sweeps/sweep/winner.json").read_text(encoding="utf-8"))
    return {"winner": winner["id"], **expected(*manifest(whole, winner["run"]))}


def write_export(checkout: Checkout, case: Path) -> Document:
    """Writes a run that has come through the whole pipeline."""
    (case / "recipe.json").write_text(json.dumps(EXPORT), encoding="utf-8")
    checkout.run(case, "pipelines", "run", "recipe.json", "--run", "export", "--store", case / "store")
    return expected(*manifest(case, "export"))


WRITERS = {**dict.fromkeys(RUNS, write_run), "split": write_split, "sweep": write_sweep, "export": write_export}
SETS = {
    "before-rooms": ("full", "lora", "ddp", "grpo", "split", "sweep", "export"),
    "before-formats": ("sft", "lora"),
    "formats-1": ("sft", "lora"),
    "loss-1": ("orpo",),
    "before-house": ("full", "lora", "ddp", "grpo", "orpo", "split", "sweep", "export"),
}
"""Set → its cases."""


def pack(case: Path, assets: Path) -> None:
    """Packs a case's folder: the same bytes for the same files."""

    def plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.mtime, entry.uid, entry.gid, entry.uname, entry.gname = 0, 0, 0, "", ""
        entry.mode = 0o755 if entry.isdir() else 0o644
        return entry

    with tarfile.open(assets / f"{case.name}.tar.xz", "w:xz", preset=9) as archive:
        for path in sorted(case.rglob("*")):
            archive.add(path, str(path.relative_to(case)), recursive=False, filter=plain)


def note(name: str, found: Document, assets: Path) -> None:
    """Writes down how a case ends, beside the others."""
    path = assets / "expected.json"
    noted = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    noted[name] = {**found, "processor": processor()}
    path.write_text(json.dumps(noted, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def processor() -> str:
    """Returns a digest of what the processor can do, which the name in a fingerprint does not tell on every cloud."""
    first = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0]
    lines = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in first.splitlines())}
    told = [lines.get(name) for name in ("vendor_id", "cpu family", "model", "flags")]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]


def main() -> None:
    """Writes the cases that are named, or all."""
    checkout, names = Checkout(*sys.argv[1:3]), sys.argv[3:] or SETS[sys.argv[1]]
    checkout.assets.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="old-runs-") as scratch:
        for name in names:
            case = Path(scratch, name, name)
            case.mkdir(parents=True)
            write_rows(case)
            note(name, WRITERS[name](checkout, case), checkout.assets)
            pack(case, checkout.assets)
            print(f"{name}.tar.xz: {(checkout.assets / f'{name}.tar.xz').stat().st_size:,} bytes", flush=True)


if __name__ == "__main__":
    main()
