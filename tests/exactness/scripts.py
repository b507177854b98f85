"""TRL's own training scripts with the three lines added by which they train in chunks, each chunk a process of its own.

`python scripts.py LEGS.json` runs legs one after the other, each in a process forked from this one, which has imported
what they import and done nothing else; `FRESH` legs have an interpreter of their own.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

LINE = "    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)\n"
"""What every script of TRL's trains by."""
ADDED = """\
    import baton
    chunk = baton.attach(trainer, {run_uri!r}, target={target!r})
    chunk.train(leave_out={leave_out!r})
"""
COMMON: dict[str, Any] = {
    "max_steps": 8,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "learning_rate": 5e-3,
    "lr_scheduler_type": "linear",
    "optim": "adamw_torch",
    "logging_steps": 3,
    "report_to": "none",
    "bf16": False,
    "gradient_checkpointing": False,
    "disable_tqdm": True,
    "dtype": "float32",
    "use_cpu": True,
    "seed": 7,
    "save_strategy": "no",
}
"""Settings of all scripts; logging windows end inside of chunks."""


@dataclass(frozen=True)
class Leg:
    """A script in a process.

    Attributes:
        script: Its path.
        arguments: Its command line.
        log: Where what it prints goes.
        fresh: Whether its interpreter is its own.
    """

    script: str
    arguments: list[str]
    log: str
    fresh: bool = False


def source(name: str) -> str:
    """Returns a script of the TRL that is installed."""
    import importlib.util

    spec = importlib.util.find_spec(f"trl.scripts.{name}")
    assert spec
    assert spec.origin
    return Path(spec.origin).read_text(encoding="utf-8")


def patched(name: str, folder: Path, run_uri: str, target: object = None, leave_out: tuple[str, ...] = ()) -> str:
    """Writes a script with the lines added, and returns its path."""
    text = source(name)
    assert text.count(LINE) == 1
    path = folder / f"{name}_in_chunks_{run_uri.rpartition('/')[2]}_{str(target).translate({47: '_', 46: '_'})}.py"
    added = ADDED.format(run_uri=run_uri, target=target, leave_out=leave_out)
    path.write_text(text.replace(LINE, added), encoding="utf-8")
    return str(path)


def plain(name: str, folder: Path) -> str:
    """Writes a script as it is, and returns its path."""
    path = folder / f"{name}.py"
    path.write_text(source(name), encoding="utf-8")
    return str(path)


def command_line(**settings: Any) -> list[str]:
    """Returns settings as TRL's parser takes them."""
    line: list[str] = []
    for name, value in settings.items():
        line += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return line


def run(legs: list[Leg], folder: Path) -> list[tuple[int, str]]:
    """Runs legs one after the other, and returns the exit code of each and what it printed."""
    listed = folder / f"legs-{len(list(folder.glob('legs-*')))}.json"
    listed.write_text(json.dumps([asdict(leg) for leg in legs]), encoding="utf-8")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    environment |= {"HF_DATASETS_CACHE": str(folder / "cache"), "PYTHONPATH": os.getcwd()}
    done = subprocess.run(
        [sys.executable, __file__, str(listed)],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    codes = json.loads(done.stdout.splitlines()[-1])
    return [(code, Path(leg.log).read_text(encoding="utf-8")) for code, leg in zip(codes, legs, strict=True)]


def _serve(listed: str) -> None:
    import torch
    import trl  # noqa: F401
    from datasets import load_dataset  # noqa: F401
    from trl import DPOTrainer, GRPOTrainer, SFTTrainer  # noqa: F401

    import baton

    _ = baton.attach
    torch.set_num_threads(1)
    codes = []
    for entry in json.loads(Path(listed).read_text(encoding="utf-8")):
        leg = Leg(**entry)
        if leg.fresh:
            with open(leg.log, "w", encoding="utf-8") as log:
                command = [sys.executable, leg.script, *leg.arguments]
                codes.append(subprocess.run(command, stdout=log, stderr=log, check=False).returncode)
            continue
        child = os.fork()
        if child == 0:
            _child(leg)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    print(json.dumps(codes))


def _child(leg: Leg) -> None:
    import traceback

    code = 1
    descriptor = os.open(leg.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.argv = [leg.script, *leg.arguments]
    sys.path.insert(0, os.getcwd())
    try:
        runpy.run_path(leg.script, run_name="__main__")
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _serve(sys.argv[1])
