"""The sections of a recipe, and what follows from several of them."""

from __future__ import annotations

import math
from typing import Annotated, Self

from pydantic import Field, ValidationError

from baton.errors import UserError
from baton.recipe.base import Name, Section
from baton.recipe.cluster import Parallel, Resources
from baton.recipe.data import Data
from baton.recipe.evaluation import Evaluation, Export
from baton.recipe.model import Adapter, Model
from baton.recipe.run import Chunks, Hooks, Store, Tracking, Trust, shorthand
from baton.recipe.search import Retrain, Search, ShortPhase, phase_document
from baton.recipe.training import Training


class Sections(Section):
    """All sections of a recipe, each valid by itself; `Recipe` holds them to each other."""

    name: Name
    """Name of the pipeline and prefix of its runs: lower-case letters, digits, dashes."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Decides the split, the initial weights, the order of rows and every random draw."""
    store: Annotated[Store, shorthand("uri")] = Store()
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
    """Several trainings one after the other, each starting from the model of the one before, such as
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
    trust: Trust = None
    """Of a recipe from elsewhere. `ask`: its code runs only where somebody gives `--trust`. Else the SHA-256 of each
    file of code that somebody has consented to so, which Baton writes when it compiles, submits or runs the recipe;
    other code is refused. Left out of a recipe of your own."""

    def phase_recipes(self) -> list[Self]:
        """Returns a recipe for each phase, none where there are no phases.

        Raises:
            ValueError: a phase does not make a recipe; the message has a line per problem.
        """
        document = self.model_dump(mode="json")
        recipes = []
        for position, phase in enumerate(self.phases):
            last = position == len(self.phases) - 1
            try:
                recipes.append(type(self).model_validate(phase_document(document, phase, position, last=last)))
            except ValidationError as error:
                problems = (
                    f"{'.'.join(map(str, x['loc']))}: {x['msg'].removeprefix('Value error, ')}" for x in error.errors()
                )
                raise ValueError(f"phase {phase.name}: {'; '.join(problems)}") from None
        return recipes

    @property
    def num_chunks(self) -> int:
        """Chunks of the run without spare ones."""
        count = self.chunks.count
        return math.ceil(self.training.epochs or 1.0) if count == "per-epoch" else count

    @property
    def slots(self) -> int:
        """Chunks of the run, spare ones included."""
        return self.num_chunks + self.chunks.spare

    @property
    def parallel(self) -> Parallel:
        """How the processes share the work."""
        return self.training.parallel or Parallel()

    @property
    def processes(self) -> int:
        """Processes of a pod; with virtual workers as many as can share those evenly."""
        workers = self.parallel.virtual_workers
        return int(2 ** (min(self._asked, workers).bit_length() - 1)) if workers else self._asked

    @property
    def _asked(self) -> int:
        asked = self.parallel.processes
        return max(1, self.resources.gpus) if asked == "auto" else asked

    @property
    def world_size(self) -> int:
        """Processes that train together, over all pods of a chunk; the most, where their number may vary."""
        return self.processes * self.max_nodes

    @property
    def node_counts(self) -> list[int]:
        """Numbers of pods that may train a chunk together, the largest first."""
        nodes, workers = self.resources.nodes, self.parallel.virtual_workers
        if isinstance(nodes, int):
            return [nodes]
        numbers = range(nodes.max, nodes.min - 1, -1)
        return [number for number in numbers if workers and workers % (number * self.processes) == 0]

    @property
    def max_nodes(self) -> int:
        """Pods that train a chunk together; the most, where their number may vary."""
        nodes = self.resources.nodes
        return max(self.node_counts, default=nodes if isinstance(nodes, int) else nodes.max)

    @property
    def workers(self) -> int:
        """Into how many parts each step is cut: for the virtual workers, else for the processes."""
        return self.parallel.virtual_workers or self.world_size

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
        return size or self.training.batch_size // self.workers

    @property
    def evaluation_batch_size(self) -> int:
        """Rows per forward pass of an evaluation; what it comes to differs by rounding between sizes.

        Raises:
            UserError: it follows from the micro-batch size, which no chunk has found yet.
        """
        return self.evaluation.batch_size or self.micro_batch_size_per_process

    @property
    def gradient_accumulation_steps(self) -> int:
        """Forward passes of each worker per optimizer step."""
        return self.training.batch_size // (self.micro_batch_size_per_process * self.workers)

    @property
    def steps_per_generation(self) -> int:
        """Forward passes of each worker over which a round of completions is spread."""
        return self.training.round_size // (self.micro_batch_size_per_process * self.workers)

    @property
    def split(self) -> str:
        """How a batch is split, in words."""
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
        """What goes over all training rows in every chunk, so that `data.order` cannot be `blocks`; None for nothing.

        Some of TRL's trainers prepare all rows when they are built; those that write, lengths and curriculum choose
        from all of them.
        """
        training = self.training
        if training.spec.needs_all_rows:
            return training.method
        if training.group_by_length:
            return "training.group_by_length"
        return "training.curriculum" if training.curriculum else None
