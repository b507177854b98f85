"""What the tests of negative controls run in the processes: one chunk, resumed again and again without some parts."""

from __future__ import annotations

import dataclasses
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from baton.checkpoint.staging import Staging
from baton.checkpoint.store import CheckpointStore
from baton.runs.run import Run
from baton.train import inputs
from tests.support import without


def resumed(run_uri: str, index: int, copies: Mapping[str, tuple[str, ...]]) -> None:
    """Runs a chunk in each copy of its run, in a fork each of one process that has fetched and built what they need.

    Args:
        run_uri: Address of the run, which stays as it is.
        index: Number of the chunk.
        copies: Address of a copy → the parts of the state that are not restored there.
    """
    from baton.train import attempt
    from baton.train.chunk import run_chunk

    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads would not be there after a fork
    without.install()
    train = attempt.train_chunk

    def train_copies(
        context: Any, restored: Any, skipped: Any, _staging: Any, watch: Any, build: Any, **options: Any
    ) -> Any:
        found, trainer = build()
        for uri, parts in copies.items():

            def train_copy(uri: str = uri, parts: tuple[str, ...] = parts) -> None:
                run = Run.open(uri)
                here = dataclasses.replace(found, run=run, store=CheckpointStore(run))
                with Staging() as staging:
                    doctored = inputs.without(restored, parts, staging.folder(0))
                    train(here, doctored, skipped, staging, watch, lambda: (here, trainer), **options)

            child = os.fork()
            if not child:
                _end_with(train_copy)
            if os.waitpid(child, 0)[1]:
                raise RuntimeError(f"chunk {index} of {uri} failed.")
        return SimpleNamespace(committer=None)

    attempt.train_chunk = train_copies
    run_chunk(run_uri, index)


def _end_with(work: Callable[[], None]) -> None:
    """Does the work of a forked process, and ends it."""
    code = 1
    try:
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
