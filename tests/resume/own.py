"""What a user might bring: hooks of every kind."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from transformers import DataCollatorForSeq2Seq, TrainerCallback


def shortness(completion_ids: list[list[int]], completions: list[str], **_: Any) -> list[float]:
    """Rewards few different tokens, so that completions of an untrained model differ."""
    return [len(set(ids)) / 10 + len(said) / 100 for ids, said in zip(completion_ids, completions, strict=True)]


def drawing(prompts: list[str], completions: list[str], references: list[str]) -> list[float]:
    """Measures nothing, and draws from every generator that training draws from."""
    return [random.random() + float(np.random.rand()) + float(torch.rand(1)) for _ in completions]


class NoisyCollator:
    """Replaces tokens at random, as masking does."""

    def __init__(self, tokenizer: Any, share: float = 0.2) -> None:
        self.pad = DataCollatorForSeq2Seq(tokenizer)
        self.size, self.share = len(tokenizer), share

    def __call__(self, rows: list[Any]) -> Any:
        batch = self.pad(rows)
        hit = torch.rand(batch["input_ids"].shape) < self.share
        batch["input_ids"] = torch.where(hit, torch.randint_like(batch["input_ids"], self.size), batch["input_ids"])
        return batch


class Cooling(TrainerCallback):
    """Lowers the learning rate a little more at each step: what it keeps decides the bits."""

    def __init__(self, factor: float = 0.5) -> None:
        self.factor = factor
        self.power = 0

    def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        self.power += 1
        for group in optimizer.param_groups:
            for value in group["params"]:
                value.data.mul_(1 - 1e-3 * self.factor**self.power)

    def state_dict(self) -> dict[str, Any]:
        return {"power": self.power}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.power = saved["power"]


class Skipping(TrainerCallback):
    """Has the last layer's feed-forward part pass over rows of an even length, so that its weights are not used."""

    stateless = True

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        part = model.model.layers[-1].mlp
        forward = part.forward
        part.forward = lambda hidden: forward(hidden) if hidden.shape[1] % 2 else torch.zeros_like(hidden)


def hits(prediction: Any) -> dict[str, float]:
    """Returns the share of next tokens that are the likeliest, and what every generator gives next."""
    logits, labels = prediction.predictions[:, :-1], prediction.label_ids[:, 1:]
    counted = labels != -100
    draws = random.random() + float(np.random.rand()) + float(torch.rand(()))
    return {"hits": float((logits.argmax(-1) == labels)[counted].mean()), "of": float(counted.sum()), "draws": draws}


def doubled_loss(outputs: Any, labels: Any, num_items_in_batch: Any = None, factor: float = 2.0) -> Any:
    """Cross entropy, twice."""
    logits = outputs.logits[:, :-1].flatten(0, 1).float()
    return factor * torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), ignore_index=-100)


class Clumsy:
    """Weighs each loss by a random number."""

    def compute_loss(self, *arguments: Any, **options: Any) -> Any:
        return super().compute_loss(*arguments, **options) * (1 + torch.rand(()) / 10)  # type: ignore[misc]


def planted(trainer: Any, loss: Any) -> Any:
    """Spoils the loss of some steps, in the last of several processes; with virtual workers in each pass."""
    is_here = trainer.recipe.parallel.virtual_workers or trainer.ranks.rank == trainer.ranks.size - 1
    if not trainer.model.training or not is_here:
        return loss
    step = trainer.state.global_step + 1
    factor = {2: float("nan"), 6: 40.0}.get(step, 1.0)
    # The loss stays as it is, and its gradient does not.
    return loss * factor + (100 * (loss - loss.detach()) if step == 8 else 0.0)


class Planted:
    """Spoils some steps."""

    def compute_loss(self, *arguments: Any, **options: Any) -> Any:
        return planted(self, super().compute_loss(*arguments, **options))  # type: ignore[misc]


class PlantedFirst:
    """Spoils the first step."""

    def compute_loss(self, *arguments: Any, **options: Any) -> Any:
        loss = super().compute_loss(*arguments, **options)  # type: ignore[misc]
        trainer: Any = self
        return loss * float("nan") if trainer.model.training and not trainer.state.global_step else loss


class Marked:
    """Finds no loss for rows with a tilde."""

    def compute_loss(self, model: Any, inputs: Any, *rest: Any, **options: Any) -> Any:
        loss = super().compute_loss(model, inputs, *rest, **options)  # type: ignore[misc]
        trainer: Any = self
        mark = trainer.processing_class.convert_tokens_to_ids("~")
        return loss * float("nan") if trainer.model.training and (inputs["input_ids"] == mark).any() else loss
