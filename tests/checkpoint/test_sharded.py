"""What FSDP saved in shards comes out whole, bit for bit, and nothing in it is run on the way."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from baton.checkpoint import sharded
from baton.checkpoint.store import CheckpointMeta, CheckpointStore
from baton.cli.app import app
from baton.errors import DamagedError
from baton.runs.run import Run
from baton.store.storage import Storage
from tests.checkpoint.shards import TOKENS

SHARDS = Path(__file__).with_name("shards.py")


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two processes saved: `checkpoint` in shards, and weights and logits as they had them in memory."""
    out = tmp_path_factory.mktemp("shards")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SHARDS.parents[2])}
    done = subprocess.run([sys.executable, str(SHARDS), str(out)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return out


@pytest.fixture
def checkpoint(saved: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint, to be changed."""
    return Path(shutil.copytree(saved / "checkpoint", tmp_path / "checkpoint"))


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    return found


@pytest.mark.parametrize(("shard_size", "num_files"), [("5GB", 1), ("20KB", 5)])
def test_the_whole_is_what_the_processes_had(saved: Path, tmp_path: Path, shard_size: str, num_files: int) -> None:
    files = sharded.merge(str(saved / "checkpoint"), str(tmp_path / "m"), shard_size=shard_size)
    assert len(files) == num_files
    found, expected = _weights(tmp_path / "m"), load_file(saved / "gathered.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(tmp_path / "m")(input_ids=TOKENS).logits
    theirs = load_file(saved / "logits.safetensors")["logits"]
    # The same weights, which lay in the buffers of a gather there: kernels may add them in another order.
    torch.testing.assert_close(logits, theirs, rtol=0, atol=1e-5 * float(theirs.abs().max()))


def test_an_adapter_is_one_file_whatever_its_size(saved: Path, checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "config.json").rename(checkpoint / "adapter_config.json")
    files = sharded.merge(str(checkpoint), str(tmp_path / "m"), shard_size="20KB")
    assert files == ["adapter_model.safetensors"]
    assert sorted(path.name for path in (tmp_path / "m").iterdir()) == ["adapter_config.json", *files]
    assert _weights(tmp_path / "m").keys() == load_file(saved / "gathered.safetensors").keys()


def test_each_file_is_loaded_by_itself(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is bounded by a file of the result: no more is asked of torch at once."""
    asked: list[int] = []
    load = dcp.load

    def noted(state: dict[str, torch.Tensor], **given: Any) -> None:
        asked.append(sum(tensor.nbytes for tensor in state.values()))
        load(state, **given)

    monkeypatch.setattr(dcp, "load", noted)
    sharded.merge(str(saved / "checkpoint"), str(tmp_path / "m"), shard_size="20KB")
    assert len(asked) == 5
    assert max(asked) <= 20_000
    assert sum(asked) == sum(tensor.nbytes for tensor in load_file(saved / "gathered.safetensors").values())


def test_what_makes_a_model_comes_along_and_what_training_leaves_does_not(checkpoint: Path, tmp_path: Path) -> None:
    beside = ["tokenizer.json", "chat_template.jinja", "spiece.model", "merges.txt", "modeling_own.py"]
    for name in [*beside, "trainer_state.json", "scheduler.pt", "rng_state_0.pth"]:
        (checkpoint / name).write_text(name)
    files = sharded.merge(str(checkpoint), str(tmp_path / "m"))
    assert {path.name for path in (tmp_path / "m").iterdir()} == {*files, *beside, "config.json"}
    assert (tmp_path / "m" / "merges.txt").read_text() == "merges.txt"


def test_nothing_that_a_list_of_shards_names_is_imported(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "planted_module.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'it-ran')!r})\nfloat_it = 3\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    path = checkpoint / "pytorch_model_fsdp_0" / ".metadata"
    path.write_bytes(b"cplanted_module\nfloat_it\n.")
    with pytest.raises(DamagedError, match=r"a pickle that holds code \(planted_module\.float_it\)"):
        sharded.read_metadata(str(path.parent))
    assert not (tmp_path / "it-ran").exists()
    path.write_bytes(b"ctorch\nfloat_power\n.")
    with pytest.raises(DamagedError, match=r"a pickle that holds code \(torch\.float_power\)"):
        sharded.read_metadata(str(path.parent))
    path.write_bytes(b"ctorch\nfloat32\n.")
    with pytest.raises(DamagedError, match=r"it is dtype"):
        sharded.read_metadata(str(path.parent))


class _Code:
    """A pickle that makes a folder when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (self.path,)


def test_a_list_of_shards_that_holds_code_is_not_read(checkpoint: Path, tmp_path: Path) -> None:
    mark = tmp_path / "it-ran"
    (checkpoint / "pytorch_model_fsdp_0" / ".metadata").write_bytes(pickle.dumps(_Code(mark)))
    with pytest.raises(DamagedError, match=r"a pickle that holds code \(posix.mkdir\)"):
        sharded.merge(str(checkpoint), str(tmp_path / "m"))
    (line,) = sharded.code_in(str(checkpoint))
    assert "pytorch_model_fsdp_0/.metadata" in line
    assert not mark.exists()
    with pytest.raises(Exception):  # noqa: B017, PT011
        dcp.FileSystemReader(checkpoint / "pytorch_model_fsdp_0").read_metadata()
    assert mark.exists()  # torch's own reader runs it


def test_a_list_of_shards_that_numbers_its_values_without_end_is_not_read(checkpoint: Path, tmp_path: Path) -> None:
    # LONG_BINPUT of 2**31 - 1: pickle's reader would make room for so many values, 34 GB.
    (checkpoint / "pytorch_model_fsdp_0" / ".metadata").write_bytes(b"\x80\x02Nr\xff\xff\xff\x7f.")
    with pytest.raises(DamagedError, match=r"it has a value of number 2,147,483,647, and 9 bytes"):
        sharded.merge(str(checkpoint), str(tmp_path / "m"))
    (line,) = sharded.code_in(str(checkpoint))
    assert "it has a value of number" in line


def test_a_value_beside_the_tensors_that_holds_code_is_named(checkpoint: Path, tmp_path: Path) -> None:
    assert sharded.code_in(str(checkpoint)) == []
    mark = tmp_path / "it-ran"
    shutil.rmtree(checkpoint / "optimizer_0")
    dcp.save({"lr": _Code(mark), "step": 3}, checkpoint_id=checkpoint / "optimizer_0", no_dist=True)
    (line,) = sharded.code_in(str(checkpoint))
    assert line.startswith("optimizer_0/__0_0.distcp: a pickle that holds code (posix.mkdir), lr")
    assert not mark.exists()


def _changed(checkpoint: Path, change: Callable[[Any], None]) -> None:
    path = checkpoint / "pytorch_model_fsdp_0"
    metadata = sharded.read_metadata(str(path))
    change(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def _elsewhere(metadata: Any) -> None:
    next(iter(metadata.storage_data.values())).relative_path = "../../secret"


def _beyond(metadata: Any) -> None:
    next(iter(metadata.storage_data.values())).length = 10**9


def _encoded(metadata: Any) -> None:
    next(iter(metadata.storage_data.values())).transform_descriptors = ["zstd"]


def _without_a_piece(metadata: Any) -> None:
    entry = metadata.state_dict_metadata["model.lm_head.weight"]
    entry.chunks = entry.chunks[:1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_elsewhere, "'../../secret' is not a file of its folder"),
        (_beyond, "has no byte 10"),
        (_encoded, r"is encoded by \['zstd'\]"),
        (_without_a_piece, "lm_head.weight: its pieces have 1024 numbers, the whole 2048"),
    ],
)
def test_shards_that_do_not_fit_together_are_refused(
    checkpoint: Path, tmp_path: Path, change: Callable[[Any], None], message: str
) -> None:
    _changed(checkpoint, change)
    with pytest.raises(DamagedError, match=message):
        sharded.merge(str(checkpoint), str(tmp_path / "m"))


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Run:
    """A run whose first checkpoint is whole, and whose second is in shards."""
    found = Run(Storage(str(tmp_path / "store")), "r")
    found.put("recipe.json", {"recipe": {}})
    whole = tmp_path / "whole"
    whole.mkdir()
    shutil.copy(saved / "gathered.safetensors", whole / "model.safetensors")
    store = CheckpointStore(found)
    for step, folder in ((20, whole), (40, saved / "checkpoint")):
        writer = store.open_writer(step)
        writer.send(str(folder))
        store.commit(step, writer, CheckpointMeta(digest=f"of {step}"))
    return found


def _merge(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["checkpoints", "merge", *arguments])


def test_the_command_merges_the_newest(run: Run, saved: Path, tmp_path: Path) -> None:
    said = _merge(run.uri, "--output", str(tmp_path / "m"), "--json")
    assert said.exit_code == 0, said.output
    answer = json.loads(said.stdout)
    assert (answer["step"], answer["was_sharded"], answer["files"]) == (40, True, ["model.safetensors"])
    expected = load_file(saved / "gathered.safetensors")
    assert all(torch.equal(value, expected[name]) for name, value in _weights(tmp_path / "m").items())
    assert sorted(path.name for path in tmp_path.glob("*merge*")) == []


def test_a_whole_checkpoint_is_left_where_it_is(run: Run, tmp_path: Path) -> None:
    said = _merge(f"{run.uri}@20", "--output", str(tmp_path / "m"))
    assert said.exit_code == 0, said.output
    assert "step 20 is whole already" in said.stdout
    assert not (tmp_path / "m").exists()


def test_a_byte_that_differs_is_found_before_it_is_merged(run: Run, tmp_path: Path) -> None:
    checkpoint = CheckpointStore(run).read(40)
    assert checkpoint
    path = checkpoint.manifest.path(CheckpointStore(run).prefix(40), "pytorch_model_fsdp_0/__1_0.distcp")
    data = bytearray(run.storage.read(path))
    data[len(data) // 2] ^= 1
    run.storage.write(path, bytes(data))
    said = _merge(run.uri, "--output", str(tmp_path / "m"))
    assert said.exit_code == 1
    assert "__1_0.distcp: SHA-256 is" in said.stderr.replace("\n", "")
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["@30"], "has no checkpoint of step 30"),
        (["", "--shard-size", "five"], "'five' is not a file size"),
        (["@40", "--output", "."], "exists and is not an empty folder"),
    ],
)
def test_mistakes_are_one_message(run: Run, tmp_path: Path, arguments: list[str], message: str) -> None:
    said = _merge(run.uri + arguments[0], "--output", str(tmp_path / "m"), *arguments[1:])
    assert said.exit_code == 2
    assert message in said.stderr.replace("\n", "")
