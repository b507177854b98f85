"""Formats that a model can be exported in, as far as known before training."""

from __future__ import annotations

from baton.errors import UserError
from baton.recipe import extras
from baton.recipe.recipe import Recipe
from baton.store.storage import Storage

# Transformers' model type → its architecture in llama.cpp.
GGUF_NAMES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gpt2": "gpt2",
    "phi3": "phi3",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
}

PACKAGES = {"gguf": ("gguf",), "onnx": ("onnx", "onnxscript", "onnxruntime"), "mlflow": ("mlflow",)}


def check_registry(recipe: Recipe, server: str | None) -> None:
    """Refuses to register a model, or to compare with a registered one, without a registry."""
    if recipe.export.registered_model and server is None:
        raise UserError(
            f"export.registered_model: {recipe.export.registered_model!r} has no registry, as tracking.mlflow is null.",
            remedy="Set tracking.mlflow to the address of the registry's server.",
        )
    if (recipe.evaluation.production or "").startswith("models:") and server is None:
        raise UserError(
            f"evaluation.production: {recipe.evaluation.production!r} has no registry, as tracking.mlflow is null.",
            remedy="Set tracking.mlflow to the address of the registry's server, or name a folder, s3://… or a hub id.",
        )


def check(recipe: Recipe, architecture: str | None = None) -> None:
    """Refuses early what the export stage could only refuse after the training."""
    formats = recipe.export.formats
    if "gguf" in formats:
        if recipe.training.spec.scores:
            raise UserError(
                "export.formats: gguf holds models that write; a reward model scores.", remedy="Leave gguf out."
            )
        if architecture and architecture not in GGUF_NAMES:
            raise UserError(
                f"export.formats: gguf does not hold the architecture {architecture!r}, only {', '.join(GGUF_NAMES)}.",
                remedy="Leave gguf out.",
            )
    if "kserve" in formats and not recipe.export.kserve.model_uri:
        if "safetensors" not in formats:
            raise UserError(
                "export.formats: kserve serves a whole model, and only the adapter is exported.",
                remedy="Add safetensors, or set export.kserve.model_uri.",
            )
        if Storage(recipe.store.uri).is_local:
            raise UserError(
                f"export.formats: kserve cannot fetch a model from the folder {recipe.store.uri}.",
                remedy="Use a store with an address, such as s3://bucket, or set export.kserve.model_uri.",
            )


def require_packages(export_format: str) -> None:
    extras.require_packages(f"export.formats: {export_format}", *PACKAGES.get(export_format, ()))
