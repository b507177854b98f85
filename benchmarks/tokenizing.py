"""Rows to tokens in a fresh process, timed without its imports: `python -m benchmarks.tokenizing SIDE ARGUMENT…`.

`ours RUN_URI` is the tokenize stage, from the split in the store to the tokens in the store. `theirs ROWS TOKENIZER
LENGTH WORKERS` loads the rows and has `SFTTrainer` prepare them. `masked ROWS TOKENIZER TRAIN_ON` makes conversations'
tokens, all of which count or what the assistant wrote, and `rendered ROWS TOKENIZER` their tokens alone, by the
tokenizer's `apply_chat_template`. All print seconds, tokens, and the most memory that the process and those it started
held together, pages that they share counted for each.
"""

import contextlib
import gc
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

import psutil

from benchmarks.mark import mark

PERIOD = 0.1
"""Seconds between two looks at the memory."""


class Peak:
    """The most that this process and its children held at one moment."""

    def __init__(self) -> None:
        self.bytes = 0
        threading.Thread(target=self._look, daemon=True).start()

    def _look(self) -> None:
        us = psutil.Process()
        while True:
            found = 0
            for process in (us, *us.children(recursive=True)):
                with contextlib.suppress(psutil.Error):
                    found += process.memory_info().rss
            self.bytes = max(self.bytes, found)
            time.sleep(PERIOD)


def ours(run_uri: str) -> tuple[float, int]:
    from baton.data.tokenize import tokenize_run

    began = time.perf_counter()
    tokens = tokenize_run(run_uri)["tokens"]
    return time.perf_counter() - began, tokens


def theirs(rows: str, tokenizer_folder: str, length: str, workers: str) -> tuple[float, int]:
    import datasets
    import pyarrow.compute as pc
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from trl import SFTConfig, SFTTrainer

    datasets.disable_progress_bars()
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as folder:
        arguments: dict[str, Any] = {"output_dir": folder, "report_to": "none", "bf16": False, "use_cpu": True}
        arguments |= {"max_length": int(length), "dataset_num_proc": int(workers)}
        began = time.perf_counter()
        given = datasets.load_dataset("json", data_files=rows, split="train", cache_dir=folder)
        made = SFTTrainer(
            model=LlamaForCausalLM(config),
            args=SFTConfig(**arguments),
            train_dataset=given,
            processing_class=tokenizer,
        ).train_dataset
        seconds = time.perf_counter() - began
        return seconds, pc.sum(pc.list_value_length(made.data.column("input_ids"))).as_py()


def masked(rows: str, tokenizer_folder: str, train_on: str) -> tuple[float, int]:
    from baton.data.encoding import ChatEncoder
    from baton.models import loading

    talk = ChatEncoder(loading.load_tokenizer(tokenizer_folder), train_on)
    return _timed(rows, lambda batch: [row["input_ids"] for row in talk.sequences(batch) if isinstance(row, dict)])


def rendered(rows: str, tokenizer_folder: str) -> tuple[float, int]:
    from baton.models import loading

    tokenizer = loading.load_tokenizer(tokenizer_folder)

    def ids(batch: list[dict[str, Any]]) -> list[list[int]]:
        made = tokenizer.apply_chat_template([row["messages"] for row in batch], tokenize=True, return_dict=True)
        return [list(each) for each in made["input_ids"]]

    return _timed(rows, ids)


def _timed(rows: str, ids: Callable[[list[dict[str, Any]]], list[list[int]]]) -> tuple[float, int]:
    """Returns seconds and tokens of conversations, a thousand at a time, in this process alone."""
    with open(rows, encoding="utf-8") as file:
        given = [json.loads(line) for line in file]
    ids(given[:10])
    gc.freeze()  # as the stage does
    began = time.perf_counter()
    tokens = sum(len(each) for at in range(0, len(given), 1000) for each in ids(given[at : at + 1000]))
    return time.perf_counter() - began, tokens


if __name__ == "__main__":
    os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"
    import torch
    import transformers  # noqa: F401
    import trl  # noqa: F401

    torch.set_num_threads(1)
    peak = Peak()
    sides: list[Callable[..., tuple[float, int]]] = [ours, theirs, masked, rendered]
    seconds, tokens = {side.__name__: side for side in sides}[sys.argv[1]](*sys.argv[2:])
    mark("tokenized", seconds=seconds, tokens=tokens, peak=peak.bytes)
