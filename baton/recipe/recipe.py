"""The whole recipe, and the rules between its sections.

`check_rules` refuses untrainable recipes, wherever they are read. `check_effects` refuses settings without effect, in
recipes that people hand in: a run that was started with such a setting has to resume.
"""

import functools
import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Self

from pydantic import Field, ValidationError, model_validator

from baton.errors import UserError
from baton.recipe.base import Name, Section, amount
from baton.recipe.budget import GPU_HOURS, Budget, Prices
from baton.recipe.cluster import MAX_PROCESSES, Parallel, Resources
from baton.recipe.data import MAX_SHARDS, Data
from baton.recipe.evaluation import REGISTERED, Evaluation, Export
from baton.recipe.methods import Referenced
from baton.recipe.model import Adapter, Model
from baton.recipe.run import MAX_CHUNKS, Chunks, Hooks, Store, Tracking, Trust, shorthand
from baton.recipe.search import RecipePhase, Retrain, Search, ShortPhase, phase_document
from baton.recipe.training import DECAYS, Training

# Optimizers that treat each number by itself: DeepSpeed hands them all weights as one long row.
ZERO_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "sgd")

PLATEAU = ("reduce_lr_on_plateau", "greedy")  # schedules that need evaluations

MAX_CHUNK_PROCESSES = 36  # most processes of one chunk: one that fails each time is to end within a day of a GPU

# Beginning of an address of MLflow: a scheme, a word of its own, or a path.
ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://|file:|(databricks|databricks-uc|uc)(:|$)|[~.]?/|\.\./|[^:]+/")


