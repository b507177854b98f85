"""Evaluation: figures on held-out rows and samples, of the model before and after training."""

from __future__ import annotations

import tempfile
import time
from typing import TYPE_CHECKING, Any

from components.evaluate import measures
from components.shared import code, events, generation, models, tracking, trained
from components.shared.prompts import held_out_prompts
from components.shared.runs import Run

if TYPE_CHECKING:
    pass


def evaluate_run(run_uri: str) -> dict[str, Any]:
    """Compares the trained model with what it started from, on rows it has not seen.

    Returns:
        `before` and `after`, each with the figures of `measures.measure`; `samples`, and a `summary` in words.
    """
    import datasets
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    started = time.time()
    run = Run.open(run_uri)
    recipe = run.settled_recipe()
    found: dict[str, Any] = {}
    limits = {"max_new_tokens": recipe.evaluation.max_new_tokens, "max_length": recipe.data.max_length}
    with tempfile.TemporaryDirectory(prefix="baton-evaluate-") as scratch:
        tokens = trained.tokens_folder(run, scratch)
        code.install(code.fetch(run, scratch))
        tokenizer = models.load_tokenizer(f"{tokens}/tokenizer", trust_remote_code=recipe.model.trust_remote_code)
        held_out = datasets.load_from_disk(f"{tokens}/eval")
        prompts = held_out_prompts(run, recipe, tokenizer, recipe.evaluation.samples)
        start = models.start_model(recipe, tokenizer, trained.base_folder(recipe))
        writes: dict[str, list[str]] = {}
        likelihoods: dict[str, dict[str, list[float]]] = {}
        for when in ("before", "after"):
            model = (
                start
                if when == "before"
                else trained.trained_model(recipe, tokenizer, trained.final_folder(run, scratch))
            )
            model = model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
            found[when], likelihoods[when] = measures.measure(model, tokenizer, held_out, recipe)
            if when == "after" and likelihoods[when]:
                found[when] |= measures.preference(**likelihoods)
            writes[when] = [generation.write(model, tokenizer, prompt, **limits) for prompt, _ in prompts]
            events.emit("evaluated", when=when, **found[when])
            found["parameters"] = sum(parameter.numel() for parameter in model.parameters())
    found["samples"] = [
        {"prompt": prompt, "reference": reference, "before": before, "after": after}
        for (prompt, reference), before, after in zip(prompts, writes["before"], writes["after"], strict=True)
    ]
    found["summary"] = summary(found["before"], found["after"])
    run.put("evaluation.json", found)
    step = run.plan().num_steps
    tracking.log_metrics(run, {f"final_{when}_{k}": v for when in writes for k, v in found[when].items()}, step)
    run.record("evaluate", {"seconds": time.time() - started})
    return found


def summary(before: dict[str, float], after: dict[str, float]) -> str:
    """Returns the figures that say most, in words."""
    named = (("loss", "held-out loss"), ("reward", "reward"), ("accuracy", "accuracy"))
    found = [f"{words} {before[key]:.4g} → {after[key]:.4g}" for key, words in named if key in after]
    if "reward_accuracy" in after:
        found.append(f"preference accuracy {after['reward_accuracy']:.0%}, margin {after['reward_margin']:.3g} nats")
    return ", ".join(found)
