"""Export: the trained model as files that anyone's `from_pretrained` reads, committed like a checkpoint."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from typing import Any

from components.shared import bundles, events, models, trained
from components.shared.recipe import Recipe
from components.shared.runs import Run

NOT_MODEL = (
    "optimizer.pt",
    "scheduler.pt",
    "scaler.pt",
    "rng_state.pth",
    "trainer_state.json",
    "baton_state.pt",
)
"""Files of a checkpoint that only training needs."""


def export_run(run_uri: str) -> dict[str, Any]:
    """Exports a run's last checkpoint, once.

    Returns:
        `model_uri`, and `bytes` and number of `files`.
    """
    started = time.time()
    run = Run.open(run_uri)
    recipe = run.recipe()
    prefix = run.path("export")
    manifest = bundles.usable_manifest(run.storage, prefix)
    if manifest is None:
        with tempfile.TemporaryDirectory(prefix="baton-export-") as scratch:
            target = f"{scratch}/model"
            os.makedirs(target)
            _write(run, recipe, trained.final_folder(run, scratch), target)
            _, checkpoint = trained.chosen_checkpoint(run)
            meta = {"run": run.name, "digest": checkpoint.meta["digest"]}
            manifest, _ = bundles.publish(run.storage, prefix, target, kind="model", meta=meta)
    model_uri = run.storage.uri(manifest.path(prefix))
    run.put("export.json", {"model_uri": model_uri, "bytes": manifest.bytes})
    run.record("export", {"seconds": time.time() - started})
    events.emit("exported", uri=model_uri, bytes=manifest.bytes)
    return {"model_uri": model_uri, "bytes": manifest.bytes, "files": len(manifest.files)}


def _write(run: Run, recipe: Recipe, checkpoint: str, target: str) -> None:
    if "safetensors" in recipe.export.formats and (recipe.adapter or _has_experts(checkpoint)):
        tokenizer = models.load_tokenizer(checkpoint, trust_remote_code=recipe.model.trust_remote_code)
        merged: Any = trained.trained_model(recipe, tokenizer, checkpoint, whole=True)
        (merged.merge_and_unload() if recipe.adapter else merged).save_pretrained(target)
        tokenizer.save_pretrained(target)
    else:
        for name in sorted(os.listdir(checkpoint)):
            if name not in (*NOT_MODEL, "README.md") and os.path.isfile(f"{checkpoint}/{name}"):
                shutil.copyfile(f"{checkpoint}/{name}", f"{target}/{name}")
    with open(f"{target}/README.md", "w", encoding="utf-8") as file:
        file.write(_card(run, recipe))


def _has_experts(checkpoint: str) -> bool:
    """Tells whether weights are of a mixture of experts, which a checkpoint holds under the names in memory."""
    from transformers import AutoConfig

    if not os.path.isfile(f"{checkpoint}/config.json"):
        return False
    config = AutoConfig.from_pretrained(checkpoint).get_text_config()
    return any(hasattr(config, name) for name in ("num_local_experts", "num_experts", "n_routed_experts"))


def _card(run: Run, recipe: Recipe) -> str:
    step, manifest = trained.chosen_checkpoint(run)
    split, evaluation = run.get("split.json") or {}, run.get("evaluation.json")
    base = recipe.model.base or f"from scratch ({recipe.model.from_scratch and recipe.model.from_scratch.architecture})"
    lines = [
        f"# {recipe.name}",
        "",
        f"Trained by Baton, run `{run.name}`, {step} steps in {recipe.chunks.count} chunk(s).",
        "",
        f"- base: {base}",
        f"- method: {recipe.training.method}" + (", LoRA" if recipe.adapter else ""),
        f"- data: {split.get('source')}, {split.get('train')} training rows, {split.get('eval')} held out",
        f"- state digest: `{manifest.meta['digest']}`",
        f"- resume proof: `{manifest.meta['chain']}`",
    ]
    if evaluation:
        lines.append(f"- held-out rows, before → after training: {evaluation['summary']}")
    return "\n".join(lines) + "\n"
