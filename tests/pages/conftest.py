"""Reports to render: of a run that went well but for one interruption, and of one that never began."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from baton.checkpoint.store import CheckpointMeta
from baton.pages.collect import ProofEntry, RunReport
from baton.runs.documents import ChunkRecord, ProofPart, RunCost, SplitCounts, TokenizedRows, TrackingRun
from baton.runs.outcomes import EvaluationResult, ExportedModel
from baton.runs.plan import Plan
from baton.runs.versions import Fingerprint

CHECKED = dict.fromkeys(("weights", "optimizer", "scheduler", "rng", "position", "callbacks", "log"), "match")


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _attempt(chunk: int, start: int, end: int, outcome: str = "done", train: float = 20.3) -> ChunkRecord:
    seconds = {
        "start": 1.1,
        "import": 3.0,
        "fetch": 0.4,
        "build": 0.9,
        "restore": 0.6 if start else 0.0,
        "train": train,
        "save": 0.5,
        "upload": 0.2,
    }
    return ChunkRecord(
        stage=f"train-chunk-{chunk:03d}",
        chunk=chunk,
        from_step=start,
        to_step=end,
        outcome=outcome,
        seconds=seconds,
        tokens=400_000,
        bytes_sent=10_560_000,
        bytes_received=7_920_000,
        save_stalls=[0.25],
    )


def _proof_entry(step: int, parent: int | None, **changed: Any) -> ProofEntry:
    part = {
        "step": step,
        "digest": _digest("state", step),
        "parent_step": parent,
        "parent_digest": _digest("state", parent) if parent else None,
        "chain": _digest("chain", step),
        "restored_step": parent or 0,
        "verified": True,
        "checked": {**CHECKED, "scaler": "absent"} if parent else None,
        "uri": f"s3://store/runs/quickstart/checkpoints/step-{step:08d}",
        "bytes": 13_200_000 + step,
        "fingerprint": {"device": "cpu", "torch": "2.13.0", "threads": 2},
    }
    return ProofEntry(ProofPart.model_validate({**part, **changed}))


def _full_report(num_chunks: int = 4, num_steps: int = 240) -> RunReport:
    """A run whose second chunk died once and was taken up again."""
    ends = [round(num_steps * k / num_chunks) for k in range(num_chunks + 1)]
    noise = np.random.default_rng(7).normal(size=(2, num_steps))
    progress = np.arange(1, num_steps + 1) / num_steps
    loss = 3.1 + 5.2 * np.exp(-5 * progress) + 0.12 * noise[0]
    rate = 1e-3 * np.minimum(progress * 10, 0.5 + 0.5 * np.cos(np.pi * progress))
    norm = 0.6 + 1.6 * np.exp(-4 * progress) + 0.15 * np.abs(noise[1])
    attempts = [_attempt(k, start, end) for k, (start, end) in enumerate(pairwise(ends), 1)]
    if num_chunks > 1:
        middle = (ends[1] + ends[2]) // 2
        attempts[1:2] = [_attempt(2, ends[1], middle, "killed", 11.0), _attempt(2, middle, ends[2], "done", 10.4)]
    steps = [
        {"step": k + 1, "loss": float(loss[k]), "learning_rate": float(rate[k]), "grad_norm": float(norm[k])}
        for k in range(num_steps)
    ]
    evals = [{"step": end, "eval_loss": 3.2 + 5 * math.exp(-5 * end / num_steps)} for end in ends[1:]]
    return RunReport(
        run="quickstart-20261121-020000",
        uri="s3://store/runs/quickstart-20261121-020000",
        created="2026-11-21T02:00:00Z",
        recipe_name="quickstart",
        recipe_yaml="name: quickstart\nmodel:\n  base: tiny\ntraining:\n  chunks: 4\n",
        method="sft",
        plan=Plan(rows=9000, steps_per_epoch=num_steps, num_steps=num_steps, targets=tuple(ends[1:])),
        split=SplitCounts(
            source="hf://datasets/tiny/stories",
            rows=10_003,
            train=9000,
            eval=1000,
            rejected=3,
            rejected_uri="s3://store/data/ab12/rejected.jsonl",
        ),
        tokens=TokenizedRows(prefix="data/ab12/tokens", tokens=1_234_567, truncated=12),
        tracking=TrackingRun(mlflow="https://mlflow.example/#/experiments/1", run_id="0f3a"),
        evaluation=EvaluationResult(
            before={"loss": 8.31, "perplexity": 4064.3},
            after={"loss": 3.2, "perplexity": 24.53},
            parameters=3_400_000,
            samples=[
                {
                    "prompt": "Write a haiku about the sea.",
                    "reference": "Grey waves fold the shore\n  a gull forgets its name\nsalt dries on the rope",
                    "before": "the the the of , , and sea sea . to\tthe the of of",
                    "after": "The tide comes in slow\n  and the boats lean on their ropes\nall of them asleep",
                },
                {
                    "prompt": "Is 91 prime?",
                    "reference": "No: 7 × 13.",
                    "before": "",
                    "after": "No. It is 7 times 13.",
                },
            ],
        ),
        export=ExportedModel(model_uri="s3://store/runs/quickstart-20261121-020000/model"),
        newest=CheckpointMeta(
            step=num_steps,
            digest=_digest("state", num_steps),
            trainable_parameters=3_400_000,
            work=RunCost(goodput=0.62, lost_steps=3),
            fingerprint=Fingerprint(python="3.11.9", torch="2.13.0", transformers="5.2.0"),
        ),
        log=[*steps, *evals],
        attempts=attempts,
        stages={
            "data split": 2.1,
            "tokenize": 5.4,
            **{f"train chunk {k}": 26.0 + k % 3 for k in range(1, num_chunks + 1)},
            **{f"checkpoint {k}": 3.0 for k in range(1, num_chunks + 1)},
            "evaluate": 14.2,
            "export": 4.4,
        },
        proof=[_proof_entry(end, parent or None) for parent, end in pairwise(ends)],
    )


def _empty_report() -> RunReport:
    """A trial that failed before its first step."""
    documents = dict.fromkeys(("plan", "split", "tokens", "tracking", "evaluation", "export", "newest"))
    nothing: dict[str, Any] = {"log": (), "attempts": (), "stages": {}, "proof": (), "recipe_yaml": ""}
    return replace(_full_report(), **documents, **nothing, verdict="failed")


@pytest.fixture
def attempt() -> Callable[..., ChunkRecord]:
    """Makes one attempt at a chunk."""
    return _attempt


@pytest.fixture
def proof_entry() -> Callable[..., ProofEntry]:
    """Makes one checkpoint's entry of the resume proof."""
    return _proof_entry


@pytest.fixture
def full_report() -> Callable[..., RunReport]:
    """Makes the report of a run whose second chunk died once and was taken up again."""
    return _full_report


@pytest.fixture
def empty_report() -> Callable[..., RunReport]:
    """Makes the report of a run that failed before its first step."""
    return _empty_report