class Recipe(Section):
    """One training run, from rows to an exported model."""

    name: Name
    """Name of the pipeline and prefix of its runs: lower-case letters, digits, dashes."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of the split, initial weights, row order and every random draw."""
    store: Annotated[Store, shorthand("uri")] = Store()
    """Location of runs and data; `store: s3://bucket` sets its `uri`."""
    model: Model
    """Start of training."""
    data: Data
    """Training rows."""
    adapter: Adapter | None = None
    """Train an adapter; default: full weights."""
    training: Training = Training()
    """Schedule, optimizer and method."""
    phases: list[ShortPhase] = []
    """Trainings in sequence, each starting from the previous model, such as `[pretrain, sft, dpo]`. The top level
    applies to all. Default: one training."""
    hooks: Hooks = Hooks()
    """Your own code."""
    chunks: Chunks = Chunks()
    """Chunks and checkpoints."""
    evaluation: Evaluation = Evaluation()
    """Evaluation and gate."""
    export: Export = Export()
    """Formats of the result."""
    resources: Resources = Resources()
    """Requests of the pods."""
    tracking: Tracking = Tracking()
    """Destinations of metrics."""
    retrain: Retrain = Retrain()
    """Retraining after changes."""
    budget: Annotated[Budget | None, Field(exclude_if=lambda value: value is None)] = None
    """Most that the run may cost; default: no limit. Changes no bit of a run that ends within it."""
    sweep: Search | None = None
    """Configurations to compare with `baton sweep`; other commands ignore it."""
    trust: Trust = None
    """For a recipe from elsewhere. `ask`: its code runs only with `--trust`. A list: SHA-256 of each code file with
    consent, written by Baton when it compiles, submits or runs; other code is refused. Omit it in your own recipes."""

    @model_validator(mode="before")
    @classmethod
    def _scheduled(cls, document: Any) -> Any:
        """Chooses the schedule that is `auto`."""
        training = document.get("training") if isinstance(document, dict) else None
        if not isinstance(training, dict) or training.get("lr_scheduler") != "auto":
            return document
        chosen = {name: value for name, value in training.items() if name != "lr_scheduler"}
        if document.get("budget"):
            options, steps = chosen.get("lr_scheduler_options") or {}, chosen.get("max_steps")
            chosen["lr_scheduler"] = DECAYS
            if isinstance(options, dict) and isinstance(steps, int):
                chosen["lr_scheduler_options"] = {"num_decay_steps": max(steps // 10, 1), **options}
        return {**document, "training": chosen}

    @model_validator(mode="after")
    def _sections_fit(self) -> Self:
        check_rules(self)
        return self

    def phase_recipes(self) -> list["Recipe"]:
        """Returns a recipe for each phase, none without phases; `ValueError` with a line per problem."""
        # Cached by content: model_copy would carry a cached property of the original along.
        return list(_phase_recipes(json.dumps(self.model_dump(mode="json")))) if self.phases else []

    @property
    def num_chunks(self) -> int:
        """Chunks of the run without extra ones."""
        count = self.chunks.count
        return math.ceil(self.training.epochs or 1.0) if count == "per-epoch" else count

    @property
    def slots(self) -> int:
        """Chunks of the run, extra ones included."""
        return self.num_chunks + self.chunks.spare

    @property
    def parallel(self) -> Parallel:
        return self.training.parallel or Parallel()

    @property
    def processes(self) -> int:
        """Processes of a pod; with virtual workers, as many as can share those evenly."""
        workers = self.parallel.virtual_workers
        # The largest power of two, as their number is one.
        return int(2 ** (min(self._asked, workers).bit_length() - 1)) if workers else self._asked

    @property
    def devices(self) -> int:
        """GPUs of a chunk, over all its pods; its pods where they have none."""
        return max(1, self.resources.gpus) * self.max_nodes

    @property
    def uses_bitsandbytes(self) -> bool:
        return self.model.quantization is not None or self.training.uses_bitsandbytes

    @property
    def _asked(self) -> int:
        asked = self.parallel.processes
        return max(1, self.resources.gpus) if asked == "auto" else asked

    @property
    def world_size(self) -> int:
        """Processes of a chunk, over all its pods; the most, where their number varies."""
        return self.processes * self.max_nodes

    @property
    def node_counts(self) -> list[int]:
        """Possible numbers of a chunk's pods, the largest first."""
        nodes, workers = self.resources.nodes, self.parallel.virtual_workers
        if isinstance(nodes, int):
            return [nodes]
        numbers = range(nodes.max, nodes.min - 1, -1)
        return [number for number in numbers if workers and workers % (number * self.processes) == 0]

    @property
    def max_nodes(self) -> int:
        """Pods of a chunk; the most, where their number varies."""
        nodes = self.resources.nodes
        return max(self.node_counts, default=nodes if isinstance(nodes, int) else nodes.max)

    @property
    def workers(self) -> int:
        """Parts of each step: one for each virtual worker, else for each process."""
        return self.parallel.virtual_workers or self.world_size

    @property
    def micro_batch_size_per_process(self) -> int:
        """Rows per forward pass of a process, by default its share of a batch.

        Raises:
            UserError: it is `auto`, and no chunk has found it yet.
        """
        size = self.training.micro_batch_size
        if size == "auto":
            raise UserError(
                "training.micro_batch_size is auto, and the first chunk has not found it yet.",
                remedy="Let the first chunk run, or give a number.",
            )
        return size or self.training.batch_size // self.workers

    @property
    def evaluation_batch_size(self) -> int:
        """Rows per forward pass of an evaluation; results differ by rounding between sizes."""
        return self.evaluation.batch_size or self.micro_batch_size_per_process

    @property
    def gradient_accumulation_steps(self) -> int:
        """Forward passes of each worker per optimizer step."""
        return self.training.batch_size // (self.micro_batch_size_per_process * self.workers)

    @property
    def steps_per_generation(self) -> int:
        """Forward passes of each worker per round of completions."""
        return self.training.round_size // (self.micro_batch_size_per_process * self.workers)

    @property
    def split(self) -> str:
        """Split of a batch, in words."""
        if self.training.micro_batch_size == "auto":
            return "split as memory allows"
        split = f"{self.gradient_accumulation_steps} x {self.micro_batch_size_per_process}"
        if self.parallel.virtual_workers:
            idle = self._asked - self.processes
            rest = f", {idle} stay{'s' if idle == 1 else ''} idle" if idle else ""
            most = "up to " if len(self.node_counts) > 1 else ""
            return f"{split} for each of {self.workers} virtual workers in {most}{self.world_size} process(es){rest}"
        return split if self.world_size == 1 else f"{split} in each of {self.world_size} processes"

    @property
    def needs_all_rows(self) -> str | None:
        """Feature that reads all training rows in every chunk, against `data.order: blocks`; None for none."""
        training = self.training
        if training.spec.needs_all_rows:  # TRL prepares all rows with the trainer, or draws prompts from all
            return training.method
        if training.group_by_length:
            return "training.group_by_length"
        return "training.curriculum" if training.curriculum else None


@functools.lru_cache(maxsize=8)
def _phase_recipes(text: str) -> tuple[Recipe, ...]:
    document = json.loads(text)
    recipes = []
    for position, phase in enumerate(map(RecipePhase.model_validate, document["phases"])):
        last = position == len(document["phases"]) - 1
        try:
            recipes.append(Recipe.model_validate(phase_document(document, phase, position, last=last)))
        except ValidationError as error:
            problems = (
                f"{'.'.join(map(str, x['loc']))}: {x['msg'].removeprefix('Value error, ')}" for x in error.errors()
            )
            raise ValueError(f"phase {phase.name}: {'; '.join(problems)}") from None
    return tuple(recipes)


def _check_nodes(recipe: Recipe) -> None:
    """Checks that a varying number of nodes does not change bits, and that one fits."""
    nodes, workers, processes = recipe.resources.nodes, recipe.parallel.virtual_workers, recipe.processes
    if isinstance(nodes, int):
        return
    if not workers:
        fitting = min(2 ** (max(2, nodes.max * processes).bit_length() - 1), MAX_PROCESSES)
        raise ValueError(
            f"resources.nodes: from {nodes.min} to {nodes.max} nodes train the same bits with virtual workers alone; "
            f"set training.parallel.virtual_workers, for example to {fitting}, or nodes to a number"
        )
    if not recipe.node_counts:
        powers = [2**power for power in range((workers // processes).bit_length())]
        raise ValueError(
            f"resources.nodes: no number from {nodes.min} to {nodes.max}, times {processes} process(es) on each, "
            f"divides the {workers} virtual workers; let min and max have {' or '.join(map(str, powers))} between them"
        )


def _check_parallel(recipe: Recipe) -> None:
    """Checks that several processes can train a recipe."""
    if recipe.world_size == 1 and not recipe.parallel.virtual_workers:
        return
    training, workers, accelerators = recipe.training, recipe.workers, recipe.resources.gpus
    of = f"{workers} {'virtual workers' if recipe.parallel.virtual_workers else 'processes'}"
    if training.micro_batch_size == "auto":
        raise ValueError("training.micro_batch_size: auto looks for it in one process; give a number for several")
    rows = workers * (training.micro_batch_size or 1)
    if training.batch_size % rows:
        raise ValueError(
            f"training.batch_size: {training.batch_size} rows are not a multiple of {rows}, a micro-batch in each of "
            f"{of}; take {-(-training.batch_size // rows) * rows}, or change micro_batch_size"
        )
    if accelerators and recipe.processes > accelerators:
        raise ValueError(
            f"training.parallel.processes: {recipe.processes} for {accelerators} accelerator(s); each needs its own"
        )
    together = workers * recipe.micro_batch_size_per_process
    if training.round_size % together:
        raise ValueError(
            f"training.{training.method}.steps_per_generation: a round of {training.round_size} completions is not a "
            f"multiple of {together}, a micro-batch in each of {of}; change one of them"
        )
    if recipe.data.order == "blocks":
        raise ValueError("data.order: blocks is for one process; set it to uniform")
    if recipe.parallel.strategy not in training.spec.strategies:
        tried = " or ".join(name for name in training.spec.strategies if not name.startswith("zero"))
        raise ValueError(
            f"training.parallel.strategy: {training.method} was not tried with {recipe.parallel.strategy}; use {tried}"
        )
    if recipe.parallel.virtual_workers:
        _check_virtual(recipe)
    if recipe.parallel.is_zero:
        _check_zero(recipe)
    if recipe.parallel.is_sharded:
        _check_sharded(recipe)
    elif recipe.parallel.offload == "cpu":
        raise ValueError("training.parallel.offload: only shards are held in memory; set strategy: fsdp or zero3")


def _check_virtual(recipe: Recipe) -> None:
    training, workers, world = recipe.training, recipe.workers, recipe.world_size
    if workers % world:
        raise ValueError(
            f"training.parallel.virtual_workers: {workers} cannot be dealt evenly to {recipe.max_nodes} nodes "
            f"with {recipe.processes} process(es) each; let resources.nodes times processes divide it"
        )
    refused = {
        "training.parallel.strategy": (
            recipe.parallel.is_sharded,
            f"no process has the whole gradient with {recipe.parallel.strategy}; use ddp",
        ),
        "training.compile": (
            training.compile or training.compile_optimizer,
            "compiled code depends on the rows of a process; remove it",
        ),
        "hooks.trainer": (recipe.hooks.trainer, "it may do something else in each process; leave it out"),
        "training.grpo.scale_rewards": (
            training.grpo and training.grpo.scale_rewards == "batch",
            "each worker sees the rewards of its own part of a batch; use group or none",
        ),
        "training.rloo.normalize_advantages": (
            training.rloo and training.rloo.normalize_advantages,
            "each worker sees the rewards of its own part of a batch; leave it out",
        ),
    }
    _refuse_beside("training.parallel.virtual_workers", refused)
    if training.generation is None:
        return
    # A worker has the whole group of a prompt's completions, as it alone computes their advantages.
    rows, num_generations = recipe.micro_batch_size_per_process, training.generation.num_generations
    if (rows * recipe.steps_per_generation) % num_generations:
        raise ValueError(
            f"training.{training.method}.num_generations: a virtual worker compares the {num_generations} "
            f"completions of a prompt, and writes {rows * recipe.steps_per_generation} in a round. Let a round have a "
            f"multiple of {workers * math.lcm(rows, num_generations)} (training.batch_size, or steps_per_generation "
            f"where it is set), or take fewer of {workers} virtual_workers"
        )


def _refuse_beside(setting: str, refused: Mapping[str, tuple[object, str]]) -> None:
    for what, (is_set, why) in refused.items():
        if is_set:
            raise ValueError(f"{what}: does not go with {setting}: {why}")


def _check_zero(recipe: Recipe) -> None:
    training, strategy = recipe.training, recipe.parallel.strategy
    if training.precision == "fp16":
        raise ValueError(f"training.precision: fp16 was not tried with {strategy}; use bf16")
    if recipe.model.dtype != "float32" and training.precision != "bf16":
        raise ValueError(
            f"model.dtype: {recipe.model.dtype} goes with {strategy} where training.precision is bf16; else use float32"
        )
    if training.compile:
        raise ValueError(
            f"training.compile: does not go with training.parallel.strategy {strategy}: not tried; use fsdp"
        )
    if training.optimizer not in ZERO_OPTIMIZERS:
        raise ValueError(
            f"training.optimizer: {training.optimizer} needs each weight's shape, and {strategy} passes all weights "
            f"as one row; use one of {', '.join(ZERO_OPTIMIZERS)}"
        )


def _check_sharded(recipe: Recipe) -> None:
    training, strategy = recipe.training, recipe.parallel.strategy
    rewards = training.generation.rewards if training.generation else []
    refused = {
        "model.quantization": (recipe.model.quantization, "weights in few bits were not tried in shards; use ddp"),
        "adapter.target_parameters": (
            recipe.adapter and recipe.adapter.target_parameters,
            "PEFT replaces such weights while it computes, and a shard is not a whole weight; use ddp",
        ),
        "training.trainable": (training.trainable, "shards mix trained and frozen weights; use ddp"),
        "training.groups": (training.groups, "a group is clipped by its whole gradient, and shards have none; use ddp"),
        "training.router": (training.router, "the router's losses were not tried in shards; use ddp"),
        "training.compile_optimizer": (training.compile_optimizer, "the two together were not tried; leave one out"),
        f"training.{training.method}.sync_reference": (
            training.sync_reference,
            "no process has the whole model; use ddp",
        ),
        f"training.{training.method}.rewards": (
            any(reward.use == "information_gain" for reward in rewards),
            "information_gain asks the model, which all processes would have to do as often; use ddp",
        ),
        "training.lr_find": (
            training.lr_find,
            "it tries rates in one process, with the whole model on one GPU; give training.learning_rate, or use ddp",
        ),
        "evaluation.sample_every": (
            recipe.evaluation.write_every,
            "the process that writes has no whole model; use ddp",
        ),
    }
    _refuse_beside(f"training.parallel.strategy {strategy}", refused)
    if recipe.parallel.offload == "cpu" and not recipe.resources.gpus:
        raise ValueError("training.parallel.offload: without a GPU the shards are in the host's memory already")


def check_rules(recipe: Recipe) -> None:
    """Checks that a recipe's sections fit each other; its phases are checked as recipes of their own."""
    _check_phases(recipe)
    _check_sweep(recipe)
    _check_retrain(recipe)
    if recipe.phases:
        return
    for rule in RULES:
        rule(recipe)


def check_effects(recipe: Recipe) -> None:
    """Checks that every given setting has an effect."""
    for part in recipe.phase_recipes() or [recipe]:
        _check_effects(part)


def _check_phases(recipe: Recipe) -> None:
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


def _check_sweep(recipe: Recipe) -> None:
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
    if budget := recipe.budget:
        if budget.run_seconds:
            raise ValueError(
                f"budget.limit: {budget.limit} counts from the first chunk of one run, and a sweep has several; give "
                "money, gpu-hours, or budget.by"
            )
        if recipe.sweep.num_brackets != 1:
            raise ValueError("budget: is dealt to the trials of one bracket; set sweep.brackets to 1")
        if recipe.sweep.device == "shared":
            raise ValueError("budget: counts the time of a process, which trials share; leave sweep.device out")
    if recipe.sweep.eta and recipe.num_chunks < recipe.sweep.eta:
        raise ValueError(
            f"sweep: trials are compared between chunks; set chunks.count to eta, {recipe.sweep.eta}, or more"
        )


def _check_retrain(recipe: Recipe) -> None:
    if recipe.retrain.start == "base":
        return
    if recipe.phases:
        raise ValueError("retrain.start: several phases begin at the recipe's own model each time; set it to base")
    if "safetensors" not in recipe.export.formats:
        raise ValueError("retrain.start: continues from the whole model; add safetensors to export.formats")
    if recipe.training.spec.scores:
        raise ValueError("retrain.start: a reward model is made of one that writes; set it to base")


def _check_chunks(recipe: Recipe) -> None:
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


def _check_resources(recipe: Recipe) -> None:
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
    if recipe.resources.is_placed:
        if recipe.budget is None or recipe.budget.by is None:
            raise ValueError(
                "resources.capacity: spot-first takes on-demand nodes where time is short, and the run has no end to "
                "meet; set budget.by"
            )
        if recipe.max_nodes > 1:
            raise ValueError(
                "resources.capacity: spot-first does not go with resources.nodes: their pods have the labels of one "
                "TrainingRuntime; use spot or on-demand"
            )


def _check_data(recipe: Recipe) -> None:
    spec, data = recipe.training.spec, recipe.data
    if not 1 <= data.shards <= MAX_SHARDS:
        raise ValueError(
            f"data.shards: {data.shards}; expected 1 to {MAX_SHARDS}, as segments of rows are dealt to pods. "
            "Remove it for one pod, and raise data.workers for more processes in each"
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


def _check_weights(recipe: Recipe) -> None:
    training, model = recipe.training, recipe.model
    if model.quantization and not recipe.adapter:
        raise ValueError("model.quantization: weights in few bits cannot be trained; add an adapter")
    has_whole_layers = training.spec.scores or (recipe.adapter and recipe.adapter.modules_to_save)
    casts = model.quantization and training.method not in ("orpo", "cpo")
    if casts and has_whole_layers and training.precision in ("fp32", "tf32"):
        raise ValueError(
            "training.precision: on weights in few bits, TRL holds an adapter's whole layers in bfloat16, and "
            f"{training.precision} cannot compute with them; use bf16"
        )
    if recipe.adapter and recipe.adapter.adapts_head and training.spec.tiles_logits and not training.spec.scores:
        raise ValueError(
            f"adapter: {training.method} computes with lm_head's own weights and would not train an adapter on it. "
            "Leave lm_head out of its targets, or train it in full: modules_to_save: [lm_head]"
        )
    if training.trainable and recipe.adapter:
        raise ValueError("training.trainable: an adapter freezes the weights already; leave one of the two out")
    if training.second_model and model.tokenizer and model.tokenizer.train:
        role, named = training.second_model
        raise ValueError(
            f"model.tokenizer.train: has other tokens than the {role}; take its own, tokenizer: {{base: {named.base}}}"
        )


def _check_reference(recipe: Recipe) -> None:
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


def _check_completions(recipe: Recipe) -> None:
    training = recipe.training
    # A token at the edge of the nucleus is drawn or not, and learned from: the sum may not vary between calls.
    if training.completions and training.completions.top_p < 1 and training.deterministic and recipe.resources.gpus:
        raise ValueError(
            f"training.{training.method}.top_p: CUDA has no deterministic kernel for the sum it takes; use top_k or "
            "min_p, or set training.deterministic to false"
        )


def _check_evaluation(recipe: Recipe) -> None:
    training = recipe.training
    best = recipe.export.checkpoint == "best"
    watchers = {
        "training.early_stopping": training.early_stopping,
        "training.lr_scheduler": training.lr_scheduler in PLATEAU,
        "export.checkpoint": best,
    }
    for setting, is_set in watchers.items():
        if is_set and not recipe.evaluation.in_training:
            raise ValueError(f"{setting}: needs evaluations, and there are none; set evaluation.every or per_epoch")
    if best and not recipe.chunks.keep.best:
        raise ValueError("export.checkpoint: the best is not kept; set chunks.keep.best to 1 or more")
    recipe.evaluation.check_gate(training.method)
    if recipe.export.alias and not recipe.evaluation.gate:
        raise ValueError("export.alias: an alias moves only when a gate has held; set evaluation.gate")
    if "adapter" in recipe.export.formats and recipe.adapter is None:
        raise ValueError("export.formats: there is no adapter; take safetensors, or add an adapter")


def _check_hooks(recipe: Recipe) -> None:
    training = recipe.training
    if recipe.hooks.loss and not training.spec.takes_loss:
        raise ValueError(f"hooks.loss: {training.method} has its own loss; use hooks.trainer to change it")
    if recipe.hooks.collator and (training.completions or recipe.data.packing == "best-fit"):
        joins = training.method if training.completions else "best-fit packing"
        raise ValueError(f"hooks.collator: {joins} joins its batches itself; leave one of the two out")


def _check_budget(recipe: Recipe) -> None:
    training, budget = recipe.training, recipe.budget
    if budget is None:
        return
    if GPU_HOURS in (budget.limit or "") and not recipe.resources.gpus:
        raise ValueError(f"budget.limit: {budget.limit}, and resources.gpus is 0; give a time such as 6h, or money")
    if isinstance(budget.price, Prices) and not recipe.resources.capacity:
        raise ValueError(
            "budget.price: gives prices of spot and on-demand nodes, and resources.capacity, which tells them apart, "
            "is not set; set it, or give one price"
        )
    _refuse_beside(
        "budget",
        {
            "phases": (recipe.phases, "each would have it whole; write the phase you mean as a separate recipe"),
            "training.curriculum": (training.curriculum, "its shares count all steps, whose number the budget changes"),
        },
    )
    if training.decay_steps is None:  # no schedule that can be shortened
        return
    if 0 < training.warmup_steps < 1:
        raise ValueError(
            f"training.warmup_steps: {training.warmup_steps:g} is a share of all steps, whose number the budget "
            "changes; give a number of steps"
        )
    if training.lr_scheduler == DECAYS:
        if not training.decay_steps:
            raise ValueError("training.lr_scheduler_options: give num_decay_steps, the steps in which the rate decays")
        if "num_stable_steps" in training.lr_scheduler_options:
            raise ValueError(
                "training.lr_scheduler_options: num_stable_steps fixes the step at which the decay begins, and the "
                "budget moves it; remove one of the two"
            )


# Rules of one training, in the order of their messages.
RULES: tuple[Callable[[Recipe], None], ...] = (
    _check_chunks, _check_resources, _check_data, _check_nodes, _check_parallel, _check_weights, _check_reference,
    _check_completions, _check_evaluation, _check_hooks, _check_budget,
)  # fmt: skip


def _check_pods(recipe: Recipe) -> None:
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


def _check_addresses(recipe: Recipe) -> None:
    address, production = recipe.tracking.mlflow, recipe.evaluation.production
    if address and not ADDRESS.match(address):
        meant = f"did you mean 'http://{address}'?" if re.fullmatch(r"[\w.-]+:\d+(/.*)?", address) else "or none"
        raise ValueError(
            f"tracking.mlflow: is {address!r}, which is not an address; expected one such as http://mlflow:5000, "
            f"sqlite:///mlflow.db or databricks; {meant}"
        )
    if production and production.startswith("models:") and not REGISTERED.fullmatch(production):
        raise ValueError(
            f"evaluation.production: is {production!r}; expected models:/NAME@ALIAS or models:/NAME/VERSION"
        )


def _check_effects(recipe: Recipe) -> None:
    training, export = recipe.training, recipe.export
    inside, outside = recipe.chunks.retries, recipe.resources.retries
    if (1 + inside) * (1 + outside) > MAX_CHUNK_PROCESSES:
        raise ValueError(
            f"chunks.retries: {inside} in each pod that resources.retries, {outside}, start make up to "
            f"{(1 + inside) * (1 + outside)} processes a chunk, at most {MAX_CHUNK_PROCESSES}; lower one of the two"
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
