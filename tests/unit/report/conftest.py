"""Reports to render: of a run that went well but for one interruption, and of one that never began."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

CHECKED = dict.fromkeys(("weights", "optimizer", "scheduler", "rng", "position", "callbacks", "log"), "match")


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _attempt(start: int, end: int, outcome: str = "done", train: float = 20.3) -> dict[str, Any]:
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
    rate = 5100.0 + 40 * math.sin(start)
    return {
        "from_step": start,
        "to_step": end,
        "outcome": outcome,
        "seconds": seconds,
        "tokens_per_second": rate,
        "steps_per_second": rate / 1600,
    }


def _proof_row(step: int, parent: int | None, **changed: Any) -> dict[str, Any]:
    return {
        "step": step,
        "digest": _digest("state", step),
        "parent_step": parent,
        "parent_digest": _digest("state", parent) if parent else None,
        "chain": _digest("chain", step),
        "level": "bitwise",
        "restored_step": parent or 0,
        "verified": True,
        "gone": None,
        "checked": {**CHECKED, "scaler": "absent"} if parent else None,
        "uri": f"s3://store/runs/quickstart/checkpoints/step-{step:08d}",
        "bytes": 13_200_000 + step,
        "fingerprint": {"device": "cpu", "torch": "2.13.0", "threads": 2},
        **changed,
    }


def _full_report(num_chunks: int = 4, num_steps: int = 240) -> dict[str, Any]:
    """A run whose second chunk died once and was taken up again."""
    ends = [round(num_steps * k / num_chunks) for k in range(num_chunks + 1)]
    noise = np.random.default_rng(7).normal(size=(2, num_steps))
    progress = np.arange(1, num_steps + 1) / num_steps
    loss = 3.1 + 5.2 * np.exp(-5 * progress) + 0.12 * noise[0]
    rate = 1e-3 * np.minimum(progress * 10, 0.5 + 0.5 * np.cos(np.pi * progress))
    norm = 0.6 + 1.6 * np.exp(-4 * progress) + 0.15 * np.abs(noise[1])
    chunks = [
        {"index": k, "target_step": end, "spare": False, "attempts": [_attempt(start, end)]}
        for k, (start, end) in enumerate(pairwise(ends), 1)
    ]
    if num_chunks > 1:
        middle = (ends[1] + ends[2]) // 2
        chunks[1]["attempts"] = [
            _attempt(ends[1], middle, "failed", 11.0),
            _attempt(middle, ends[2], "done", 10.4),
        ]
    return {
        "run": "quickstart-20261121-020000",
        "recipe_name": "quickstart",
        "method": "sft",
        "state": "succeeded",
        "created": "2026-11-21T02:00:00Z",
        "run_uri": "s3://store/runs/quickstart-20261121-020000",
        "model_uri": "s3://store/runs/quickstart-20261121-020000/model",
        "headline": {
            "eval_loss_before": 8.31,
            "eval_loss_after": 3.2,
            "perplexity_before": 4064.3,
            "perplexity_after": 24.53,
            "steps": num_steps,
            "chunks": num_chunks,
            "train_rows": 9000,
            "eval_rows": 1000,
            "trained_tokens": 1_234_567,
            "parameters": 3_400_000,
            "trainable_parameters": 3_400_000,
        },
        "history": [
            {
                "step": k + 1,
                "loss": float(loss[k]),
                "learning_rate": float(rate[k]),
                "grad_norm": float(norm[k]),
            }
            for k in range(num_steps)
        ],
        "evals": [{"step": end, "eval_loss": 3.2 + 5 * math.exp(-5 * end / num_steps)} for end in ends[1:]],
        "chunks": chunks,
        "evaluation": None,
        "exports": [],
        "registry": None,
        "cost": {
            "goodput": 0.62,
            "lost_steps": 3,
            "bytes_sent": 52_800_000,
            "bytes_received": 39_600_000,
            "save_stall": 0.25,
        },
        "stages": [
            {"name": "data split", "seconds": 2.1},
            {"name": "tokenize", "seconds": 5.4},
            *({"name": f"train chunk {k}", "seconds": 26.0 + k % 3} for k in range(1, num_chunks + 1)),
            *({"name": f"checkpoint {k}", "seconds": 3.0} for k in range(1, num_chunks + 1)),
            {"name": "evaluate", "seconds": 14.2},
            {"name": "export", "seconds": 4.4},
        ],
        "proof": [_proof_row(end, parent or None) for parent, end in pairwise(ends)],
        "samples": [
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
        "data": {
            "source": "hf://datasets/tiny/stories",
            "rows": 10_003,
            "train": 9000,
            "eval": 1000,
            "rejected": 3,
            "rejected_uri": "s3://store/data/ab12/rejected.jsonl",
            "truncated": 12,
            "tokens": 1_234_567,
        },
        "recipe_yaml": "name: quickstart\nmodel:\n  base: tiny\ntraining:\n  chunks: 4\n",
        "versions": {"python": "3.11.9", "torch": "2.13.0", "transformers": "5.2.0"},
        "tracking": {"mlflow": "https://mlflow.example/#/experiments/1", "run_id": "0f3a"},
    }


def _empty_report() -> dict[str, Any]:
    """A run that failed before its first step."""
    report = _full_report()
    report |= {key: [] for key in ("history", "evals", "chunks", "stages", "proof", "samples")}
    report |= {"state": "failed", "model_uri": None, "data": None, "recipe_yaml": "", "versions": {}}
    report["headline"] = dict.fromkeys(report["headline"])
    report["cost"] = {**dict.fromkeys(report["cost"]), "bytes_sent": 0, "bytes_received": 0}
    report["tracking"] = {"mlflow": None, "run_id": None}
    return report


@pytest.fixture
def attempt() -> Callable[..., dict[str, Any]]:
    """Makes one attempt at a chunk."""
    return _attempt


@pytest.fixture
def proof_row() -> Callable[..., dict[str, Any]]:
    """Makes one checkpoint's row of the resume proof."""
    return _proof_row


@pytest.fixture
def full_report() -> Callable[..., dict[str, Any]]:
    """Makes the report of a run whose second chunk died once and was taken up again."""
    return _full_report


@pytest.fixture
def empty_report() -> Callable[..., dict[str, Any]]:
    """Makes the report of a run that failed before its first step."""
    return _empty_report
