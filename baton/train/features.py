"""The features of a recipe's trainer, in the order in which they act; among them parameter groups and router losses."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn
from transformers import TrainingArguments

from baton.errors import UserError
from baton.recipe.recipe import Recipe
from baton.recipe.training import Group
from baton.train.generation import ConversationalPrompts, ResumableGeneration, VirtualGeneration
from baton.train.guard import Guarded
from baton.train.protocol import ChunkTrainer, Options
from baton.train.references import MovingReference
from baton.train.sharding import Fsdp, Zero
from baton.train.virtual import VirtualWorkers
from baton.train.weighing import DealtRows, WeighedRows

ParamGroup = dict[str, Any]
Call = tuple[tuple[object, ...], Options]  # a forward pass's arguments


def features_of(recipe: Recipe, config: TrainingArguments, *, weighs: bool) -> list[type[ChunkTrainer]]:
    """Returns the mixins that a recipe uses, in their order; a method's own go before them."""
    training, spec, parallel = recipe.training, recipe.training.spec, recipe.parallel
    # With virtual workers, the method's configuration knows of one process.
    is_virtual, is_dealt = bool(parallel.virtual_workers), config.world_size > 1
    used: dict[type[ChunkTrainer], object] = {
        MovingReference: getattr(config, "sync_ref_model", False),
        VirtualGeneration: spec.generates and is_virtual,
        ResumableGeneration: spec.generates and not is_virtual,
        ConversationalPrompts: spec.generates,
        # A skipped step is passed over whole, whoever makes its passes.
        Guarded: training.guard,
        VirtualWorkers: is_virtual,
        DealtRows: is_dealt,
        WeighedRows: weighs and not (is_virtual or is_dealt),
        Zero: is_dealt and parallel.is_zero,
        Fsdp: is_dealt and parallel.strategy == "fsdp",
        ParamGroups: training.groups or training.compile_optimizer,
        # After the weighing of the loss: a micro-batch's router loss counts as its rows do.
        RouterLosses: training.router,
    }
    return [feature for feature, is_used in used.items() if is_used]


class ParamGroups(ChunkTrainer):
    """Mixin: groups of parameters with their own learning rate, weight decay and clipping; a compiled optimizer."""

    _rates: dict[str, float] | None = None

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        if self.optimizer is not None:
            return self.optimizer
        optimizer: torch.optim.Optimizer = super().create_optimizer(model)
        if groups := self.recipe.training.groups:
            names = {id(parameter): name for name, parameter in self.model.named_parameters()}
            optimizer.param_groups[:] = [
                part for group in optimizer.param_groups for part in _split(group, groups, names)
            ]
            present = {part.get("name") for part in optimizer.param_groups}
            for group in groups:
                if _name(group) not in present:
                    raise UserError(
                        f"training.groups: pattern {group.pattern!r} fits no trained parameter that an earlier group "
                        "left.",
                        remedy="Check it against the model's parameter names, and the order of groups.",
                    )
        if self.recipe.training.compile_optimizer:
            optimizer.step = torch.compile(optimizer.step)  # type: ignore[assignment, method-assign]
        return optimizer

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        # transformers 5.23 clips all gradients together; a group with its own norm is clipped after that.
        norm = super()._clip_grad_norm(model)
        for group in self.recipe.training.groups:
            if group.max_grad_norm:
                parts = [x for x in self.optimizer.param_groups if x.get("name") == _name(group)]
                torch.nn.utils.clip_grad_norm_([p for x in parts for p in x["params"]], group.max_grad_norm)
        return norm

    def _get_learning_rate(self) -> float:
        # transformers 5.23 reads the first group's rate before the schedule's step and logs it after; so do all here.
        groups = self.optimizer.param_groups
        self._rates = {f"learning_rate/{x['name']}": float(x["lr"]) for x in groups if "name" in x}
        return super()._get_learning_rate()

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "learning_rate" in logs:
            logs |= self._rates or {}
        super().log(logs, start_time)


