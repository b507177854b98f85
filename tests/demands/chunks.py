"""Chunks of Baton in processes of their own, in which something is counted, forbidden, or cut off."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

PROMPTS = "prompts.jsonl"
ROWS = "rows"


def killed_in_upload(run_uri: str, index: int, step: int) -> None:
    """Runs a chunk that dies when two files of a step's checkpoint have been uploaded."""
    import itertools

    from baton.store.storage import Storage
    from baton.train.chunk import run_chunk

    upload, sent = Storage.upload, itertools.count(1)

    def dying(self: Any, local: str, path: str, *given: Any, **named: Any) -> Any:
        digest = upload(self, local, path, *given, **named)
        if f"step-{step:08d}/" in path and next(sent) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return digest

    Storage.upload = dying  # type: ignore[method-assign]
    run_chunk(run_uri, index)


def noting_prompts(run_uri: str, index: int, folder: str) -> None:
    """Runs a chunk that writes down the prompts of each round for which its model writes."""
    from trl import GRPOTrainer

    from baton.train.chunk import run_chunk

    score = GRPOTrainer._generate_and_score_completions

    def noted(self: Any, inputs: list[dict[str, Any]]) -> Any:
        with open(Path(folder, PROMPTS), "a", encoding="utf-8") as file:
            file.write(json.dumps([row["prompt"] for row in inputs]) + "\n")
        return score(self, inputs)

    GRPOTrainer._generate_and_score_completions = noted
    run_chunk(run_uri, index)


def counting_rows(run_uri: str, index: int, folder: str) -> None:
    """Runs a chunk that writes down how many rows of its data are read in batches."""
    import datasets

    from baton.train.chunk import run_chunk

    get, read = datasets.Dataset.__getitems__, [0]

    def counted(self: Any, keys: list[int]) -> Any:
        read[0] += len(keys)
        return get(self, keys)

    datasets.Dataset.__getitems__ = counted
    run_chunk(run_uri, index)
    Path(folder, ROWS).write_text(str(read[0]))


def without_a_tokenizer(run_uri: str, index: int) -> None:
    """Runs a chunk in whose processes a tokenizer that is given texts ends the chunk."""
    from transformers import PreTrainedTokenizerBase

    from baton.train.chunk import run_chunk

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a process of the chunk tokenizes")

    PreTrainedTokenizerBase.__call__ = refuse
    PreTrainedTokenizerBase.encode = refuse
    run_chunk(run_uri, index)


def judge_rung(store: str, name: str, number: int) -> None:
    """Compares the trials of a rung, as the stage does."""
    from baton.runs.run import Sweep
    from baton.store.storage import Storage
    from baton.sweep.trials import rank_trials

    rank_trials(Sweep(Storage(store), name), number)
