"""A chunk on several nodes: a Kubeflow Trainer `TrainJob` that the stage creates, follows and takes away."""

from components.train_chunk.trainjob.stage import bring, is_wanted

__all__ = ["bring", "is_wanted"]
