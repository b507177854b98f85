"""What the model writes in the course of training."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from transformers import TrainerCallback

from components.shared import generation, rng
from components.shared.prompts import held_out_prompts
from components.shared.recipe import Recipe
from components.shared.rewards.numeric import number
from components.shared.runs import Run
from components.train_chunk.reporting import LiveReport


class Writing(TrainerCallback):
    """Lets the model write for held-out prompts every few steps, as in the last evaluation, without a trace in its
    state.

    Args:
        run: The training run.
        recipe: Its recipe.
        tokenizer: The model's tokenizer.
        report: Where the figures go.
    """

    stateless = True

    def __init__(self, run: Run, recipe: Recipe, tokenizer: Any, report: LiveReport) -> None:
        self._run = run
        self._every = recipe.evaluation.write_every or 0
        self._recipe = recipe
        self._tokenizer = tokenizer
        self._report = report
        self._prompts = held_out_prompts(run, recipe, tokenizer, recipe.evaluation.samples)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Writes when it is time to."""
        if not self._prompts or state.global_step % self._every:
            return
        was_training = model.training
        model.eval()
        try:
            with rng.undisturbed(), _any_kernel():
                said = generation.write_all(
                    model,
                    self._tokenizer,
                    [prompt for prompt, _ in self._prompts],
                    max_new_tokens=self._recipe.evaluation.max_new_tokens,
                    max_length=self._recipe.data.max_length,
                    batch_size=self._recipe.evaluation.batch_size or self._recipe.micro,
                    temperature=self._recipe.evaluation.temperature,
                    top_p=self._recipe.evaluation.top_p,
                    seed=self._recipe.seed,
                )
        finally:
            model.train(was_training)
        rows = [
            {"prompt": prompt, "reference": reference, "written": text}
            for (prompt, reference), text in zip(self._prompts, said, strict=True)
        ]
        self._run.put(f"samples/step-{state.global_step:08d}.json", {"step": state.global_step, "samples": rows})
        self._report.tell(matches(rows), state.global_step)


@contextlib.contextmanager
def _any_kernel() -> Iterator[None]:
    """Allows kernels whose result varies: what is written changes no bit of training, and CUDA has no other for the sum
    that `top_p` takes."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(deterministic)


def matches(rows: list[dict[str, str]]) -> dict[str, float]:
    """Returns the share of texts that are the reference, white space at the ends aside, and whose number is its number;
    the latter only where a reference ends on a number."""
    exact = [row["written"].strip() == row["reference"].strip() for row in rows]
    numbers = [(number(row["written"]), number(row["reference"])) for row in rows]
    wanted = [found == truth for found, truth in numbers if truth is not None]
    shares = {"written_exact_match": sum(exact) / len(exact)}
    return shares | ({"written_numeric_match": sum(wanted) / len(wanted)} if wanted else {})
