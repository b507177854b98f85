"""Packages that some recipes need beyond the base install, and the extra of Baton with each."""

import importlib.util

from baton.errors import UserError
from baton.recipe.evaluation import METRICS, Evaluation
from baton.recipe.recipe import Recipe

# Module → extra.
EXTRAS = {
    "bert_score": "evaluate",
    "bitsandbytes": "bitsandbytes",
    "lm_eval": "evaluate",
    "gguf": "gguf",
    "onnx": "export",
    "onnxruntime": "export",
    "onnxscript": "export",
    "rouge_score": "metrics",
    "sacrebleu": "metrics",
    "optuna": "sweep",
    "tensorboard": "tensorboard",
    "wandb": "wandb",
}


def require_packages(what: str, *modules: str) -> None:
    """Requires installed modules, by import name, for the setting or command `what`."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        extra = EXTRAS.get(missing[0])
        package = f"'baton-llm[{extra}]'" if extra else " ".join(missing)
        raise UserError(
            f"{what} needs {', '.join(missing)}, which is not installed.",
            remedy=f"Run `pip install {package}`, or build the image with {f'EXTRAS={extra}' if extra else 'it'}.",
        )


def require_metric_packages(evaluation: Evaluation) -> None:
    """Requires the packages of a recipe's metrics."""
    for metric in evaluation.metrics:
        if package := METRICS[metric].package:
            require_packages(f"evaluation.metrics: {metric}", package)


def require_bitsandbytes(recipe: Recipe) -> None:
    """Requires the package of weights and optimizer state in few bits."""
    if recipe.uses_bitsandbytes:
        optimizer = f"training.optimizer: {recipe.training.optimizer}"
        require_packages("model.quantization" if recipe.model.quantization else optimizer, "bitsandbytes")


def require_all_packages(recipe: Recipe) -> None:
    """Requires the packages of all stages before the first, but for exports and DeepSpeed, checked elsewhere."""
    require_bitsandbytes(recipe)
    require_metric_packages(recipe.evaluation)
    if recipe.evaluation.tasks:
        require_packages("evaluation.tasks", "lm_eval")
    for sink in ("tensorboard", "wandb"):
        if getattr(recipe.tracking, sink):
            require_packages(f"tracking.{sink}", sink)
