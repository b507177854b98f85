"""A script's own parts: rows that draw, a collator that draws, a callback with state, and the trainer made of them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

NUM_ROWS = 14


class Rows(torch.utils.data.Dataset[Any]):
    """Token ids of which some are drawn each time a row is read."""

    def __len__(self) -> int:
        return NUM_ROWS

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = [(index * 7 + at) % 290 for at in range(8)]
        ids[random.randrange(8)] = int(torch.randint(290, ()))
        return {"input_ids": ids, "labels": ids}


class FixedRows(Rows):
    """The same without a draw."""

    def __init__(self, num_rows: int = NUM_ROWS) -> None:
        self.num_rows = num_rows

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index >= self.num_rows:
            raise IndexError(index)
        ids = [(index * 7 + at) % 290 for at in range(4 + index % 5)]
        return {"input_ids": ids, "labels": ids}


def noisy(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Joins rows, and leaves out labels at random."""
    ids = torch.tensor([row["input_ids"] for row in rows])
    labels = ids.masked_fill(torch.rand(ids.shape) < 0.3, -100)
    return {"input_ids": ids, "labels": labels}


def padded(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Joins rows of several lengths."""
    width = max(len(row["input_ids"]) for row in rows)
    ids = torch.tensor([row["input_ids"] + [0] * (width - len(row["input_ids"])) for row in rows])
    return {"input_ids": ids, "labels": ids}


class Slower(TrainerCallback):
    """Halves the learning rate at each third step that it has seen."""

    def __init__(self) -> None:
        self.seen = 0

    def on_step_begin(self, *_: Any, optimizer: Any, **__: Any) -> None:
        self.seen += 1
        if self.seen % 3 == 0:
            for group in optimizer.param_groups:
                group["lr"] /= 2

    def state_dict(self) -> dict[str, int]:
        return {"seen": self.seen}

    def load_state_dict(self, saved: dict[str, int]) -> None:
        self.seen = saved["seen"]


def trainer(base: str, folder: Path, rows: Any = None, collator: Any = noisy, **settings: Any) -> Trainer:
    """Returns a trainer as a script builds it."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attention_dropout=0.2)
    callbacks = settings.pop("callbacks", None)
    held_out = settings.pop("eval_dataset", None)
    arguments = {
        "num_train_epochs": 3,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 5e-3,
        "logging_steps": 3,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 5,
        **settings,
    }
    return Trainer(
        model=model,
        args=TrainingArguments(str(folder / "out"), **arguments),
        train_dataset=Rows() if rows is None else rows,
        eval_dataset=held_out,
        data_collator=collator,
        callbacks=callbacks,
    )


def masking(tokenizer: Any) -> Any:
    """Returns Transformers' collator that masks at random."""
    return DataCollatorForLanguageModeling(tokenizer, mlm=True)
