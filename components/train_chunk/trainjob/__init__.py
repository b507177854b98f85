"""A chunk on several nodes: a Kubeflow Trainer `TrainJob` that the stage creates, follows and deletes."""

from baton.components.train_chunk.trainjob.stage import is_wanted, run

__all__ = ["is_wanted", "run"]
