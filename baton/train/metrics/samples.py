"""Texts that the model generates in the course of training."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TypedDict

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback, TrainerState

from baton.models import generate, metrics, rng
from baton.models.metrics import Judge
from baton.models.prompts import held_out_prompts
from baton.recipe.recipe import Recipe
from baton.runs.run import Run
from baton.train import imports


class Sample(TypedDict):
    """A held-out prompt, the data's answer, and the model's."""

    prompt: str
    reference: str
    written: str


class SampleCallback(TrainerCallback):
    """Generates for held-out prompts every few steps and measures it, as the last evaluation does."""

    stateless = True

    def __init__(
        self,
        run: Run,
        recipe: Recipe,
        tokenizer: PreTrainedTokenizerBase,
        tell: Callable[[dict[str, float], int], None],
        tick: Callable[[], None],
    ) -> None:
        self._run, self._recipe, self._tokenizer, self._tell, self._tick = run, recipe, tokenizer, tell, tick
        self._every = recipe.evaluation.write_every or 0
        self._prompts = held_out_prompts(run, recipe, tokenizer, recipe.evaluation.samples)
        self._batch_size = recipe.evaluation_batch_size
        with rng.undisturbed():
            self._judge = Judge(recipe.evaluation, self._prompts, self._batch_size)

    def on_step_end(
        self, args: object, state: TrainerState, control: object, model: PreTrainedModel, **_: object
    ) -> None:
        if not self._prompts or state.global_step % self._every:
            return
        was_training = model.training
        model.eval()
        try:
            # No trace in training: tokens come from generators of their own, and metrics or functions that draw from
            # those of training draw from a copy. The other ranks wait meanwhile, which `tick` tells the watchdog.
            with rng.undisturbed(), _any_kernel():
                written = generate.write_all(
                    model,
                    self._tokenizer,
                    [prompt for prompt, _ in self._prompts],
                    max_new_tokens=self._recipe.evaluation.max_new_tokens,
                    max_length=self._recipe.data.max_length,
                    batch_size=self._batch_size,
                    temperature=self._recipe.evaluation.temperature,
                    top_p=self._recipe.evaluation.top_p,
                    seed=self._recipe.seed,
                    progress=lambda *_: self._tick(),
                )
                judged = self._judge.judge(written).figures
        finally:
            model.train(was_training)
        samples: list[Sample] = [
            {"prompt": prompt, "reference": reference, "written": text}
            for (prompt, reference), text in zip(self._prompts, written, strict=True)
        ]
        self._run.put(f"samples/step-{state.global_step:08d}.json", {"step": state.global_step, "samples": samples})
        self._tell(matches(samples) | _logged(judged), state.global_step)


@contextlib.contextmanager
def _any_kernel() -> Iterator[None]:
    """Allows kernels whose result varies: samples change no bit of training, and CUDA has no other sum for `top_p`."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    imports.use_deterministic(False)
    try:
        yield
    finally:
        imports.use_deterministic(deterministic)


def matches(samples: list[Sample]) -> dict[str, float]:
    """Returns the shares of texts that equal the reference, and whose number equals its number."""
    written, references = [sample["written"] for sample in samples], [sample["reference"] for sample in samples]
    # A share over no row is None and left out: perhaps no sample has a reference, or none with a number.
    return _logged(
        metrics.exact_match(written, references).figures | metrics.numeric_match(written, references).figures
    )


def _logged(measured: dict[str, metrics.Figure]) -> dict[str, float]:
    return {f"written_{name}": value for name, value in metrics.figure_values(measured).items() if value is not None}
