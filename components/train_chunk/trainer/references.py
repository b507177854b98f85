"""A reference model that follows the trained one."""

from __future__ import annotations

from trl.trainer.callbacks import SyncRefModelCallback

from baton.components.shared.recipe.methods import SyncReference
from baton.components.train_chunk.trainer.base import ChunkTrainer, Options, StateDict

SyncRefModelCallback.stateless = True  # what it moves is saved by `MovingReference`


def moving(sync: SyncReference | None) -> Options:
    """Returns TRL's settings of a reference that follows; none where it stands still."""
    if sync is None:
        return {}
    return {"sync_ref_model": True, "ref_model_sync_steps": sync.every, "ref_model_mixup_alpha": sync.mix}


class MovingReference(ChunkTrainer):
    """Mixin for trainers with a reference: keeps its weights with the checkpoint, where they move."""

    def method_state(self) -> StateDict:
        """Returns the reference's weights, if they move."""
        state = super().method_state()
        if self.args.sync_ref_model:
            state["reference"] = self.ref_model.state_dict()
        return state

    def load_method_state(self, saved: StateDict) -> None:
        """Restores them."""
        super().load_method_state(saved)
        if "reference" in saved:
            self.ref_model.load_state_dict(saved["reference"])