def _name(group: Group) -> str:
    return group.name or group.pattern


def _split(whole: ParamGroup, groups: list[Group], names: dict[int, str]) -> list[ParamGroup]:
    settings = {key: value for key, value in whole.items() if key != "params"}
    parts: list[list[torch.nn.Parameter]] = [[] for _ in (*groups, None)]
    for parameter in whole["params"]:
        at = next((i for i, x in enumerate(groups) if re.search(x.pattern, names[id(parameter)])), len(groups))
        parts[at].append(parameter)
    result = [{**settings, "params": parts[-1]}]
    for group, parameters in zip(groups, parts, strict=False):
        named = {"name": _name(group), "lr": group.learning_rate, "weight_decay": group.weight_decay}
        own = {key: value for key, value in named.items() if value is not None}
        result.append({**settings, **own, "params": parameters})
    return [part for part in result if part["params"]]


class RouterLosses(ChunkTrainer):
    """Mixin: adds losses that keep the router of a mixture of experts balanced and its logits small.

    Losses are means over layers. Each forward pass of training returns its router logits; padding does not count.
    """

    _router_loss: torch.Tensor | None = None

    def watch_router(self) -> None:
        model = self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model
        config = model.config.get_text_config()
        if not hasattr(config, "output_router_logits"):
            raise UserError(
                f"training.router: {type(model).__name__} is no mixture of experts that returns its router's logits.",
                remedy="Leave training.router out, or choose such a model.",
            )
        model.router_aux_loss_coef = 0.0  # the architecture's own, which it adds where logits are asked for
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
        own = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        # The router's loss is a mean over micro-batches, whatever the method's own is.
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
        layers, router = getattr(outputs, "router_logits", None), self.recipe.training.router
        if not module.training or not torch.is_grad_enabled() or layers is None:
            return
        assert router
        mask = options.get("attention_mask")
        counted = mask.flatten().bool() if mask is not None and mask.dim() == 2 else slice(None)
        parts = []
        for logits in layers:
            scores = logits.flatten(0, -2).float()[counted]
            parts.append(
                router.balance * balance(scores, self._top_k)
                + router.unevenness * unevenness(scores, self._top_k)
                + router.z * z_loss(scores)
            )
        self._router_loss = torch.stack(parts).mean()


def balance(logits: torch.Tensor, top_k: int) -> torch.Tensor:
    """Returns the load-balancing loss `C · Σ fᵢ Pᵢ` (Fedus et al., arXiv:2101.03961, equations 4 to 6).

    Logits are of shape (tokens, experts C). `fᵢ` is expert i's share of all assignments, `top_k` per token; `Pᵢ` is its
    mean probability. The loss is 1 where both are even.
    """
    probabilities = logits.softmax(-1)
    return logits.shape[-1] * (_shares(probabilities, top_k) * probabilities.mean(0)).sum()


def unevenness(logits: torch.Tensor, top_k: int) -> torch.Tensor:
    """Returns the auxiliary loss `Σ (fᵢ − 1/C)²` of logits of shape (tokens, experts C).

    `fᵢ` counts assignments and has no gradient: the gradient is that of the same expression in `Pᵢ` (straight-through,
    Bengio et al., arXiv:1308.3432).
    """
    probabilities = logits.softmax(-1)
    mean = probabilities.mean(0)
    shares = _shares(probabilities, top_k) + mean - mean.detach()
    return ((shares - 1 / logits.shape[-1]) ** 2).sum()


def z_loss(logits: torch.Tensor) -> torch.Tensor:
    """Returns the router z-loss `mean(log² Σ exp)` (Zoph et al., arXiv:2202.08906, equation 5)."""
    return (logits.logsumexp(-1) ** 2).mean()


def _shares(probabilities: torch.Tensor, top_k: int) -> torch.Tensor:
    chosen = probabilities.topk(top_k, -1).indices
    return torch.nn.functional.one_hot(chosen, probabilities.shape[-1]).sum((0, 1)) / chosen.numel()
