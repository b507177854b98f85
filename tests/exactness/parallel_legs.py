"""What the tests of several processes change in them: the processes are forked from the one that changes it."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import time
from collections.abc import Callable
from typing import Any

import legs


def in_rank(rank: int) -> bool:
    """Whether this is a chunk's process of a given number; the launching one has none."""
    return os.environ.get("RANK") == str(rank)


def killed(run_uri: str, index: int, rank: int, moment: str) -> None:
    """Runs a chunk of which one process dies: in a step, while it writes a file, or at what the first one tells."""
    import torch

    from baton.train.chunk import run_chunk

    kind, _, value = moment.partition(":")
    if kind == "step":
        _at_step(int(value), lambda: _die(rank))
    elif kind == "writing":
        save = torch.save

        def half(*given: Any, **named: Any) -> None:
            save(*given, **named)
            _die(rank)

        torch.save = half
    else:
        kill = os.kill
        os.kill = lambda pid, number: kill(pid, number) if pid != os.getpid() or in_rank(rank) else None
        legs._kill_at(moment)
    run_chunk(run_uri, index)


def _die(rank: int) -> None:
    if in_rank(rank):
        os.kill(os.getpid(), signal.SIGKILL)


def hanging(run_uri: str, index: int, rank: int, step: int) -> None:
    """Runs a chunk of which one process stands still in a step."""
    from baton.train.chunk import run_chunk

    _at_step(step, lambda: time.sleep(600) if in_rank(rank) else None)
    run_chunk(run_uri, index)


def writing(run_uri: str, index: int, rank: int, seconds: float, tokens: int) -> None:
    """Runs a chunk of which one process stands still for some seconds before each of the first tokens it writes."""
    import torch
    from transformers import LlamaModel

    from baton.train.chunk import run_chunk

    forward, written = LlamaModel.forward, itertools.count(1)

    def stalling(self: Any, *given: Any, **named: Any) -> Any:
        if in_rank(rank) and not torch.is_grad_enabled() and next(written) <= tokens:
            time.sleep(seconds)
        return forward(self, *given, **named)

    LlamaModel.forward = stalling
    run_chunk(run_uri, index)


def interrupted(run_uri: str, index: int, step: int) -> None:
    """Runs a chunk whose launching process gets SIGTERM."""
    from baton.train.chunk import run_chunk

    _at_step(step, lambda: os.kill(os.getppid(), signal.SIGTERM) if in_rank(1) else None)
    run_chunk(run_uri, index)


def without_rng_of(run_uri: str, index: int, rank: int) -> None:
    """Runs a chunk of which one process does not get its random state back."""
    from transformers import Trainer

    from baton.train import inputs
    from baton.train.chunk import run_chunk
    from baton.train.trainer import ExactResume

    def load(self: Any, checkpoint: str | None) -> None:
        if not in_rank(rank):
            Trainer._load_rng_state(self, checkpoint)

    ExactResume._load_rng_state = load  # type: ignore[method-assign]
    inputs.CONTROLS["rng"] = lambda folder: None  # of the others it is there; and it is not compared
    run_chunk(run_uri, index, ("rng",))


def recorded(run_uri: str, index: int, folder: str) -> None:
    """Runs a chunk that writes down the rows of each forward pass, and whether gradients are joined behind it."""
    from baton.train.chunk import run_chunk
    from baton.train.weighing import WeighedRows

    compute = WeighedRows.compute_loss

    def compute_loss(self: Any, model: Any, inputs: Any, *rest: Any, **named: Any) -> Any:
        if model.training:
            counted = [row for row in inputs["labels"].tolist() if any(label >= 0 for label in row)]
            rows = [[label for label in row if label >= 0] for row in counted]
            line = {"step": self.state.global_step + 1, "rows": rows}
            line["joins"] = getattr(model, "require_backward_grad_sync", True)
            with open(os.path.join(folder, f"{os.environ.get('RANK', '0')}.jsonl"), "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        return compute(self, model, inputs, *rest, **named)

    WeighedRows.compute_loss = compute_loss  # type: ignore[method-assign]
    run_chunk(run_uri, index)


def told_what_to_write(run_uri: str, index: int, folder: str) -> None:
    """Runs a chunk whose completions depend on their prompt and their number in its group alone, so that they are the
    same in any number of processes; writes down prompts and advantages of each round."""
    from trl import GRPOTrainer, RLOOTrainer

    from baton.train.chunk import run_chunk

    def completions(self: Any, prompts: list[list[int]]) -> list[list[int]]:
        first = self.accelerator.process_index * len(prompts)
        drawn = (random.Random(f"{ids} {(first + at) % self.num_generations}") for at, ids in enumerate(prompts))
        return [drawing.choices(range(5, 300), k=drawing.randint(1, 6)) for drawing in drawn]

    GRPOTrainer._generate_single_turn = lambda self, prompts, *_: (completions(self, prompts), None)
    RLOOTrainer._generate_single_turn = lambda self, prompts, *_: completions(self, prompts)
    for kind in (GRPOTrainer, RLOOTrainer):
        kind._generate_and_score_completions = _noted(kind._generate_and_score_completions, folder)
    run_chunk(run_uri, index)


def _noted(score: Callable[..., Any], folder: str) -> Callable[..., Any]:
    def noted(self: Any, inputs: list[dict[str, Any]]) -> Any:
        found = score(self, inputs)
        line = {"prompts": [row["prompt"] for row in inputs], "advantages": found["advantages"].tolist()}
        with open(os.path.join(folder, f"{os.environ.get('RANK', '0')}.jsonl"), "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        return found

    return noted


def compiled(run_uri: str, index: int, folder: str) -> None:
    """Runs a chunk that writes down how many frames each process has compiled."""
    from torch._dynamo.utils import counters

    from baton.train.chunk import run_chunk
    from baton.train.weighing import WeighedRows

    compute = WeighedRows.compute_loss

    def compute_loss(*given: Any, **named: Any) -> Any:
        found = compute(*given, **named)
        with open(os.path.join(folder, os.environ["RANK"]), "w", encoding="utf-8") as file:
            file.write(str(counters["frames"]["ok"]))
        return found

    WeighedRows.compute_loss = compute_loss  # type: ignore[method-assign]
    run_chunk(run_uri, index)


def _at_step(step: int, act: Callable[[], Any]) -> None:
    """Does something in the forward pass of a step."""
    from trl import SFTTrainer

    compute = SFTTrainer.compute_loss

    def compute_loss(self: Any, model: Any, *given: Any, **named: Any) -> Any:
        if model.training and step == self.state.global_step + 1:
            act()
        return compute(self, model, *given, **named)

    SFTTrainer.compute_loss = compute_loss


def spoiled(run_uri: str, index: int, part: str) -> None:
    """Runs a chunk whose last process finds one bit of what was restored turned over, just before it is compared."""
    import torch

    from baton.train import attempt, state
    from baton.train.chunk import run_chunk

    prove = attempt.RestoreCheck.prove

    def spoil(self: Any) -> None:
        trainer = self._trainer
        held = trainer.optimizer_state() if part == "optimizer" else state.trained_weights(trainer.model)
        tensor = next(each for each in state._tensors(held) if getattr(each, "ds_tensor", each).dim())
        if trainer.ranks.rank == trainer.ranks.size - 1:
            tensor = tensor.to_local() if hasattr(tensor, "to_local") else getattr(tensor, "ds_tensor", tensor)
            tensor.detach().flatten().view(torch.uint8)[0] ^= 1
        prove(self)

    attempt.RestoreCheck.prove = spoil  # type: ignore[method-assign]
    run_chunk(run_uri, index)
