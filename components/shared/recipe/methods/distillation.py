"""Distillation: a student learns from a teacher on what it writes itself."""

from __future__ import annotations

from typing import Annotated

from baton.components.shared.recipe.hooks import short
from baton.components.shared.recipe.methods.completions import OWN_ORDER, ROUND, Completions
from baton.components.shared.recipe.methods.references import Share
from baton.components.shared.recipe.methods.spec import MethodSpec, SecondModel
from baton.components.shared.recipe.model import NamedModel


class Distillation(Completions):
    """On-policy distillation: the model writes, and learns to expect each token as its teacher does
    (arXiv:2306.13649)."""

    teacher: Annotated[NamedModel, short("base")]
    """The model to learn from, of the same tokenizer and vocabulary; `teacher: org/model` is short for its `base`."""
    beta: Share = 1.0
    """Which divergence between the two: 0 forward KL, 1 reverse KL, between them the generalized Jensen–Shannon
    divergence."""


SPEC = MethodSpec(
    name="distillation",
    settings=Distillation,
    requires="a teacher",
    example={"teacher": "org/model"},
    formats=("prompt",),
    rows="prompts",
    own_order=OWN_ORDER,
    needs_all_rows=True,
    strategies=("ddp", "fsdp"),
    second_model=SecondModel(name="teacher", is_named=True),
    buffers=ROUND,
    figures=("divergence",),
    logged={"completions/mean_length": "completion length", "entropy": "entropy"},
    forkable=("beta",),
)
