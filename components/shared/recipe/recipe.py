"""The whole recipe."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, ValidationError, model_validator

from components.shared.recipe.adapter import Adapter
from components.shared.recipe.base import Name, Section
from components.shared.recipe.chunks import MAX_CHUNKS, Chunks, Store
from components.shared.recipe.data import Data
from components.shared.recipe.evaluation import Evaluation
from components.shared.recipe.export import Export
from components.shared.recipe.hooks import Hooks, short
from components.shared.recipe.methods import GRPO, RLOO
from components.shared.recipe.model import Model
from components.shared.recipe.parallel import Parallel, check_parallel
from components.shared.recipe.phases import ShortPhase, merged
from components.shared.recipe.pods import Resources
from components.shared.recipe.retrain import Retrain
from components.shared.recipe.sweep import Search
from components.shared.recipe.tracking import Tracking
from components.shared.recipe.training import Training

FORMATS = {
    "sft": ("text", "prompt-completion", "instruction", "messages", "sharegpt"),
    "pretrain": ("text",),
    "reward": ("preference", "ranked"),
    "dpo": ("preference", "ranked"),
    "orpo": ("preference", "ranked"),
    "cpo": ("preference", "ranked"),
    "kto": ("rated", "preference", "ranked"),
    "grpo": ("prompt",),
    "rloo": ("prompt",),
}
"""Shapes of rows that each method learns from."""


class Recipe(Section):
    """One training run, from rows to an exported model."""

    name: Name
    """Name of the pipeline and prefix of its runs: lower-case letters, digits, dashes."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Decides the split, the initial weights, the order of rows and every random draw."""
    store: Annotated[Store, short("uri")] = Store()
    """Where runs and data live; `store: s3://bucket` is short for its `uri`."""
    model: Model
    """What training starts from."""
    data: Data
    """What it learns from."""
    adapter: Adapter | None = None
    """Train an adapter; the full weights when left out."""
    training: Training = Training()
    """How it learns."""
    phases: list[ShortPhase] = []
    """Several trainings one after the other, each going on from the model of the one before, such as
    `[pretrain, sft, dpo]`; what the top level says holds for all. One training when left out."""
    hooks: Hooks = Hooks()
    """The user's own code."""
    chunks: Chunks = Chunks()
    """How the run is cut."""
    evaluation: Evaluation = Evaluation()
    """How it is judged."""
    export: Export = Export()
    """What comes out."""
    resources: Resources = Resources()
    """What the pods ask for."""
    tracking: Tracking = Tracking()
    """Where metrics go."""
    retrain: Retrain = Retrain()
    """What happens when data or recipe change."""
    sweep: Search | None = None
    """Many configurations compared, by `baton sweep`; the other commands leave it out."""

    @model_validator(mode="after")
    def _phases_fit(self) -> Recipe:
        names = [phase.name for phase in self.phases]
        if len(set(names)) < len(names):
            raise ValueError(f"phases: {', '.join(names)} are not different names")
        for phase, recipe in zip(self.phases, self.phase_recipes(), strict=True):
            if recipe.training.method == "reward" and phase is not self.phases[-1]:
                raise ValueError(
                    f"phases: {phase.name} trains a reward model, which nothing can go on from; put it last"
                )
        slots = sum(recipe.chunks.slots for recipe in self.phase_recipes())
        if slots > MAX_CHUNKS:
            raise ValueError(f"phases: {slots} chunks in all, at most {MAX_CHUNKS} fit a workflow; use fewer")
        return self

    @model_validator(mode="after")
    def _can_be_swept(self) -> Recipe:
        if self.sweep is None:
            return self
        if self.phases:
            raise ValueError("sweep: compares trainings of one phase; write the phase you mean as a recipe of its own")
        if self.training.lr_find:
            raise ValueError("sweep: training.lr_find finds a learning rate for one recipe; leave one of the two out")
        if self.sweep.eta and self.chunks.count < self.sweep.eta:
            raise ValueError(
                f"sweep: trials are compared between chunks; set chunks.count to eta, {self.sweep.eta}, or more"
            )
        return self

    @model_validator(mode="after")
    def _can_go_on(self) -> Recipe:
        if self.retrain.start == "base":
            return self
        if self.phases:
            raise ValueError("retrain.start: several phases begin at the recipe's own model each time; set it to base")
        if "safetensors" not in self.export.formats:
            raise ValueError("retrain.start: goes on from the whole model; add safetensors to export.formats")
        if self.training.method == "reward":
            raise ValueError("retrain.start: a reward model is made of one that writes; set it to base")
        return self

    def phase_recipes(self) -> list[Recipe]:
        """Returns a recipe for each phase, none where there are no phases.

        Raises:
            ValueError: a phase does not make a recipe; the message has a line per problem.
        """
        document = self.model_dump(mode="json")
        found = []
        for position, phase in enumerate(self.phases):
            last = position == len(self.phases) - 1
            try:
                found.append(Recipe.model_validate(merged(document, phase, position, last=last)))
            except ValidationError as error:
                problems = (
                    f"{'.'.join(map(str, x['loc']))}: {x['msg'].removeprefix('Value error, ')}" for x in error.errors()
                )
                raise ValueError(f"phase {phase.name}: {'; '.join(problems)}") from None
        return found

    @model_validator(mode="after")
    def _consistent(self) -> Recipe:
        if self.phases:
            return self  # each phase is checked for itself
        if self.adapter and self.model.from_scratch:
            raise ValueError(
                "adapter: an adapter on a model trained from scratch would freeze random weights; "
                "remove adapter, or give model.base"
            )
        steps = self.training.max_steps
        if steps is not None and self.chunks.count > steps:
            raise ValueError(f"chunks.count: {self.chunks.count} chunks for {steps} steps; at most one per step")
        if self.training.precision == "fp16" and self.resources.gpus == 0:
            raise ValueError("training.precision: fp16 needs an accelerator; set resources.gpus, or use bf16 or fp32")
        if self.resources.cache_claim and not self.store.cache_dir:
            raise ValueError(
                "resources.cache_claim: a claim is mounted at store.cache_dir, which is not set; "
                "set it, for example to /cache, or remove the claim"
            )
        return self

    @model_validator(mode="after")
    def _data_fits(self) -> Recipe:
        if self.phases:
            return self  # each phase is checked for itself
        method, data = self.training.method, self.data
        if data.format != "auto" and data.format not in FORMATS[method]:
            raise ValueError(
                f"data.format: {method} does not learn from {data.format}; expected {' or '.join(FORMATS[method])}"
            )
        if data.packing and method not in ("sft", "pretrain"):
            raise ValueError(f"data.packing: {method} compares whole answers; set it to false")
        if data.packing is True and data.format in ("messages", "sharegpt"):
            raise ValueError("data.packing: conversations are not cut; set it to best-fit or false")
        by = self.training.curriculum.by if self.training.curriculum else "length"
        if by != "length" and by not in data.extra_columns:
            raise ValueError(f"training.curriculum.by: column {by!r} is not kept; add it to data.extra_columns")
        if by != "length" and data.packing:
            raise ValueError(f"training.curriculum.by: packed rows have no {by!r}; leave out packing or use length")
        if data.order == "blocks" and self.needs_all_rows:
            raise ValueError(f"data.order: {self.needs_all_rows} needs all rows in every chunk; set it to uniform")
        return self

    @property
    def parallel(self) -> Parallel:
        """How the processes share the work."""
        return self.training.parallel or Parallel()

    @property
    def processes(self) -> int:
        """Processes of a pod."""
        asked = self.parallel.processes
        return max(1, self.resources.gpus) if asked == "auto" else asked

    @property
    def world_size(self) -> int:
        """Processes that train together, over all pods of a chunk."""
        return self.processes * self.resources.nodes

    @property
    def micro_batch_size_per_process(self) -> int:
        """Rows per forward pass of a process; where `training.micro_batch_size` is left out, its share of a batch.

        Raises:
            UserError: it is `auto`, and no chunk has found it yet.
        """
        size = self.training.micro_batch_size
        if size == "auto":
            raise UserError(
                "training.micro_batch_size is auto, and the first chunk has not found it yet.",
                remedy="Let the first chunk run, or give a number.",
            )
        return size or self.training.batch_size // self.world_size

    @property
    def accumulation(self) -> int:
        """Forward passes of each process per optimizer step."""
        return self.training.batch_size // (self.micro * self.world_size)

    @model_validator(mode="after")
    def _can_be_parallel(self) -> Recipe:
        if not self.phases and self.world_size > 1:  # each phase is checked for itself
            check_parallel(self)
        return self

    @property
    def needs_all_rows(self) -> str | None:
        """What goes over all training rows in every chunk, so that `data.order` cannot be `blocks`; None for nothing.

        TRL's trainers for kto, orpo and cpo prepare all rows when they are built, those for grpo and rloo, lengths and
        curriculum choose from all of them.
        """
        training = self.training
        if training.method in ("kto", "orpo", "cpo", "grpo", "rloo"):
            return training.method
        if training.group_by_length:
            return "training.group_by_length"
        return "training.curriculum" if training.curriculum else None

    @model_validator(mode="after")
    def _weights_fit(self) -> Recipe:
        if self.phases:
            return self  # each phase is checked for itself
        training, model = self.training, self.model
        if model.quantization and not self.adapter:
            raise ValueError("model.quantization: weights in few bits cannot be trained; add an adapter")
        if model.quantization and self.resources.gpus == 0:
            raise ValueError("model.quantization: needs a CUDA GPU; set resources.gpus")
        if training.trainable and self.adapter:
            raise ValueError("training.trainable: an adapter freezes the weights already; leave one of the two out")
        generation = training.generation
        sync = next((part.sync_reference for part in (training.dpo, training.kto, generation) if part), None)
        if sync and self.adapter:
            raise ValueError(f"training.{training.method}.sync_reference: an adapter's reference is its base, fixed")
        beta = generation.beta if isinstance(generation, GRPO | RLOO) else 0
        if beta and model.from_scratch and not self.adapter:
            raise ValueError(
                f"training.{training.method}.beta: there is no reference for a model from scratch; set it to 0"
            )
        if generation and generation.sync_reference and not beta:
            raise ValueError(f"training.{training.method}.sync_reference: without beta there is no reference")
        return self

    @model_validator(mode="after")
    def _watched(self) -> Recipe:
        if self.phases:
            return self  # each phase is checked for itself
        training = self.training
        plateau = training.lr_scheduler in ("reduce_lr_on_plateau", "greedy")
        best = self.export.checkpoint == "best"
        watchers = {
            "training.early_stopping": training.early_stopping,
            "training.lr_scheduler": plateau,
            "export.checkpoint": best,
        }
        for what, given in watchers.items():
            if given and not self.evaluation.every:
                raise ValueError(f"{what}: looks at evaluations, and there are none; set evaluation.every")
        if best and not self.chunks.keep.best:
            raise ValueError("export.checkpoint: the best is not kept; set chunks.keep.best to 1 or more")
        self.evaluation.check_gate(training.method)
        if self.export.alias and not self.evaluation.gate:
            raise ValueError("export.alias: an alias moves only when a gate has held; set evaluation.gate")
        if "adapter" in self.export.formats and self.adapter is None:
            raise ValueError("export.formats: there is no adapter; take safetensors, or add an adapter")
        if self.hooks.loss and training.method not in ("sft", "pretrain"):
            raise ValueError(f"hooks.loss: {training.method} has a loss of its own; use hooks.trainer to change it")
        if self.hooks.collator and (training.generation or self.data.packing == "best-fit"):
            what = training.method if training.generation else "best-fit packing"
            raise ValueError(f"hooks.collator: {what} joins its batches itself; leave one of the two out")
        return self
