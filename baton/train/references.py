"""A reference model: one that follows the trained one, and one that TRL loads by itself."""

from transformers import PreTrainedModel
from trl.trainer.callbacks import SyncRefModelCallback

from baton.models import vocabulary
from baton.recipe.methods import SyncReference
from baton.train.protocol import ChunkTrainer, Options, StateDict

SyncRefModelCallback.stateless = True  # `MovingReference` saves the weights that it moves


def moving(sync: SyncReference | None) -> Options:
    if sync is None:
        return {}
    return {"sync_ref_model": True, "ref_model_sync_steps": sync.every, "ref_model_mixup_alpha": sync.mix}


class MovingReference(ChunkTrainer):
    def method_state(self) -> StateDict:
        return {**super().method_state(), "reference": self.ref_model.state_dict()}

    def load_method_state(self, saved: StateDict) -> None:
        super().load_method_state(saved)
        if "reference" in saved:
            self.ref_model.load_state_dict(saved["reference"])


class OwnReference(ChunkTrainer):
    """Mixin for TRL's trainers that load their reference from the base's files: adds the rows of new tokens."""

    _reference: PreTrainedModel | None

    @property
    def ref_model(self) -> PreTrainedModel | None:
        return self._reference

    @ref_model.setter
    def ref_model(self, model: PreTrainedModel | None) -> None:
        # Once, as loaded: TRL sets it again after wrapping it or splitting it into shards.
        if model is not None and "_reference" not in vars(self):
            vocabulary.resize_embeddings(model, self.processing_class)
        self._reference = model
