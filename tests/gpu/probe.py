"""Processes whose steps, memory and GPU are watched: a chunk of Baton's, and what one would write with TRL alone."""

from __future__ import annotations

import contextlib
import json
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

PERIOD = 0.1
"""Seconds between two looks at how busy the GPU is."""
TOKENS = 4096
"""The most tokens of a tokenizer; a model may have room for more."""


class Watch:
    """What a process does while it trains.

    Attributes:
        steps: When each step's loss was there, in seconds.
        losses: The losses.
        busy: Percent of the last moment in which the GPU worked, looked at again and again between steps.
    """

    def __init__(self) -> None:
        self.steps: list[float] = []
        self.losses: list[float] = []
        self.busy: list[int] = []
        self._ended = threading.Event()

    def step(self, loss: float) -> None:
        """Notes a step."""
        self.steps.append(time.perf_counter())
        self.losses.append(loss)

    def figures(self) -> dict[str, Any]:
        """Returns what was seen; memory is the GPU's as torch counts it, or the process's without one."""
        import torch

        peak, reserved = psutil.Process().memory_info().rss, 0
        if torch.cuda.is_available():
            peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        seconds = [after - before for before, after in zip(self.steps, self.steps[1:], strict=False)]
        return {"seconds": seconds, "losses": self.losses, "busy": self.busy, "peak": peak, "reserved": reserved}

    def look(self) -> None:
        """Looks at the GPU until training ends."""
        import torch

        while not self._ended.wait(PERIOD):
            if len(self.steps) > 1:
                self.busy.append(torch.cuda.utilization())

    def end(self) -> None:
        """Ends that."""
        self._ended.set()


@contextlib.contextmanager
def _watched(path: str) -> Iterator[Watch]:
    """Watches what is done, and writes the figures to a file."""
    import torch

    watch = Watch()
    with contextlib.suppress(ImportError):
        import pynvml  # noqa: F401 - what torch asks

        if torch.cuda.is_available():
            threading.Thread(target=watch.look, daemon=True).start()
    try:
        yield watch
    finally:
        watch.end()
    Path(path).write_text(json.dumps(watch.figures()), encoding="utf-8")


def chunk(run_uri: str, index: int, path: str) -> None:
    """Runs a chunk and writes what it did to a file."""
    from baton import events
    from baton.train.chunk import run_chunk

    told = events.emit
    with _watched(path) as watch:

        def emit(event: events.Event) -> None:
            if isinstance(event, events.Step):
                watch.step(event.loss)
            told(event)

        events.emit = emit
        run_chunk(run_uri, index)


def plain(run_uri: str, deterministic: bool, path: str) -> None:
    """Trains on a run's rows with its settings by TRL's trainer alone, and writes what it did to a file."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback, set_seed
    from trl import SFTConfig, SFTTrainer

    from baton.models import trained
    from baton.runs.run import Run
    from baton.train.build import make_deterministic

    run = Run.open(run_uri)
    recipe, plan = run.resolved_recipe(), run.plan()
    training = recipe.training
    make_deterministic(training.threads, deterministic)
    set_seed(recipe.seed)
    with tempfile.TemporaryDirectory() as folder, _watched(path) as watch:

        class Noted(TrainerCallback):
            def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
                if "loss" in logs:
                    watch.step(logs["loss"])

        tokens = trained.tokens_folder(run, folder)
        config = SFTConfig(
            output_dir=folder,
            seed=recipe.seed,
            data_seed=recipe.seed,
            max_steps=plan.num_steps,
            per_device_train_batch_size=recipe.micro_batch_size_per_process,
            gradient_accumulation_steps=recipe.gradient_accumulation_steps,
            learning_rate=training.learning_rate,
            lr_scheduler_type=training.lr_scheduler,
            optim=training.optimizer,
            bf16=training.precision == "bf16",
            gradient_checkpointing=False,
            use_cpu=recipe.resources.gpus == 0,
            dataloader_pin_memory=recipe.resources.gpus > 0,
            dataset_kwargs={"skip_prepare_dataset": True},
            packing=False,
            max_length=recipe.data.max_length,
            logging_steps=1,
            logging_nan_inf_filter=False,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = SFTTrainer(
            model=AutoModelForCausalLM.from_pretrained(recipe.model.base, dtype="float32"),
            args=config,
            train_dataset=trained.open_rows(f"{tokens}/train"),
            processing_class=AutoTokenizer.from_pretrained(f"{tokens}/tokenizer"),
            callbacks=[Noted()],
        )
        trainer.train()


def make_base(folder: str, rows: str, size: dict[str, int], dtype: str = "float32") -> None:
    """Saves a Llama with random weights and a tokenizer that was trained on some rows."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from baton.data import encoding
    from baton.recipe.model import TrainTokenizer

    tokenizer = encoding.train_bpe(rows, TrainTokenizer(vocab_size=min(size["vocab_size"], TOKENS)), 64)
    torch.manual_seed(0)
    torch.set_default_dtype(getattr(torch, dtype))
    ids = {f"{kind}_token_id": getattr(tokenizer, f"{kind}_token_id") for kind in ("bos", "eos", "pad")}
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = LlamaForCausalLM(LlamaConfig(**size, **ids))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
