"""Whether a checkpoint can be resumed here, and how exactly."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from baton import events
from baton.checkpoint.restore import FetchedCheckpoint
from baton.checkpoint.store import Checkpoint, CheckpointMeta
from baton.errors import BatonError, ExactnessError, UserError
from baton.recipe import load
from baton.recipe.recipe import Recipe
from baton.runs.documents import OwnState
from baton.runs.versions import LIBRARIES, Fingerprint
from baton.store.manifest import Manifest
from baton.train.attempt import adapt_machine
from baton.train.distributed import Ranks
from tests.train.resuming import as_before


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    with as_before():
        yield


def recipe(*overrides: str) -> Recipe:
    document = {"name": "one", "model": {"base": "org/model"}, "data": {"source": "rows.jsonl"}}
    found = load.validate({**document, "training": {"batch_size": 8}}, origin="one")
    return load.with_overrides(found, overrides)


def made_by(**changes: Any) -> FetchedCheckpoint:
    """Returns a checkpoint of this machine, but for some changes."""
    fingerprint = Fingerprint.here().model_copy(update=changes)
    meta = CheckpointMeta(digest="d", fingerprint=fingerprint)
    return FetchedCheckpoint(Checkpoint(7, Manifest(kind="checkpoint", folder="f", files={}), meta), "folder")


class Two(Ranks):
    """A process among two, of which the other has found something."""

    def gather(self, value: Any) -> list[Any]:
        """Returns this one's value, and the other's, which found one of step 5."""
        return [value, 5 if isinstance(value, int) else value]


def test_the_first_chunks_threads_hold() -> None:
    assert adapt_machine(None, Ranks(), recipe("training.threads=2")) == "bitwise"
    assert torch.get_num_threads() == 2
    assert torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(1)
    before = made_by(threads=3)
    assert adapt_machine(before, Ranks(), recipe("training.threads=2")) == "bitwise"
    assert torch.get_num_threads() == 3


@pytest.mark.parametrize(("tf32", "precision"), [("true", "high"), ("false", "highest")])
def test_products_are_rounded_where_the_recipe_says_so(tf32: str, precision: str) -> None:
    torch.set_float32_matmul_precision("highest")
    adapt_machine(None, Ranks(), recipe(f"training.tf32={tf32}", "resources.gpus=1"))
    assert torch.get_float32_matmul_precision() == precision


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_recipe_may_do_without_determinism(deterministic: bool) -> None:
    adapt_machine(None, Ranks(), recipe(f"training.deterministic={str(deterministic).lower()}"))
    assert torch.are_deterministic_algorithms_enabled() is deterministic
    from torch._inductor import config

    assert config.deterministic is deterministic
    command = [sys.executable, "-c", "from torch._inductor import config; print(config.deterministic)"]
    read = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    assert read == str(deterministic)  # by a process that imports it later


def test_virtual_workers_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    adapt_machine(None, Ranks(), recipe("training.parallel={virtual_workers: 2}"))
    assert torch.get_num_threads() == 3
    adapt_machine(None, Ranks(), recipe("training.parallel={virtual_workers: 2}", "training.threads=2"))
    assert torch.get_num_threads() == 2
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    adapt_machine(None, Ranks(), recipe("training.parallel={virtual_workers: 2}"))
    assert torch.get_num_threads() == 1


def test_another_machine_is_consistent_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    monkeypatch.setattr(events, "emit", told.append)
    adapt_machine(None, Ranks(), recipe())
    assert adapt_machine(made_by(torch="1.0"), Ranks(), recipe()) == "consistent"
    (event,) = told
    assert event.changed == [f"torch: 1.0 → {torch.__version__}"]
    with pytest.raises(ExactnessError, match=r"chunks\.exactness is bitwise, but this machine differs .*torch: 1\.0 →"):
        adapt_machine(made_by(torch="1.0"), Ranks(), recipe("chunks.exactness=bitwise"))
    assert adapt_machine(made_by(), Ranks(), recipe("chunks.exactness=bitwise")) == "bitwise"


@pytest.mark.parametrize("name", LIBRARIES)
def test_another_version_of_a_library_is_never_bitwise(name: str) -> None:
    adapt_machine(None, Ranks(), recipe())
    assert adapt_machine(made_by(**{name: "0.0.1"}), Ranks(), recipe()) == "consistent"
    with pytest.raises(ExactnessError, match=rf"{name}: 0\.0\.1 →"):
        adapt_machine(made_by(**{name: "0.0.1"}), Ranks(), recipe("chunks.exactness=bitwise"))


OWN: dict[str, tuple[OwnState | None, dict[str, Any], tuple[str, ...], str]] = {
    "not looked at": (None, {}, (), "bitwise"),
    "none": (OwnState(), {}, (), "bitwise"),
    "carried": (OwnState(carried={"own.py:n": "d"}), {}, (), "bitwise"),
    "not carried": (OwnState(lost={"own.py:n": "why"}), {}, (), "consistent"),
    "of two virtual workers' processes": (
        OwnState(carried={"own.py:n": "d"}),
        {"world_size": 2},
        ("training.parallel.virtual_workers=2",),
        "consistent",
    ),
}


@pytest.mark.parametrize("case", OWN)
def test_state_of_ones_own_code_decides_how_exact_a_chunk_resumes(
    case: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own, changes, overrides, level = OWN[case]
    virtual = 2 if overrides else None
    adapt_machine(None, Ranks(), recipe(*overrides, "training.threads=1"))  # the modes that the checkpoint was made in
    restored = made_by(**changes, **({"virtual_workers": virtual} if virtual else {}))
    if own is not None:
        meta = restored.checkpoint.meta.model_copy(update={"hooks": own})
        restored = FetchedCheckpoint(dataclasses.replace(restored.checkpoint, meta=meta), "folder")
    monkeypatch.setenv("BATON_EVENTS", "stdout")
    assert adapt_machine(restored, Ranks(), recipe(*overrides)) == level
    assert ("not_carried" in capsys.readouterr().out) is (level == "consistent")
    if level == "consistent":
        with pytest.raises(ExactnessError, match=r"state of `own.py:n` is not carried: .*state_dict"):
            adapt_machine(restored, Ranks(), recipe(*overrides, "chunks.exactness=bitwise"))


def test_machines_that_found_different_checkpoints_do_not_begin() -> None:
    two = recipe("training.parallel={processes: 2}")
    with pytest.raises(BatonError, match=r"the machines found different newest checkpoints: \[7, 5\]"):
        adapt_machine(made_by(), Two(size=2), two)
    with pytest.raises(BatonError, match=r"different newest checkpoints: \[0, 5\]"):
        adapt_machine(None, Two(size=2), two)


@pytest.mark.parametrize(
    ("before", "now", "readable"),
    [
        ({"world_size": 2, "strategy": "fsdp"}, None, True),
        ({"world_size": 2, "strategy": "zero3"}, None, True),
        ({"world_size": 1}, "fsdp", True),
        ({"world_size": 1}, "ddp", True),
        ({"world_size": 4, "strategy": "fsdp"}, "fsdp", True),
        ({"world_size": 2, "strategy": "ddp"}, "fsdp", False),
        ({"world_size": 2, "strategy": "fsdp"}, "ddp", False),
        ({"world_size": 2, "strategy": "zero2"}, "zero3", False),
        ({"world_size": 1}, "zero2", False),
    ],
)
def test_what_is_split_otherwise_is_read_by_one_process_alone(
    before: dict[str, Any], now: str | None, readable: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(Two, "gather", lambda self, value: [value])
    # A fingerprint of ZeRO's ranks states the version of the package, which need not be installed here.
    (tmp_path / "deepspeed-0.19.8.dist-info").mkdir()
    (tmp_path / "deepspeed-0.19.8.dist-info/METADATA").write_text("Name: deepspeed\nVersion: 0.19.8\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    ranks = Two(size=2) if now else Ranks()
    given = recipe(f"training.parallel={{strategy: {now}, processes: 2}}") if now else recipe()
    # As ZeRO's ranks, which have the package; what is told of it is no matter here.
    if readable:
        assert adapt_machine(made_by(**before), ranks, given) == "consistent"
        return
    how = "by one process" if before["world_size"] == 1 else f"with training.parallel.strategy {before['strategy']}"
    with pytest.raises(UserError, match=rf"step 7 was written {how}, and this chunk has {now}\."):
        adapt_machine(made_by(**before), ranks, given)
