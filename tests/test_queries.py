"""What only looks changes nothing: neither this process nor the store."""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.utils import chat_template_utils

from baton.checkpoint.store import CheckpointStore
from baton.local import results
from baton.models import chat, loading, trained
from baton.runs import lineage
from baton.runs.documents import Progress, TokenizedRows
from baton.runs.run import Run
from baton.train.checkpointer import Lost, ProgressNotes
from tests.evaluate.finished import CHATTY, finished
from tests.support import tiny


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model with a chat template."""
    return tiny.make_chat_base(tmp_path_factory.mktemp("base") / "base")


@pytest.fixture
def run(base: str, tmp_path: Path) -> Iterator[Run]:
    """A finished run of a day long ago, whose last process was killed beyond its checkpoint."""
    run = finished(tmp_path, tiny.recipe(base), {"train": CHATTY, "eval": CHATTY})
    run.put(TokenizedRows.NAME, run.require(TokenizedRows.NAME) | {"today": "2024-02-29"})
    run.write(Progress(step=9, chunk=1, seconds_per_step=2.0, at="2024-02-29T00:00:00Z"))
    chat.set_template_date(None)
    yield run
    chat.set_template_date(None)


QUERIES: dict[str, Callable[[Run, str], Any]] = {
    "the manifest of a run's tokens": lambda run, _: trained.tokens_manifest(run),
    "a run's tokens": lambda run, folder: trained.tokens_folder(run, folder),
    "a run's tokenizer": lambda run, _: loading.load_tokenizer(str(run.recipe().model.base)),
    "its last checkpoint": lambda run, _: trained.final_checkpoint(run),
    "the checkpoint of its result": lambda run, _: trained.chosen_checkpoint(run),
    "what was lost": lambda run, _: ProgressNotes(run, 1).lost(2),
    "its family": lambda run, _: lineage.family(run.storage),
    "its checkpoints": lambda run, _: (results.list_checkpoints(run), results.verify_checkpoints(run)),
    "what is committed": lambda run, _: (CheckpointStore(run).newest(), run.verified_step()),
}


def _process() -> dict[str, Any]:
    return {
        "environment": dict(os.environ),
        "limits": [resource.getrlimit(kind) for kind in (resource.RLIMIT_DATA, resource.RLIMIT_AS)],
        "signals": [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)],
        "path": list(sys.path),
        "folder": os.getcwd(),
        "threads": torch.get_num_threads(),
        "deterministic": torch.get_deterministic_debug_mode(),
        "bars": transformers.utils.logging.is_progress_bar_enabled(),
        "what templates ask": chat_template_utils.datetime,
        "others": [thread.name for thread in threading.enumerate() if thread.name.startswith("baton")],
    }


def _store(run: Run) -> dict[str, bytes]:
    return {path: run.storage.read(path) for path in run.storage.find("")}


@pytest.mark.parametrize("name", QUERIES)
def test_a_query_changes_nothing(name: str, run: Run, tmp_path: Path) -> None:
    process, store = _process(), _store(run)
    QUERIES[name](run, str(tmp_path / "scratch"))
    assert _process() == process
    assert _store(run) == store


def test_templates_ask_the_clock_again_once_no_day_is_told() -> None:
    before = chat_template_utils.datetime
    chat.set_template_date("2024-02-29")
    assert chat_template_utils.datetime.now().isoformat() == "2024-02-29T00:00:00"
    chat.set_template_date(None)
    assert chat_template_utils.datetime is before


def test_what_was_lost_is_reported_once_training_has_begun(run: Run) -> None:
    notes = ProgressNotes(run, 1)
    assert notes.lost(2) == ProgressNotes(run, 1).lost(2) == Lost(7, 14.0)
    notes.start(2)
    for thread in threading.enumerate():
        if thread.name == "baton-progress":
            notes.end()
            thread.join()
    assert ProgressNotes(run, 1).lost(2) == Lost()
