"""How many bytes checkpoints send that follow each other, where part of the model does not change."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from statistics import median

from baton.checkpoint.store import CheckpointStore
from baton.runs.run import Run
from benchmarks.bench import Bench
from benchmarks.ours import Ours
from benchmarks.sizes import Size
from benchmarks.table import Chart, Figure, Row, keep
from benchmarks.theirs import Theirs
from tests.support.counting import Counter

NAME = "bytes"
TITLE = "bytes that a checkpoint sends"
KINDS = {"LoRA": 6, "frozen layers": 7}
"""Steps of each: runs of as many steps would be one."""
FIRST = 2
"""Checkpoints that have nothing yet to be copied from."""


def measure(bench: Bench, ours: Ours, theirs: Theirs) -> Row:
    size = bench.options.small
    columns: dict[str, list[float]] = {}
    for _ in bench.rounds():
        for kind, steps in KINDS.items():
            bench.server.expect(steps * size.bytes)
            more = [*_overrides(bench, ours, kind), "chunks.wait_for_commit=true", f"chunks.keep.last={steps}"]
            run = ours.run(size, steps=steps, every=1, overrides=more)
            with _counted() as counter:
                ours.chunk(run, 1)
            for sent, changed, whole in _bytes(run, counter):
                keep(columns, {kind: sent / changed, f"{kind}, whole": 100 * sent / whole, f"{kind}, MB": sent / 1e6})
                keep(columns, {f"{kind}, copied": (whole - sent) / 1e6})
            ours.rewind(run)
    return Row(
        title=TITLE,
        conditions=f"{size}; the third and later of {list(KINDS.values())} checkpoints, one after each step; request "
        "bodies as a front of the server counts them, the manifest among them",
        preparation="no other side",
        figures=[figure for kind in KINDS for figure in _figures(kind, columns)],
        charts={
            "sent": Chart(
                title="Bytes of a checkpoint",
                unit="MB",
                bars={
                    kind: {
                        "sent": median(columns[f"{kind}, MB"]),
                        "copied inside the store": median(columns[f"{kind}, copied"]),
                    }
                    for kind in KINDS
                },
            )
        },
        notes=[
            "changed: files whose SHA-256 is not that of the same file in the checkpoint before",
            "the first two checkpoints of a run are sent whole: there are always two that share no bytes",
        ],
    )


def _overrides(bench: Bench, ours: Ours, kind: str) -> list[str]:
    """Returns what makes the benchmark's recipe one of this kind."""
    if kind != "LoRA":
        return ["training.trainable.last_layers=1"]
    base = f"{bench.work}/base"  # an adapter is for a model that is there already
    if not os.path.isdir(base):
        _save_base(base, bench.options.small, ours.rows())
    adapter = ["adapter.r=16", "adapter.target_modules=all-linear"]
    return ["model.from_scratch=null", "model.tokenizer=null", f"model.base={base}", *adapter]


def _save_base(folder: str, size: Size, rows: str) -> None:
    """Saves a model of a size with random weights, and a tokenizer of these rows."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from baton.data import encoding
    from baton.recipe.model import TrainTokenizer

    tokenizer = encoding.train_bpe(rows, TrainTokenizer(vocab_size=size.vocabulary), size.length)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _figures(kind: str, columns: dict[str, list[float]]) -> Sequence[Figure]:
    return [
        Figure(what=f"{kind}: sent, of what changed", unit="×", ours=columns[kind], at_most=1.05),
        Figure(what=f"{kind}: sent, of the checkpoint", unit="%", ours=columns[f"{kind}, whole"]),
        Figure(what=f"{kind}: sent", unit="MB", ours=columns[f"{kind}, MB"]),
    ]


def _bytes(run: Run, counter: Counter) -> Iterator[tuple[int, int, int]]:
    """Yields for each checkpoint after the first ones its bytes sent, those that changed, and all it has."""
    checkpoints = sorted(CheckpointStore(run).committed(), key=lambda checkpoint: checkpoint.step)
    for before, checkpoint in list(pairwise(checkpoints))[FIRST - 1 :]:
        old, new = before.manifest.files, checkpoint.manifest.files
        changed = [
            entry["size"] for name, entry in new.items() if name not in old or old[name]["sha256"] != entry["sha256"]
        ]
        sent = counter.sent(f"/checkpoints/step-{checkpoint.step:08d}/")
        yield sent, sum(changed), checkpoint.bytes


@contextmanager
def _counted() -> Iterator[Counter]:
    """Has processes that are started meanwhile reach the server by way of what counts."""
    endpoint = os.environ["AWS_ENDPOINT_URL"]
    counter = Counter(endpoint)
    os.environ["AWS_ENDPOINT_URL"] = counter.endpoint
    try:
        yield counter
    finally:
        os.environ["AWS_ENDPOINT_URL"] = endpoint
        counter.stop()
