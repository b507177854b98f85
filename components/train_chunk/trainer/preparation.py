"""A run's trainer on this machine, with all that bits depend on set before anything is computed."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping

from baton.components.shared.core import machine
from baton.components.shared.models import pinned, today
from baton.components.shared.runs import code
from baton.components.shared.runs.documents.data import RunHead
from baton.components.shared.runs.documents.data import Tokens as TokensDocument
from baton.components.shared.store.cache import NodeCache
from baton.components.train_chunk.context import TrainContext
from baton.components.train_chunk.data.tokens import Tokens
from baton.components.train_chunk.distributed import devices
from baton.components.train_chunk.trainer import arguments, building, micro_batch
from baton.components.train_chunk.trainer.base import ChunkTrainer, Options


def prepare(
    context: TrainContext,
    tokens: Tokens,
    folders: Mapping[str, str],
    output_dir: str,
    *,
    code_folder: str | None,
    start_weights: bool = True,
    evaluates: bool | None = None,
    changed: Options | None = None,
) -> tuple[TrainContext, ChunkTrainer]:
    """Builds the trainer of the recipe's method.

    Args:
        context: The chunk.
        tokens: The tokenized rows and the tokenizer.
        folders: Local folders of the models that the recipe names, by role; see `pinned`.
        output_dir: A local folder.
        code_folder: Folder of the user's Python files, None where there are none.
        start_weights: Whether the model needs its own; left undefined where a checkpoint is loaded over them.
        evaluates: Whether held-out rows are needed; as the recipe says when None.
        changed: Arguments of the method's configuration in place of the run's.

    Returns:
        The chunk with its micro-batch size found, and the trainer.
    """
    # In each rank: a method that writes renders its prompts, and one rank of a machine alone has fetched the tokens.
    told = context.run.read(TokensDocument)
    today.tell(told.today if told else None)
    # Before anything is built: the recipe names hooks and functions that are imported from there.
    code.install(code_folder)
    context = micro_batch.resolve(context, tokens, folders, output_dir)
    setup = building.setup(
        context.recipe,
        context.plan,
        tokens,
        folders,
        output_dir,
        start_weights=start_weights,
        evaluates=evaluates,
        weighs=context.run.need(RunHead).made.number("loss") > 1,
    )
    setup = dataclasses.replace(setup, arguments={**setup.arguments, **(changed or {})})
    # With virtual workers each process is told that it trains alone.
    with context.ranks.hidden() if context.recipe.parallel.virtual_workers else contextlib.nullcontext():
        return context, building.build(setup)


def prepare_trial(context: TrainContext, num_steps: int, folder: str, changed: Options) -> ChunkTrainer:
    """Builds the trainer that the run's first chunk begins with, for a model that is thrown away.

    Args:
        context: The first chunk.
        num_steps: Steps for which rows are needed.
        folder: A local folder for all that is downloaded and written.
        changed: Arguments of the method's configuration in place of the run's.
    """
    recipe = context.recipe
    machine.require_gpus(recipe.resources.image)
    devices.pin(recipe, context.ranks)
    training = recipe.training
    arguments.make_deterministic(training.threads, training.deterministic, tf32=arguments.uses_tf32(recipe))
    tokens = Tokens(context.run, recipe, context.plan, lambda _: folder, NodeCache.of(recipe.store))
    tokens.fetch(0, num_steps)
    own_code = code.fetch(context.run, folder)
    folders = pinned.compared(context.run, recipe)
    return prepare(context, tokens, folders, folder, code_folder=own_code, evaluates=False, changed=changed)[1]
