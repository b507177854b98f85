"""The model in MLflow's `transformers` flavour, with signature, example and requirements."""

from __future__ import annotations

import logging
from importlib.metadata import version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PACKAGES = ("transformers", "torch", "accelerate")
"""What the model needs where it is loaded, pinned to what it was checked with."""


def write(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, target: str, *, example: str, scores: bool
) -> None:
    """Writes the model.

    Args:
        model: The whole model.
        tokenizer: Its tokenizer.
        target: Folder to write to; it does not exist yet.
        example: A text as the model is given it.
        scores: Whether it scores texts instead of writing them.
    """
    import mlflow
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, DataType, Schema

    logging.getLogger("mlflow").setLevel(logging.ERROR)
    texts = Schema([ColSpec(DataType.string)])
    labelled = Schema([ColSpec(DataType.string, "label"), ColSpec(DataType.double, "score")])
    mlflow.transformers.save_model(
        transformers_model={"model": model, "tokenizer": tokenizer},
        path=target,
        task="text-classification" if scores else "text-generation",
        signature=ModelSignature(inputs=texts, outputs=labelled if scores else texts),
        input_example=[example],
        pip_requirements=[f"{name}=={version(name).partition('+')[0]}" for name in PACKAGES],
    )
