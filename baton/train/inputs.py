"""Downloads what training needs: a checkpoint, tokens, the base model, the user's code."""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

from baton import fork
from baton.checkpoint.restore import Restored, Restorer
from baton.checkpoint.staging import Staging
from baton.models import pinned, user_code
from baton.runs.documents import StagePhase
from baton.store.cache import NodeCache
from baton.train import imports
from baton.train.context import TrainContext
from baton.train.data.tokens import ChunkTokens


@dataclass(frozen=True)
class Inputs:
    """Checkpoint, tokens, models and code on this machine.

    Attributes:
        restored: The checkpoint to resume from, None at the start of a run.
        skipped: Why newer checkpoints were passed over.
        tokens: The tokenized rows and the tokenizer.
        models: Local folders of the models that the recipe names, by role; see `pinned`.
        code: Folder of the user's Python files, None where there are none.
    """

    restored: Restored | None
    skipped: list[str]
    tokens: ChunkTokens
    models: dict[str, str]
    code: str | None


class _Folders(NamedTuple):
    """Local folders, as the rank that downloads them tells the others on its machine."""

    restored: Restored | None
    skipped: list[str]
    tokens: str
    models: dict[str, str]
    code: str | None


def fetch_inputs(context: TrainContext, staging: Staging, *, to_score: bool) -> Inputs:
    """Downloads what training needs, once for all ranks of a machine, and imports the training stack meanwhile.

    Args:
        context: The chunk.
        staging: Where downloads lie.
        to_score: Whether a checkpoint at the target will do, which lacks its score alone.

    Raises:
        BatonError: the run's model, data or checkpoints are not what they were.
    """
    cache = NodeCache.of(context.recipe.store)
    tokens = ChunkTokens(context.run, context.recipe, context.plan, staging.folder, cache)
    # A folder's own objects, a node's cache and other ranks on this machine need the files as they are.
    alone = context.ranks.size == 1 and cache is None and not context.run.storage.is_local
    place = functools.partial(staging.incoming, alone=alone)
    restorer = Restorer(context.store, context.target, context.identity, cache, place)
    if not context.ranks.leads_node:
        imports.import_training_stack(context.recipe)  # while another process fetches
    folders = context.ranks.on_node_leaders(lambda: _fetch(context, restorer, tokens, staging.folder(0), to_score))
    tokens.adopt(folders.tokens)
    return Inputs(folders.restored, folders.skipped, tokens, folders.models, folders.code)


def _fetch(context: TrainContext, restorer: Restorer, tokens: ChunkTokens, scratch: str, to_score: bool) -> _Folders:
    with ThreadPoolExecutor(4) as pool:
        fetching = pool.submit(restorer.fetch, to_score=to_score)
        early = pool.submit(_fetch_tokens, context, tokens)
        models = pool.submit(pinned.compared, context.run, context.recipe)
        own_code = pool.submit(user_code.fetch, context.run, scratch)
        context.clock.enter(StagePhase.IMPORT)
        imports.import_training_stack(context.recipe)
        context.clock.enter(StagePhase.FETCH)
        restored = restorer.require_no_code(fetching.result())
        start = restored.step if restored else 0
        if early.result() != start < context.target:  # a damaged checkpoint was passed over: other rows are needed
            tokens.fetch(start, context.target)
    if restored is None:
        # Before training: a warm fork must not begin with the base's weights.
        fork.require_start(context.run)
    return _Folders(restored, restorer.skipped, tokens.folder, models.result(), own_code.result())


def _fetch_tokens(context: TrainContext, tokens: ChunkTokens) -> int:
    """Fetches the tokens after the newest checkpoint that seems usable, and returns its step."""
    steps = (checkpoint.step for checkpoint in context.store.committed())
    start = next((step for step in steps if step < context.target), 0)
    tokens.fetch(start, context.target)
    return start
