"""`python -m tools.versions lowest newest --wheel FILE`, as `make test-versions` runs it: does what is declared work?

For each end, the wheel is installed with the lowest, or the newest, versions that it allows, into `build/versions/`,
and then:

- `check`: pip finds no requirement that is not met;
- `unit`: the tests of the trainer, of checkpoints, of the fingerprint and of what recipes compile to;
- `exact`: every method in four chunks, and with LoRA and dropout, against one uninterrupted run, bit for bit, and a
  plain TRL script of sft, dpo and grpo that has the same losses and weights;
- `quickstart`: `baton run` of the quickstart from a folder of its own;
- `across`: a chunk that this environment has trained is resumed in the other one: the proof says `consistent`, never
  `bitwise`, where a library that computes is of another version.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools.versions import environment

UNIT = [
    "tests/train",
    "tests/checkpoint",
    "tests",
    "tests/data",
    "tests/goldens/test_golden.py",
    "tests/compiler",
]
EXACT = ["tests/exactness/test_matrix.py", "tests/exactness/test_plain_trl.py"]
CELLS = "full-plain or lora-dropout or [sft] or [dpo] or [grpo]"
PLACE = environment.ROOT / "build" / "versions"
DATA = {"max_length": 32, "split": {"eval": 0.2}}
RECIPE = {
    "name": "across",
    "model": {
        "from_scratch": {"architecture": "llama", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2},
        "tokenizer": {"train": {"vocab_size": 400}},
    },
    "training": {"method": "sft", "batch_size": 8, "max_steps": 8},
    "chunks": {"count": 2},
    "tracking": {"mlflow": None},
}
QUICKSTART = "from importlib.resources import files; print(files('baton') / 'pipelines/recipes/quickstart.yaml')"


def main() -> int:
    """Runs the parts for each end, and returns 1 where one has failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ends", nargs="+", choices=environment.ENDS)
    parser.add_argument("--wheel", type=Path, required=True)
    parser.add_argument("--python", help="interpreter of another version")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--workers", default="2", help="processes that run tests")
    arguments = parser.parse_args()
    results = []
    for end in arguments.ends:
        name = f"{end}-{Path(arguments.python).name}" if arguments.python else end
        folder = PLACE / name
        folder.parent.mkdir(parents=True, exist_ok=True)
        interpreter = environment.make(end, folder, arguments.wheel.resolve(), arguments.python)
        print(f"\n{name}: " + ", ".join(f"{key} {value}" for key, value in environment.versions(interpreter).items()))
        for part in arguments.only:
            started = time.monotonic()
            passed = PARTS[part](interpreter, arguments.workers)
            results.append((name, part, passed, time.monotonic() - started))
            print(f"== {name} {part}: {'passed' if passed else 'FAILED'}", flush=True)
    for name, part, passed, seconds in results:
        print(f"{name:16} {part:12} {'passed' if passed else 'FAILED'} {seconds:6.0f} s")
    return 0 if all(passed for _, _, passed, _ in results) else 1


def check(interpreter: Path, _: str) -> bool:
    """Asks pip whether each requirement is met."""
    return subprocess.run([interpreter, "-m", "pip", "check"], cwd="/", check=False).returncode == 0


def unit(interpreter: Path, workers: str) -> bool:
    """Runs unit tests."""
    return _pytest(interpreter, workers, *UNIT, "-m", "not slow and not gpu")


def exact(interpreter: Path, workers: str) -> bool:
    """Compares chunks with uninterrupted runs."""
    return _pytest(interpreter, workers, *EXACT, "-m", "not slow", "-k", CELLS)


def quickstart(interpreter: Path, _: str) -> bool:
    """Runs the quickstart, whose last lines name a report and a model."""
    recipe = subprocess.run([interpreter, "-c", QUICKSTART], check=True, stdout=subprocess.PIPE, text=True, cwd="/")
    with tempfile.TemporaryDirectory() as place:
        command = [interpreter.with_name("baton"), "run", recipe.stdout.strip(), "--output", "json"]
        done = subprocess.run(
            command, cwd=place, stdout=subprocess.PIPE, text=True, check=False, env=_environment(place)
        )
        result = json.loads(done.stdout or "{}")
        print({name: result.get(name) for name in ("state", "report_uri", "model_uri")})
        return done.returncode == 0 and all(Path(result[name]).exists() for name in ("report_uri", "model_uri"))


def across(interpreter: Path, _: str) -> bool:
    """Trains the second chunk of a run by another environment than the first, and beside it by the same."""
    here = Path(sys.executable)
    restored = {"same": _second_chunk(here), "other": _second_chunk(interpreter)}
    print(restored)
    differs = environment.computing(here) != environment.computing(interpreter)
    exact = all(
        set(each["checked"].values()) <= {"match", "absent"} and each["step"] == 4 for each in restored.values()
    )
    levels = (restored["same"]["level"], restored["other"]["level"])
    return exact and levels == ("bitwise", "consistent" if differs else "bitwise")


def _second_chunk(interpreter: Path) -> dict[str, Any]:
    """Trains a run of two chunks, the second by an interpreter, and returns what that one says it has restored."""
    with tempfile.TemporaryDirectory() as place:
        rows = [{"prompt": f"What is {i} plus 1?", "completion": f"It is {i + 1}."} for i in range(40)]
        Path(place, "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
        recipe = {**RECIPE, "store": f"{place}/store", "data": {**DATA, "source": f"{place}/rows.jsonl"}}
        Path(place, "recipe.json").write_text(json.dumps(recipe), encoding="utf-8")
        uri = f"{place}/store/runs/across"
        for python, *command in (
            (sys.executable, "data_split", "recipe.json", "across"),
            (sys.executable, "tokenize", uri),
            (sys.executable, "train_chunk", uri, "1"),
            (str(interpreter), "train_chunk", uri, "2"),
        ):
            stage = [python, "-m", "baton.kfp.process", *command]
            subprocess.run(stage, cwd=place, env=_environment(place), check=True, stdout=subprocess.DEVNULL)
        manifest = Path(uri, "checkpoints", "step-00000008", "manifest.json").read_text(encoding="utf-8")
        restored: dict[str, Any] = json.loads(manifest)["meta"]["restored"]
        return restored


def _pytest(interpreter: Path, workers: str, *arguments: str) -> bool:
    command = [interpreter, "-m", "pytest", "-q", "-n", workers, "--dist", "loadfile", "-p", "no:cacheprovider"]
    return subprocess.run([*command, *arguments], cwd=environment.ROOT, check=False).returncode == 0


def _environment(place: str) -> dict[str, str]:
    return {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "BATON_CACHE": f"{place}/cache"}


PARTS: dict[str, Callable[[Path, str], bool]] = {
    "check": check,
    "unit": unit,
    "exact": exact,
    "quickstart": quickstart,
    "across": across,
}

if __name__ == "__main__":
    sys.exit(main())
