"""Rules between the sections of a recipe.

`check` refuses what cannot be trained, wherever a recipe is read. `check_effects` refuses what is set and would do
nothing; it is for recipes that people hand in, as a run that was started with such a setting has to resume.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from baton.components.shared.recipe.base import amount
from baton.components.shared.recipe.chunks import MAX_CHUNKS
from baton.components.shared.recipe.data import MAX_SHARDS
from baton.components.shared.recipe.evaluation import REGISTERED
from baton.components.shared.recipe.methods import Referenced
from baton.components.shared.recipe.parallel_rules import check_nodes, check_parallel
from baton.components.shared.recipe.sections import Sections

PLATEAU = ("reduce_lr_on_plateau", "greedy")
"""Schedules that look at evaluations."""

MAX_PROCESSES = 36
"""Processes that may train one chunk: one that fails each time is to end before it has cost a day of a GPU."""

ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://|file:|(databricks|databricks-uc|uc)(:|$)|[~.]?/|\.\./|[^:]+/")
"""Beginning of an address of MLflow: a scheme, one of its own words, or a path."""


def check(recipe: Sections) -> None:
    """Checks that the sections of a recipe fit each other; phases are recipes, and are checked as such.

    Raises:
        ValueError: they do not; the message names the setting and the remedy.
    """
    _check_phases(recipe)
    _check_sweep(recipe)
    _check_retrain(recipe)
    if recipe.phases:
        return
    for rule in RULES:
        rule(recipe)


def check_effects(recipe: Sections) -> None:
    """Checks that every setting that is given does something where it stands.

    Raises:
        ValueError: one does nothing; the message names it and the remedy.
    """
    for part in recipe.phase_recipes() or [recipe]:
        _check_effects(part)


def _check_phases(recipe: Sections) -> None:
    names = [phase.name for phase in recipe.phases]
    if len(set(names)) < len(names):
        raise ValueError(f"phases: {', '.join(names)} are not different names")
    if recipe.phases and recipe.training.guard and recipe.training.guard.skip:
        raise ValueError("training.guard.skip: each phase counts its own steps; give the list in the phase it is for")
    parts = recipe.phase_recipes()
    for phase, part in zip(recipe.phases, parts, strict=True):
        if part.training.spec.scores and phase is not recipe.phases[-1]:
            raise ValueError(f"phases: {phase.name} trains a reward model, which nothing can start from; put it last")
    slots = sum(part.slots for part in parts)
    if slots > MAX_CHUNKS:
        raise ValueError(f"phases: {slots} chunks in all, at most {MAX_CHUNKS} fit a workflow; use fewer")


def _check_sweep(recipe: Sections) -> None:
    if recipe.sweep is None:
        return
    if recipe.phases:
        raise ValueError("sweep: compares trainings of one phase; write the phase you mean as a separate recipe")
    if recipe.data.shards > 1:
        raise ValueError(
            f"data.shards: {recipe.data.shards}; expected 1, as a sweep tokenizes each data of its trials in one pod; "
            "leave it out, and raise data.workers"
        )
    if recipe.training.lr_find:
        raise ValueError("sweep: training.lr_find finds a learning rate for one recipe; leave one of the two out")
    lengths = {"training", "training.epochs", "training.max_steps"} & recipe.sweep.parameters.keys()
    if recipe.chunks.count == "per-epoch" and lengths:
        raise ValueError(
            f"sweep: {min(lengths)} differs between trials, and all have the same chunks; set chunks.count to a number"
        )
    if recipe.sweep.eta and recipe.num_chunks < recipe.sweep.eta:
        raise ValueError(
            f"sweep: trials are compared between chunks; set chunks.count to eta, {recipe.sweep.eta}, or more"
        )


def _check_retrain(recipe: Sections) -> None:
    if recipe.retrain.start == "base":
        return
    if recipe.phases:
        raise ValueError("retrain.start: several phases begin at the recipe's own model each time; set it to base")
    if "safetensors" not in recipe.export.formats:
        raise ValueError("retrain.start: continues from the whole model; add safetensors to export.formats")
    if recipe.training.spec.scores:
        raise ValueError("retrain.start: a reward model is made of one that writes; set it to base")


def _check_chunks(recipe: Sections) -> None:
    training, spare = recipe.training, recipe.chunks.spare
    if recipe.chunks.count == "per-epoch":
        if training.max_steps is not None:
            raise ValueError(
                "chunks.count: per-epoch counts training.epochs, and training.max_steps is set; set chunks.count to a "
                "number, or training.epochs instead of max_steps"
            )
        if recipe.slots > MAX_CHUNKS:
            raise ValueError(
                f"chunks.count: per-epoch, {training.epochs or 1:g} epoch(s) and {spare} spare chunks make "
                f"{recipe.slots} chunks, at most {MAX_CHUNKS} fit a workflow; set chunks.count to a number"
            )
    if recipe.slots > MAX_CHUNKS:
        raise ValueError(
            f"chunks: {recipe.num_chunks} chunks and {spare} spare ones are more than {MAX_CHUNKS}; use fewer"
        )
    if training.max_steps is not None and recipe.num_chunks > training.max_steps:
        raise ValueError(
            f"chunks.count: {recipe.num_chunks} chunks for {training.max_steps} steps; at most one per step: set it to "
            f"{training.max_steps} or less"
        )


def _check_resources(recipe: Sections) -> None:
    if recipe.adapter and recipe.model.from_scratch:
        raise ValueError(
            "adapter: an adapter on a model trained from scratch would freeze random weights; "
            "remove adapter, or give model.base"
        )
    if recipe.training.precision == "fp16" and recipe.resources.gpus == 0:
        raise ValueError("training.precision: fp16 needs an accelerator; set resources.gpus, or use bf16 or fp32")
    if (recipe.training.tf32 or recipe.training.precision == "tf32") and recipe.resources.gpus == 0:
        raise ValueError("training.tf32: only GPUs round so; set resources.gpus, or leave it and precision: tf32 out")
    if recipe.resources.cache_claim and not recipe.store.cache_dir:
        raise ValueError(
            "resources.cache_claim: a claim is mounted at store.cache_dir, which is not set; "
            "set it, for example to /cache, or remove the claim"
        )


def _check_data(recipe: Sections) -> None:
    spec, data = recipe.training.spec, recipe.data
    if not 1 <= data.shards <= MAX_SHARDS:
        raise ValueError(
            f"data.shards: {data.shards}; expected 1 to {MAX_SHARDS}, as the segments of the rows "
            "are dealt to pods; leave it out for one pod, and raise data.workers for more processes in each"
        )
    if data.format != "auto" and data.format not in spec.formats:
        raise ValueError(
            f"data.format: {spec.name} does not learn from {data.format}; expected {' or '.join(spec.formats)}"
        )
    if data.packing and spec.rows != "sequences":
        raise ValueError(f"data.packing: {spec.name} compares whole answers; set it to false")
    if data.packing is True and data.format in ("messages", "sharegpt"):
        raise ValueError("data.packing: conversations are not cut; set it to best-fit or false")
    by = recipe.training.curriculum.by if recipe.training.curriculum else "length"
    if by != "length" and by not in data.extra_columns:
        raise ValueError(f"training.curriculum.by: column {by!r} is not kept; add it to data.extra_columns")
    if by != "length" and data.packing:
        raise ValueError(f"training.curriculum.by: packed rows have no {by!r}; leave out packing or use length")
    if data.order == "blocks" and recipe.needs_all_rows:
        raise ValueError(f"data.order: {recipe.needs_all_rows} needs all rows in every chunk; set it to uniform")


def _check_processes(recipe: Sections) -> None:
    check_nodes(recipe)
    if recipe.world_size > 1 or recipe.parallel.virtual_workers:
        check_parallel(recipe)


def _check_weights(recipe: Sections) -> None:
    training, model = recipe.training, recipe.model
    if model.quantization and not recipe.adapter:
        raise ValueError("model.quantization: weights in few bits cannot be trained; add an adapter")
    if model.quantization and recipe.resources.gpus == 0:
        raise ValueError("model.quantization: needs a CUDA GPU; set resources.gpus")
    if recipe.adapter and recipe.adapter.adapts_head and training.spec.tiles_logits and not training.spec.scores:
        raise ValueError(
            f"adapter: {training.method} computes with lm_head's own weights and would not train an adapter on it; "
            "leave lm_head out of its targets, or train it in full: modules_to_save: [lm_head]"
        )
    if training.trainable and recipe.adapter:
        raise ValueError("training.trainable: an adapter freezes the weights already; leave one of the two out")
    if training.second_model and model.tokenizer and model.tokenizer.train:
        role, named = training.second_model
        raise ValueError(
            f"model.tokenizer.train: has other tokens than the {role}; take its own, tokenizer: {{base: {named.base}}}"
        )


def _check_reference(recipe: Sections) -> None:
    training, settings = recipe.training, recipe.training.settings
    if not isinstance(settings, Referenced):
        return
    if settings.sync_reference and recipe.adapter:
        raise ValueError(f"training.{training.method}.sync_reference: an adapter's reference is its base, fixed")
    if training.generation and settings.beta and recipe.model.from_scratch and not recipe.adapter:
        raise ValueError(
            f"training.{training.method}.beta: there is no reference for a model from scratch; set it to 0"
        )
    if settings.sync_reference and not settings.beta:
        raise ValueError(f"training.{training.method}.sync_reference: without beta there is no reference")


def _check_completions(recipe: Sections) -> None:
    training = recipe.training
    # What lies at the edge of the nucleus is drawn or not, and learned from: it may not vary from call to call.
    if training.completions and training.completions.top_p < 1 and training.deterministic and recipe.resources.gpus:
        raise ValueError(
            f"training.{training.method}.top_p: CUDA has no deterministic kernel for the sum it takes; use top_k or "
            "min_p, or set training.deterministic to false"
        )


def _check_evaluation(recipe: Sections) -> None:
    training = recipe.training
    best = recipe.export.checkpoint == "best"
    watchers = {
        "training.early_stopping": training.early_stopping,
        "training.lr_scheduler": training.lr_scheduler in PLATEAU,
        "export.checkpoint": best,
    }
    for setting, is_set in watchers.items():
        if is_set and not recipe.evaluation.in_training:
            raise ValueError(f"{setting}: looks at evaluations, and there are none; set evaluation.every or per_epoch")
    if best and not recipe.chunks.keep.best:
        raise ValueError("export.checkpoint: the best is not kept; set chunks.keep.best to 1 or more")
    recipe.evaluation.check_gate(training.method)
    if recipe.export.alias and not recipe.evaluation.gate:
        raise ValueError("export.alias: an alias moves only when a gate has held; set evaluation.gate")
    if "adapter" in recipe.export.formats and recipe.adapter is None:
        raise ValueError("export.formats: there is no adapter; take safetensors, or add an adapter")


def _check_hooks(recipe: Sections) -> None:
    training = recipe.training
    if recipe.hooks.loss and not training.spec.takes_loss:
        raise ValueError(f"hooks.loss: {training.method} has its own loss; use hooks.trainer to change it")
    if recipe.hooks.collator and (training.completions or recipe.data.packing == "best-fit"):
        joins = training.method if training.completions else "best-fit packing"
        raise ValueError(f"hooks.collator: {joins} joins its batches itself; leave one of the two out")


RULES: tuple[Callable[[Sections], None], ...] = (
    _check_chunks, _check_resources, _check_data, _check_processes, _check_weights, _check_reference,
    _check_completions, _check_evaluation, _check_hooks,
)  # fmt: skip
"""Rules of one training, in the order in which they are told."""


def _check_pods(recipe: Sections) -> None:
    """Refuses what no pod can be."""
    resources = recipe.resources
    for name in ("cpu", "memory", "gpu_memory"):
        quantity = getattr(resources, name)
        if quantity and amount(quantity) <= 0:
            raise ValueError(f"resources.{name}: is {quantity}; give what a pod needs, or remove it")
    if resources.memory and resources.shm and amount(resources.memory) <= amount(resources.shm):
        raise ValueError(
            f"resources.memory: {resources.memory} is no more than resources.shm, {resources.shm}, which counts as "
            "memory; raise memory, or lower shm"
        )


def _check_addresses(recipe: Sections) -> None:
    """Refuses addresses that are none, before a pod looks there."""
    address, production = recipe.tracking.mlflow, recipe.evaluation.production
    if address and not ADDRESS.match(address):
        meant = f"did you mean 'http://{address}'?" if re.fullmatch(r"[\w.-]+:\d+(/.*)?", address) else "or none"
        raise ValueError(
            f"tracking.mlflow: is {address!r}, which is no address; expected one such as http://mlflow:5000, "
            f"sqlite:///mlflow.db or databricks; {meant}"
        )
    if production and production.startswith("models:") and not REGISTERED.fullmatch(production):
        raise ValueError(
            f"evaluation.production: is {production!r}; expected models:/NAME@ALIAS or models:/NAME/VERSION"
        )


def _check_effects(recipe: Sections) -> None:
    training, export = recipe.training, recipe.export
    inside, outside = recipe.chunks.retries, recipe.resources.retries
    if (1 + inside) * (1 + outside) > MAX_PROCESSES:
        raise ValueError(
            f"chunks.retries: {inside} in each pod that resources.retries, {outside}, start make up to "
            f"{(1 + inside) * (1 + outside)} processes a chunk, at most {MAX_PROCESSES}; lower one of the two"
        )
    _check_pods(recipe)
    _check_addresses(recipe)
    if training.activation_offloading and not training.spec.offloads_activations:
        raise ValueError(
            f"training.activation_offloading: {training.method}'s trainer holds activations where they are; "
            "remove it, or set gradient_checkpointing"
        )
    if recipe.data.system is not None and (recipe.data.format == "text" or training.spec.formats == ("text",)):
        raise ValueError("data.system: rows of plain text have no system message; remove it")
    if recipe.data.shuffle and recipe.data.max_samples is None:
        raise ValueError(
            "data.shuffle: chooses the rows of data.max_samples, which is not set; each pass is shuffled in any case, "
            "so remove it, or set max_samples"
        )
    for source in recipe.data.sources:
        if source.weight != 1 and source.side not in (None, "train"):
            raise ValueError(
                f"data.source: the weight {source.weight:g} of {source.uri!r} does nothing on the side {source.side}, "
                "whose rows are used once each; remove it"
            )
    for name in ("gguf", "onnx", "kserve"):
        settings = getattr(export, name)
        if name not in export.formats and settings != type(export).model_fields[name].default:
            raise ValueError(f"export.{name}: there is no such export; add {name} to export.formats, or remove it")
    if recipe.parallel.offload == "cpu" and recipe.world_size == 1:
        raise ValueError(
            "training.parallel.offload: one process holds no shards; set training.parallel.processes or "
            "resources.gpus above 1, or remove it"
        )
