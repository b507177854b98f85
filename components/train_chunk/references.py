"""A reference model that follows the trained one."""

from __future__ import annotations

from typing import Any

from trl.trainer.callbacks import SyncRefModelCallback

from components.shared.recipe.methods import SyncReference

SyncRefModelCallback.stateless = True  # what it moves is saved by `MovingReference`


def moving(sync: SyncReference | None) -> dict[str, Any]:
    """Returns TRL's settings of a reference that follows; none where it stands still."""
    if sync is None:
        return {}
    return {"sync_ref_model": True, "ref_model_sync_steps": sync.every, "ref_model_mixup_alpha": sync.mix}


class MovingReference:
    """Mixin for trainers with a reference: keeps its weights with the checkpoint, where they move."""

    def method_state(self) -> dict[str, Any]:
        """Returns the reference's weights, if they move."""
        trainer: Any = self
        kept: dict[str, Any] = super().method_state()  # type: ignore[misc]
        if trainer.args.sync_ref_model:
            kept["reference"] = trainer.ref_model.state_dict()
        return kept

    def load_method_state(self, saved: dict[str, Any]) -> None:
        """Puts them back."""
        trainer: Any = self
        super().load_method_state(saved)  # type: ignore[misc]
        if "reference" in saved:
            trainer.ref_model.load_state_dict(saved["reference"])
