"""Losses that keep the router of a mixture of experts balanced and its logits small."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from baton.errors import UserError
from baton.recipe.training import Router
from baton.train.protocol import ChunkTrainer, Options

Call = tuple[tuple[object, ...], Options]
"""Positional and keyword arguments of a forward pass."""


def balance(logits: torch.Tensor, top_k: int) -> torch.Tensor:
    """Returns the load-balancing loss `C · Σ fᵢ Pᵢ` (Fedus et al., arXiv:2101.03961, equations 4 to 6).

    Args:
        logits: Router logits of one layer, of shape (tokens, experts C).
        top_k: Experts per token; `fᵢ` is the share of all assignments that expert i gets, `Pᵢ` the mean probability
            that the router gives it. 1 where both are even.
    """
    probabilities = logits.softmax(-1)
    return logits.shape[-1] * (_shares(probabilities, top_k) * probabilities.mean(0)).sum()


def unevenness(logits: torch.Tensor, top_k: int) -> torch.Tensor:
    """Returns the auxiliary loss `Σ (fᵢ − 1/C)²` with the gradient of the mean probabilities.

    `fᵢ` counts assignments, which has no gradient; so the value is that of the counts, and the gradient that of the
    same expression in `Pᵢ` (straight-through, Bengio et al., arXiv:1308.3432).

    Args:
        logits: Router logits of one layer, of shape (tokens, experts C).
        top_k: Experts per token.
    """
    probabilities = logits.softmax(-1)
    mean = probabilities.mean(0)
    shares = _shares(probabilities, top_k) + mean - mean.detach()
    return ((shares - 1 / logits.shape[-1]) ** 2).sum()


def z_loss(logits: torch.Tensor) -> torch.Tensor:
    """Returns the router z-loss `mean(log² Σ exp)` (Zoph et al., arXiv:2202.08906, equation 5).

    Args:
        logits: Router logits of one layer, of shape (tokens, experts).
    """
    return (logits.logsumexp(-1) ** 2).mean()


def _shares(probabilities: torch.Tensor, top_k: int) -> torch.Tensor:
    chosen = probabilities.topk(top_k, -1).indices
    return torch.nn.functional.one_hot(chosen, probabilities.shape[-1]).sum((0, 1)) / chosen.numel()


class Routed(ChunkTrainer):
    """Mixin for a `Trainer`: adds the recipe's router losses, mean over layers, to that of the method.

    The model is asked for its router logits in each forward pass of training; padding does not count.
    """

    router: Router | None = None
    _router_loss: torch.Tensor | None = None

    def watch_router(self, router: Router) -> None:
        """Listens to the model's routers.

        Raises:
            UserError: the model has none.
        """
        model = self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model
        config = model.config.get_text_config()
        if not hasattr(config, "output_router_logits"):
            raise UserError(
                f"training.router: {type(model).__name__} is no mixture of experts that returns its router's logits.",
                remedy="Leave training.router out, or choose such a model.",
            )
        model.router_aux_loss_coef = 0.0  # the architecture's own, which it adds where logits are asked for
        self.router = router
        self._top_k = int(getattr(config, "num_experts_per_tok", 1))
        # Heads drop the logits: TRL's fused one returns other outputs, and a score's has no place for them.
        model.base_model.register_forward_pre_hook(self._ask, with_kwargs=True)
        model.base_model.register_forward_hook(self._listen, with_kwargs=True)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, torch.Tensor],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> Any:
        """Returns the method's loss and the router's, which is a mean over micro-batches whatever the former is."""
        own = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        extra, self._router_loss = self._router_loss, None
        if extra is None or not self.model.training:
            return own
        scaled = self.loss_is_scaled_for_ga
        if scaled is None:
            scaled = (self.model_accepts_loss_kwargs and num_items_in_batch is not None) or self.compute_loss_func
        if scaled:
            extra = extra / self.current_gradient_accumulation_steps
        return (own[0] + extra, *own[1:]) if return_outputs else own + extra

    def _ask(self, module: nn.Module, arguments: tuple[object, ...], options: Options) -> Call | None:
        if not module.training or not torch.is_grad_enabled():
            return None
        return arguments, {**options, "output_router_logits": True}

    def _listen(self, module: nn.Module, arguments: tuple[object, ...], options: Options, outputs: object) -> None:
        layers = getattr(outputs, "router_logits", None)
        if not module.training or not torch.is_grad_enabled() or layers is None:
            return
        assert self.router
        mask = options.get("attention_mask")
        counted = mask.flatten().bool() if mask is not None and mask.dim() == 2 else slice(None)
        parts = []
        for logits in layers:
            scores = logits.flatten(0, -2).float()[counted]
            parts.append(
                self.router.balance * balance(scores, self._top_k)
                + self.router.unevenness * unevenness(scores, self._top_k)
                + self.router.z * z_loss(scores)
            )
        self._router_loss = torch.stack(parts).mean()
