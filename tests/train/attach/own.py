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


class Growing:
    """A loss that weighs each call a little more."""

    def __init__(self) -> None:
        self.calls, self.seen = 0, torch.zeros(2)

    def __call__(self, outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        self.calls += 1
        self.seen[self.calls % 2] += 1
        logits = outputs.logits[:, :-1].flatten(0, 1).float()
        loss = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), ignore_index=-100)
        return loss * (1 + self.calls / 50 + float(self.seen[1]) / 100)


class Shrinking(TrainerCallback):
    """Lowers the learning rate by the steps and epochs that it has seen, which no `state_dict` tells of."""

    def __init__(self) -> None:
        self.epochs, self.seen = 0, {"steps": 0}

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        self.epochs += 1

    def on_step_begin(self, *_: Any, optimizer: Any, **__: Any) -> None:
        self.seen["steps"] += 1
        for group in optimizer.param_groups:
            group["lr"] /= 1 + (self.seen["steps"] + self.epochs) / 100


class Counting(Shrinking):
    """The same, and carried by a `state_dict`."""

    def state_dict(self) -> dict[str, Any]:
        return {"epochs": self.epochs, "seen": dict(self.seen)}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.epochs, self.seen = saved["epochs"], dict(saved["seen"])


class Iterating(TrainerCallback):
    """Lowers the learning rate by an iterator, which nobody can carry."""

    def __init__(self) -> None:
        self.rates = iter([1.1**number for number in range(99)])

    def on_step_begin(self, *_: Any, optimizer: Any, **__: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] /= next(self.rates)


class GrowingTrainer(Trainer):
    """A trainer with a loss of its own that counts."""

    calls = 0

    def compute_loss(self, *arguments: Any, **options: Any) -> Any:
        self.calls += 1
        return super().compute_loss(*arguments, **options) * (1 + self.calls / 50)


def trainer(base: str, folder: Path, rows: Any = None, collator: Any = noisy, **settings: Any) -> Trainer:
    """Returns a trainer as a script builds it."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attention_dropout=0.2)
    callbacks = settings.pop("callbacks", None)
    kind, loss = settings.pop("kind", Trainer), settings.pop("compute_loss_func", None)
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
    return kind(  # type: ignore[no-any-return]
        model=model,
        compute_loss_func=loss,
        args=TrainingArguments(str(folder / "out"), **arguments),
        train_dataset=Rows() if rows is None else rows,
        eval_dataset=held_out,
        data_collator=collator,
        callbacks=callbacks,
    )


def masking(tokenizer: Any) -> Any:
    """Returns Transformers' collator that masks at random."""
    return DataCollatorForLanguageModeling(tokenizer, mlm=True)
