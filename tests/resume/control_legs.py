"""What the tests of negative controls run in the processes: one chunk, resumed again and again without some parts."""

from __future__ import annotations

import dataclasses
import os
import sys
import traceback
from collections.abc import Mapping
from typing import Any


def resumed(run_uri: str, index: int, copies: Mapping[str, tuple[str, ...]]) -> None:
    """Runs a chunk in each copy of its run, in a fork each of one process that has fetched and built what they need.

    Args:
        run_uri: Address of the run, which stays as it is.
        index: Number of the chunk.
        copies: Address of a copy → the parts of the state that are not restored there.
    """
    from baton.train.attempt import Attempt
    from baton.train.chunk import run_chunk

    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads would not be there after a fork
    train = Attempt.train

    def train_copies(self: Any) -> None:
        self._leave_out = ("weights",)  # so that the model has weights of its own
        trainer = self._build()
        self._build = lambda: trainer
        for uri, parts in copies.items():
            child = os.fork()
            if not child:
                _train_copy(train, self, uri, parts)
            if os.waitpid(child, 0)[1]:
                raise RuntimeError(f"chunk {index} of {uri} failed.")

    Attempt.train = train_copies  # type: ignore[method-assign, assignment]
    run_chunk(run_uri, index)


def _train_copy(train: Any, attempt: Any, uri: str, parts: tuple[str, ...]) -> None:
    """Trains in a forked process, and ends it."""
    from baton.checkpoint.staging import Staging
    from baton.checkpoint.store import CheckpointStore
    from baton.runs.run import Run

    code = 1
    try:
        run = Run.open(uri)
        attempt._leave_out = parts
        attempt._context = dataclasses.replace(attempt._context, run=run, store=CheckpointStore(run))
        with Staging() as attempt._staging:  # it may drop what it was given; the other copies need that
            train(attempt)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
