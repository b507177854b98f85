"""Runs processes that fuzz, starts another where one has ended early, and says what came of them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tools.fuzz.findings import Findings

ROOT = Path(__file__).resolve().parent.parent.parent
ATHERIS = ROOT / "build" / "fuzz"
"""Where `make fuzz` installs it."""
MEMORY = "/dev/shm"
GRACE = 60
"""Seconds after its time at which a process is ended."""
RESTARTS = 200
"""Processes that may end early."""
_PULSE = re.compile(rb"^#(\d+)\s.*?cov: (\d+) ft: (\d+) corp: (\d+)/", re.MULTILINE)
_FRAME = re.compile(r'File "([^"]+)", line (\d+) in (\w+)')
_KEPT = re.compile(r"^(?:crash|timeout|oom|leak)-")


@dataclass
class Outcome:
    """What came of fuzzing a target.

    Attributes:
        name: The target.
        executions: Inputs that were read.
        seconds: Time taken.
        edges: Branches that any input took.
        corpus: Inputs kept, each of which took a branch that none had taken before.
        peak: Mebibytes that one input took at most.
        findings: Files with what is told of each; beside it is its input.
    """

    name: str
    executions: int = 0
    seconds: float = 0.0
    edges: int = 0
    corpus: int = 0
    peak: float = 0.0
    findings: list[Path] = field(default_factory=list)


def fuzz(name: str, folder: Path, seconds: float, *, until_found: bool = False) -> Outcome:
    """Fuzzes a target.

    Args:
        name: The target.
        folder: Where corpus, findings and logs go; what a run before has left there is gone on with.
        seconds: For how long.
        until_found: Whether the first finding ends it.
    """
    for each in ("corpus", "findings", "early"):
        (folder / each).mkdir(parents=True, exist_ok=True)
    outcome, began, findings = Outcome(name), time.monotonic(), Findings(folder / "findings")
    for number in range(RESTARTS):
        left = seconds - (time.monotonic() - began)
        if (number and left < 1) or (until_found and findings.all()):
            break
        log = folder / f"{int(time.time() * 1000)}.log"
        status = _process(name, folder, log, left, lambda: until_found and bool(findings.all()))
        _read(log, outcome)
        if status == 0:
            break
        _keep_early(name, folder, log, status)
    outcome.seconds = time.monotonic() - began
    outcome.findings = findings.all()
    if (peak := folder / "peak.json").exists():
        outcome.peak = json.loads(peak.read_text())["kib"] / 1024
    return outcome


def _process(name: str, folder: Path, log: Path, seconds: float, is_enough: Callable[[], bool]) -> int:
    """Runs a process until its time is over, it ends early or it is enough, and returns its exit status."""
    options = [f"-max_total_time={max(1, round(seconds))}", "-print_final_stats=1"]
    options += ["-reload=0", "-verbosity=1", f"-artifact_prefix={folder}/early/"]
    command = [sys.executable, "-m", "tools.fuzz.process", name, str(folder), *options]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ATHERIS)}
    ends = time.monotonic() + seconds + GRACE
    # It ends without a word to Python, and so without tidying up.
    with log.open("wb") as output, tempfile.TemporaryDirectory(dir=MEMORY if os.path.isdir(MEMORY) else None) as place:
        environment["TMPDIR"] = place
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)
        try:
            while time.monotonic() < ends:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return process.wait(0.5)
                if is_enough():
                    return 0
            return -signal.SIGKILL
        finally:
            process.kill()
            process.wait()


def _read(log: Path, outcome: Outcome) -> None:
    """Adds what a process has written of its progress."""
    pulses = _PULSE.findall(log.read_bytes())
    if pulses:
        outcome.executions += int(pulses[-1][0])
        outcome.edges, outcome.corpus = int(pulses[-1][1]), int(pulses[-1][3])


def _keep_early(name: str, folder: Path, log: Path, status: int) -> None:
    """Makes findings of what has ended a process."""
    findings = Findings(folder / "findings")
    inputs = [path for path in (folder / "early").iterdir() if _KEPT.match(path.name)]
    told = log.read_text(encoding="utf-8", errors="backslashreplace")[-10_000:]
    frames = [f"{'/'.join(file.split('/')[-3:])}:{line} {name}" for file, line, name in _FRAME.findall(told)]
    ours = [frame for frame in frames if frame.startswith("baton/") or "/baton/" in frame]
    for path in inputs:
        kind = path.name.partition("-")[0]
        findings.add(f"{kind} {' ← '.join(dict.fromkeys([*ours[:1], *frames[:1]]))}", path.read_bytes(), told)
        path.unlink()
    if not inputs:
        raise RuntimeError(f"the process that fuzzes {name} ended with {status} and left no input; see {log}\n{told}")
