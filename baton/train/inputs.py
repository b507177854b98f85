"""Downloads for training: the checkpoint, tokens, models and the user's code."""

import functools
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from baton import fork
from baton.checkpoint.restore import FetchedCheckpoint, Restorer
from baton.checkpoint.staging import Staging
from baton.errors import UserError
from baton.models import pinned, user_code
from baton.runs.documents import StagePhase
from baton.store.cache import NodeCache
from baton.train import imports
from baton.train.context import TrainContext
from baton.train.tokens import ChunkTokens


def _remove(prefix: str, folder: str) -> None:
    for name in os.listdir(folder):
        if name.startswith(prefix):
            os.remove(os.path.join(folder, name))


# Parts that a negative control can leave out, and how to remove each from a checkpoint's folder.
CONTROLS: dict[str, Callable[[str], None]] = {
    "rng": functools.partial(_remove, "rng_state"),
    "hooks": functools.partial(_remove, "baton_state_hooks"),
}


@dataclass(frozen=True)
class ChunkInputs:
    """Local checkpoint, tokens, models by role and code folder; `skipped` holds why checkpoints were passed over."""

    restored: FetchedCheckpoint | None
    skipped: list[str]
    tokens: ChunkTokens
    models: dict[str, str]
    code: str | None


def without(restored: FetchedCheckpoint | None, parts: tuple[str, ...], scratch: str) -> FetchedCheckpoint | None:
    """Returns a copy of a checkpoint without parts of the state: a negative control, which must end on other bits."""
    if unknown := [part for part in parts if part not in CONTROLS]:
        raise UserError(f"{unknown[0]!r} cannot be excluded from the restored state; expected {' or '.join(CONTROLS)}.")
    if restored is None or not parts:
        return restored
    copy = shutil.copytree(restored.folder, os.path.join(scratch, f"control-{restored.step}"))
    for part in parts:
        CONTROLS[part](copy)
    return replace(restored, folder=copy, left_out=parts)


def open_restorer(context: TrainContext, staging: Staging, cache: NodeCache | None) -> Restorer:
    # Not in memory if the store's own folder, a node's cache or other ranks share the files: they must not change.
    alone = context.ranks.size == 1 and cache is None and not context.run.storage.is_local
    place = functools.partial(staging.incoming, alone=alone)
    return Restorer(context.store, context.target, context.identity, cache, place)


def fetch_inputs(context: TrainContext, staging: Staging, *, to_score: bool, leave_out: tuple[str, ...]) -> ChunkInputs:
    """Downloads for all ranks of a machine, and imports the training stack meanwhile; `BatonError` if inputs changed.

    With `to_score` a checkpoint at the target also counts, as only its score is missing; for `leave_out` see `without`.
    """
    tokens = ChunkTokens(context.run, context.recipe, context.plan, staging.folder, context.cache)
    restorer = open_restorer(context, staging, context.cache)

    def fetch_tokens() -> int:
        """Fetches the tokens after the newest checkpoint that seems usable, and returns its step."""
        steps = (checkpoint.step for checkpoint in context.store.committed())
        start = next((step for step in steps if step < context.target), 0)
        tokens.fetch(start, context.target)
        return start

    def fetch() -> tuple[FetchedCheckpoint | None, list[str], str, dict[str, str], str | None]:
        with ThreadPoolExecutor(4) as pool:
            fetching = pool.submit(restorer.fetch, to_score=to_score)
            early = pool.submit(fetch_tokens)
            models = pool.submit(pinned.compared, context.run, context.recipe)
            own_code = pool.submit(user_code.fetch, context.run, staging.folder(0))
            context.clock.enter(StagePhase.IMPORT)
            imports.import_training_stack(context.recipe)
            context.clock.enter(StagePhase.FETCH)
            restored = restorer.require_no_code(fetching.result())
            start = restored.step if restored else 0
            if early.result() != start < context.target:  # passed over a damaged one: earlier rows are needed
                tokens.fetch(start, context.target)
        if restored is None:
            # A warm fork without its first checkpoint must fail rather than begin with the base's weights.
            fork.require_start(context.run)
        restored = without(restored, leave_out, staging.folder(0))
        return restored, restorer.skipped, tokens.folder, models.result(), own_code.result()

    if not context.ranks.leads_node:
        imports.import_training_stack(context.recipe)  # while another process fetches
    restored, skipped, folder, models, code = context.ranks.on_node_leaders(fetch)
    tokens.adopt(folder)
    return ChunkInputs(restored, skipped, tokens, models, code)
