"""The training methods, one file each with its settings and its `SPEC`; `SPECS` has all of them by name.

Adding one: its file here, three lines below (its import, its field, its name), its trainer in
`components/train_chunk/methods/`, and its row in `tests/resume/matrix.py`.
"""

from __future__ import annotations

from typing import Literal

from pydantic import SerializerFunctionWrapHandler, model_serializer

from baton.components.shared.recipe.base import Section
from baton.components.shared.recipe.methods.completions import REWARDS, Completions, Generation, RewardFunction
from baton.components.shared.recipe.methods.cpo import CPO
from baton.components.shared.recipe.methods.cpo import SPEC as CPO_SPEC
from baton.components.shared.recipe.methods.distillation import SPEC as DISTILLATION_SPEC
from baton.components.shared.recipe.methods.distillation import Distillation
from baton.components.shared.recipe.methods.dpo import DPO
from baton.components.shared.recipe.methods.dpo import SPEC as DPO_SPEC
from baton.components.shared.recipe.methods.grpo import GRPO
from baton.components.shared.recipe.methods.grpo import SPEC as GRPO_SPEC
from baton.components.shared.recipe.methods.kto import KTO
from baton.components.shared.recipe.methods.kto import SPEC as KTO_SPEC
from baton.components.shared.recipe.methods.orpo import ORPO
from baton.components.shared.recipe.methods.orpo import SPEC as ORPO_SPEC
from baton.components.shared.recipe.methods.pretrain import SPEC as PRETRAIN_SPEC
from baton.components.shared.recipe.methods.references import Referenced, SyncReference
from baton.components.shared.recipe.methods.reward import SPEC as REWARD_SPEC
from baton.components.shared.recipe.methods.reward import Reward
from baton.components.shared.recipe.methods.rloo import RLOO
from baton.components.shared.recipe.methods.rloo import SPEC as RLOO_SPEC
from baton.components.shared.recipe.methods.sft import SPEC as SFT_SPEC
from baton.components.shared.recipe.methods.spec import MethodSpec
from baton.components.shared.recipe.model import NamedModel

_ALL = (
    SFT_SPEC,
    PRETRAIN_SPEC,
    REWARD_SPEC,
    DPO_SPEC,
    KTO_SPEC,
    ORPO_SPEC,
    CPO_SPEC,
    GRPO_SPEC,
    RLOO_SPEC,
    DISTILLATION_SPEC,
)
SPECS: dict[str, MethodSpec] = {spec.name: spec for spec in _ALL}
"""Every training method by its name."""
ALWAYS_WRITTEN = ("reward", "dpo", "kto", "orpo", "cpo", "grpo", "rloo")
"""Sections that a recipe is written with even where they are empty. Those of later methods are left out then: a run's
identity and a compiled pipeline are made of what is written, and a new method changes neither."""


class Methods(Section):
    """The part of `training` that differs by method: which one, and the section of each."""

    method: Literal["sft", "pretrain", "reward", "dpo", "kto", "orpo", "cpo", "grpo", "rloo", "distillation"] = "sft"
    """Training method: supervised fine-tuning, next-token prediction on plain text, reward modelling, on preferences
    (`dpo`, `kto`, `orpo`, `cpo`), by rewards of what the model writes (`grpo`, `rloo`), or from a teacher
    (`distillation`)."""
    reward: Reward | None = None
    """Settings of `method: reward`."""
    dpo: DPO | None = None
    """Settings of `method: dpo`."""
    kto: KTO | None = None
    """Settings of `method: kto`."""
    orpo: ORPO | None = None
    """Settings of `method: orpo`."""
    cpo: CPO | None = None
    """Settings of `method: cpo`."""
    grpo: GRPO | None = None
    """Settings of `method: grpo`."""
    rloo: RLOO | None = None
    """Settings of `method: rloo`."""
    distillation: Distillation | None = None
    """Settings of `method: distillation`."""

    @model_serializer(mode="wrap")
    def _without_later_sections(self, handler: SerializerFunctionWrapHandler) -> dict[str, object]:
        written: dict[str, object] = handler(self)
        later = SPECS.keys() - ALWAYS_WRITTEN
        return {name: value for name, value in written.items() if value is not None or name not in later}

    @property
    def spec(self) -> MethodSpec:
        """What is known of the method."""
        return SPECS[self.method]

    @property
    def settings(self) -> Section | None:
        """The method's own section, None where it has none."""
        return getattr(self, self.method, None)

    @property
    def completions(self) -> Completions | None:
        """Settings of a method that lets the model write."""
        return self.settings if isinstance(self.settings, Completions) else None

    @property
    def generation(self) -> Generation | None:
        """Settings of a method that judges what the model writes by rewards."""
        return self.settings if isinstance(self.settings, Generation) else None

    @property
    def second_model(self) -> tuple[str, NamedModel] | None:
        """Role and origin of the second model that the method's settings name, None where they name none."""
        second = self.spec.second_model
        named = getattr(self.settings, second.name) if second and second.is_named else None
        return (second.name, named) if second and isinstance(named, NamedModel) else None

    @property
    def sync_reference(self) -> SyncReference | None:
        """How the reference follows the model, None where it does not."""
        return self.settings.sync_reference if isinstance(self.settings, Referenced) else None

    def has_reference(self, *, adapter: bool) -> bool:
        """Tells whether a copy of the start model is held; an adapter's reference is its base."""
        return isinstance(self.settings, Referenced) and self.settings.beta > 0 and not adapter


__all__ = [
    "CPO",
    "DPO",
    "GRPO",
    "KTO",
    "ORPO",
    "REWARDS",
    "RLOO",
    "SPECS",
    "Completions",
    "Generation",
    "MethodSpec",
    "Methods",
    "Referenced",
    "Reward",
    "RewardFunction",
    "SyncReference",
]
