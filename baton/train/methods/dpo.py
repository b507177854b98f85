"""Direct preference optimisation and its variants, by TRL's `DPOTrainer`."""

from typing import Any

from trl import DPOConfig, DPOTrainer

from baton.train.build import Setup
from baton.train.protocol import ChunkTrainer
from baton.train.references import moving


class ExactDPO(ChunkTrainer):
    """Logs the reference's log-probabilities and the divergence from it too.

    TRL logs the policy's log-probabilities of both answers, `logps/…`, and its log ratios to the reference times β,
    `rewards/…`; the rest follows from these. `kl` is the mean log ratio over the answers of the rows, in nats per
    answer: an estimate that falls below 0 where the model finds these answers less likely than the reference does.
    """

    loss_types: list[str]
    loss_weights: list[float]

    @property
    def has_likelihood(self) -> bool:
        return "sft" in self.loss_types

    def likelihood_tokens(self, inputs: Any) -> int:
        return int(inputs["completion_mask"].chunk(2)[0][:, 1:].sum())

    def figure_weights(self, inputs: Any) -> dict[str, float]:
        chosen, rejected = (float(side[:, 1:].sum()) for side in inputs["completion_mask"].chunk(2))
        tokens = {"entropy": chosen + rejected, "mean_token_accuracy": chosen}
        return {**super().figure_weights(inputs), **tokens, "logits/chosen": chosen, "logits/rejected": rejected}

    def _compute_loss(self, model: Any, inputs: Any, return_outputs: bool) -> Any:
        # TRL 1.16 computes all losses and figures in here.
        weights = self.loss_weights
        if self.has_likelihood:
            share = self.token_share(inputs)
            kinds = zip(self.loss_types, weights, strict=True)
            self.loss_weights = [weight * share if kind == "sft" else weight for kind, weight in kinds]
        loss = super()._compute_loss(model, inputs, return_outputs)
        self.loss_weights = weights
        metrics = self._metrics["train" if self.model.training else "eval"]
        ratios = {side: metrics[f"rewards/{side}"][-1] / self.beta for side in ("chosen", "rejected")}
        for side, ratio in ratios.items():
            metrics[f"logps/reference_{side}"].append(metrics[f"logps/{side}"][-1] - ratio)
        metrics["kl"].append(sum(ratios.values()) / len(ratios))
        return loss


def build(setup: Setup) -> ChunkTrainer:
    recipe, settings = setup.recipe, setup.recipe.training.dpo
    assert settings
    config = DPOConfig(
        **setup.arguments,
        **moving(settings.sync_reference),
        max_length=recipe.data.max_length,
        beta=settings.beta,
        loss_type=list(settings.loss),
        loss_weights=settings.loss_weights,
        label_smoothing=settings.label_smoothing,
        f_divergence_type=settings.f_divergence,
        use_weighting=settings.weighting,
        ld_alpha=settings.length_desensitization,
        disable_dropout=settings.disable_dropout,
        activation_offloading=recipe.training.activation_offloading,
        router_aux_loss_coef=0.0 if recipe.training.router else None,
    )
    return setup.trainer(DPOTrainer, config, ExactDPO, **setup.with_reference())
