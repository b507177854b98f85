"""Kahneman–Tversky optimisation, by TRL's `KTOTrainer`."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from trl import KTOConfig, KTOTrainer
from trl.trainer.utils import use_adapter

from baton.models import rng
from baton.train.build import Setup
from baton.train.protocol import ChunkTrainer
from baton.train.references import moving
from baton.train.weighing import weighted_mean


class ExactKTO(ChunkTrainer):
    """Evaluates against one estimate of the divergence, of all held-out rows."""

    _divergence: float | None = None
    _asked: Iterator[float] = iter(())

    def figure_weights(self, inputs: Any) -> dict[str, float]:
        labels, tokens = inputs["label"].bool(), inputs["completion_mask"][:, 1:].sum(1)
        found = {**super().figure_weights(inputs), "entropy": float(tokens.sum())}
        for side, chosen in (("chosen", labels), ("rejected", ~labels)):
            rows = float(chosen.sum())
            found |= {f"rewards/{side}": rows, f"logps/{side}": rows, f"logits/{side}": float(tokens[chosen].sum())}
        return found

    def evaluation_loop(self, dataloader: Any, *arguments: Any, **options: Any) -> Any:
        if self.weighs and self.calculate_KL:
            self._divergence = self._divergence_of(dataloader)
        try:
            return super().evaluation_loop(dataloader, *arguments, **options)
        finally:
            self._divergence = None

    def _divergence_of(self, dataloader: Any) -> float:
        """Returns the mean log ratio of the model to the reference over the rows of all processes."""
        self.model.eval()
        inner = self.accelerator.unwrap_model(self.model)
        base = "ref" if "ref" in getattr(inner, "peft_config", {}) else None
        # Each process has rows of its own; of virtual workers' each has all, and takes its turn.
        virtual, ours = self.recipe.parallel.virtual_workers, []
        with torch.no_grad(), rng.undisturbed(), self.compute_loss_context_manager():
            for number, inputs in enumerate(dataloader):
                if virtual and number % self.ranks.size != self.ranks.rank:
                    continue
                batch = self._prepare_inputs(inputs)
                ratios = self._compute_kl_logps(self.model, batch)
                with contextlib.nullcontext() if self.ref_model else use_adapter(inner, adapter_name=base):
                    ratios = ratios - self._compute_kl_logps(self.ref_model or self.model, batch)
                if not self.fills_up(number):
                    ours.append((float(ratios.float().mean()), float(len(ratios))))
        return weighted_mean(batch for batches in self.ranks.gather(ours) for batch in batches)

    def _compute_loss(self, model: Any, inputs: Any, return_outputs: bool) -> Any:
        # TRL 1.16 estimates the divergence in here, for each batch.
        self._asked = iter(() if self._divergence is None else (self._divergence, 0.0))
        return super()._compute_loss(model, inputs, return_outputs)

    def _compute_kl_logps(self, model: Any, batch: Any) -> Any:
        # TRL 1.16 takes the mean of this result, for the model and then for the reference.
        known = next(self._asked, None)
        if known is None:
            return super()._compute_kl_logps(model, batch)
        return torch.tensor([known], device=self.accelerator.device)


def build(setup: Setup) -> ChunkTrainer:
    recipe, settings = setup.recipe, setup.recipe.training.kto
    assert settings
    config = KTOConfig(
        **setup.arguments,
        **moving(settings.sync_reference),
        max_length=recipe.data.max_length,
        beta=settings.beta,
        loss_type=settings.loss,
        desirable_weight=settings.desirable_weight,
        undesirable_weight=settings.undesirable_weight,
        disable_dropout=settings.disable_dropout,
        activation_offloading=recipe.training.activation_offloading,
        router_aux_loss_coef=0.0 if recipe.training.router else None,
    )
    # KTO takes rows in their order, and pairs each prompt with its neighbour's completion in a micro-batch to estimate
    # the divergence: rows are shuffled once by the seed, and joined with neighbours here. Micro-batches of several
    # processes make one estimate, and neighbours may go to different ones. An evaluation makes one of all its rows.
    rows, at_once = config.per_device_train_batch_size, config.per_device_eval_batch_size * config.world_size
    setup = dataclasses.replace(
        setup,
        train=_with_neighbours(setup.train.shuffle(seed=recipe.seed), rows * config.world_size),
        held_out=setup.held_out and _with_neighbours(setup.held_out, len(setup.held_out) if setup.weighs else at_once),
    )
    return setup.trainer(KTOTrainer, config, ExactKTO, **setup.with_reference())


def _with_neighbours(rows: Any, batch_size: int) -> Any:
    def join(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        completions = batch["completion_ids"]
        return {"KL_completion_ids": [completions[-1], *completions[:-1]]}

    return rows.map(join, batched=True, batch_size=batch_size, load_from_cache_file=False)
