"""What FSDP saved in shards comes out whole, bit for bit, and nothing in it is run on the way."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
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
from torch.distributed.checkpoint import metadata as parts
from torch.distributed.checkpoint.filesystem import _StorageInfo
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


DTYPES = sorted(
    name
    for name in {str(value) for value in vars(torch).values() if isinstance(value, torch.dtype)}
    if not name.startswith(("torch.q", "torch.bits"))  # quantized, and no numbers
)
MEMORY_FORMATS = [torch.contiguous_format, torch.channels_last, torch.preserve_format]


def listed(folder: Path, **properties: Any) -> parts.Metadata:
    """Writes a list of shards of one tensor and one other value, and returns it."""
    found = parts.TensorProperties(**properties)
    tensor = parts.TensorStorageMetadata(
        found, torch.Size([2]), [parts.ChunkStorageMetadata(torch.Size([0]), torch.Size([2]))]
    )
    (folder / "__0_0.distcp").write_bytes(b"0123456789")
    where = {
        parts.MetadataIndex("a", torch.Size([0])): _StorageInfo("__0_0.distcp", 0, 4),
        parts.MetadataIndex("b"): _StorageInfo("__0_0.distcp", 4, 6),
    }
    made = parts.Metadata(
        {"a": tensor, "b": parts.BytesStorageMetadata()},
        planner_data={"a": ("a",)},
        storage_data=where,
        storage_meta=parts.StorageMeta(checkpoint_id=folder),
    )
    (folder / ".metadata").write_bytes(pickle.dumps(made))
    return made


@pytest.mark.parametrize("name", DTYPES)
def test_a_list_of_shards_may_name_every_type_of_numbers(name: str, tmp_path: Path) -> None:
    made = listed(tmp_path, dtype=getattr(torch, name.removeprefix("torch.")))
    assert sharded.read_metadata(str(tmp_path)) == made


@pytest.mark.parametrize("form", MEMORY_FORMATS, ids=str)
def test_a_list_of_shards_may_name_what_torch_writes_in_it(form: Any, tmp_path: Path) -> None:
    made = listed(tmp_path, layout=torch.strided, requires_grad=True, memory_format=form)
    assert sharded.read_metadata(str(tmp_path)) == made


PLACES: dict[str, tuple[dict[str, Any], str | None]] = {
    "all of its file": ({"offset": 0, "length": 10}, None),
    "the end of its file": ({"offset": 10, "length": 0}, None),
    "one byte more": ({"offset": 1, "length": 10}, "__0_0.distcp has no byte 11"),
    "before its file": ({"offset": -1, "length": 4}, "__0_0.distcp has no byte 3"),
    "backwards": ({"offset": 4, "length": -1}, "__0_0.distcp has no byte 3"),
    "no file": ({"relative_path": ""}, "'' is not a file of its folder"),
    "its folder": ({"relative_path": "."}, "'.' is not a file of its folder"),
    "the folder above": ({"relative_path": ".."}, "'..' is not a file of its folder"),
    "a folder below": ({"relative_path": "a/b"}, "'a/b' is not a file of its folder"),
    "a file that is not there": ({"relative_path": "__1_0.distcp"}, "No such file"),
    "encoded": ({"transform_descriptors": ["zstd"]}, r"__0_0.distcp is encoded by \['zstd'\]"),
    "encoded by nothing": ({"transform_descriptors": []}, None),
}
"""Where a list says that a piece of a file of ten bytes is, and why it is not read."""


@pytest.mark.parametrize("case", PLACES)
def test_a_piece_is_in_a_file_of_its_folder(case: str, tmp_path: Path) -> None:
    changes, message = PLACES[case]
    made = listed(tmp_path)
    index = parts.MetadataIndex("b")
    made.storage_data[index] = dataclasses.replace(made.storage_data[index], **changes)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(made))
    if message is None:
        assert sharded.read_metadata(str(tmp_path)) == made
    else:
        with pytest.raises(DamagedError, match=rf"/.metadata cannot be read as a list of shards: .*{message}"):
            sharded.read_metadata(str(tmp_path))


NUMBERS = {
    "PUT": (b"Np2147483647\n.", "2,147,483,647"),
    "BINPUT": (b"\x80\x02Nq\xff.", "255"),
    "LONG_BINPUT": (b"\x80\x02Nr\xff\xff\xff\x7f.", "2,147,483,647"),
    "as many as bytes": (b"\x80\x02Nq\x06.", None),
}


@pytest.mark.parametrize("case", NUMBERS)
def test_a_list_that_numbers_its_values_beyond_its_bytes_is_not_read(case: str, tmp_path: Path) -> None:
    data, number = NUMBERS[case]
    (tmp_path / ".metadata").write_bytes(data)
    message = f"it has a value of number {number}, and {len(data)} bytes" if number else "it is NoneType"
    with pytest.raises(DamagedError, match=message):
        sharded.read_metadata(str(tmp_path))


def test_a_list_is_looked_through_for_each_of_its_values(tmp_path: Path) -> None:
    """Also behind a tensor, and in both folders."""

    class Code:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "it-ran"),)

    state = {"a": torch.ones(2), "b": Code(), "c": torch.ones(2), "d": 3, "e": Code()}
    for folder in sharded.FOLDERS:
        dcp.save(state, checkpoint_id=tmp_path / folder, no_dist=True)
    lines = sharded.code_in(str(tmp_path))
    assert sorted(line.rpartition(", ")[2] for line in lines) == ["b", "b", "e", "e"]
    assert {line.partition("/")[0] for line in lines} == set(sharded.FOLDERS)
    assert not (tmp_path / "it-ran").exists()
    (tmp_path / sharded.FOLDERS[0] / ".metadata").write_bytes(b"")
    first, *rest = sharded.code_in(str(tmp_path))
    assert first.startswith("pytorch_model_fsdp_0/.metadata cannot be read as a list of shards")
    assert len(rest) == 2, "one that cannot be read hides no other"
    shutil.rmtree(tmp_path / sharded.FOLDERS[0])
    assert len(sharded.code_in(str(tmp_path))) == 2, "nor does one that is not there"


@pytest.mark.parametrize(
    ("state", "is_unused"),
    [
        ({"optimizer": {"param_groups": {"w": {"lr": 0.1}}}}, True),
        ({"optimizer": {"state": {"w": {"step": torch.tensor(3.0)}}, "param_groups": {}}}, False),
    ],
)
def test_an_optimizer_before_its_first_step_has_no_state(
    state: dict[str, Any], is_unused: bool, tmp_path: Path
) -> None:
    dcp.save(state, checkpoint_id=tmp_path / sharded.OPTIMIZER, no_dist=True)
    assert sharded.is_unused(str(tmp_path)) is is_unused


def test_an_index_names_the_file_of_each_weight_of_a_large_model(tmp_path: Path) -> None:
    weights = {name: torch.ones(2000) for name in ("c", "a", "b")}
    dcp.save({"another": 3, "model": weights}, checkpoint_id=tmp_path / sharded.WEIGHTS, no_dist=True)
    files = sharded.merge(str(tmp_path), str(tmp_path / "m"), shard_size="16KB")
    index = json.loads((tmp_path / "m/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 3 * 8000
    assert list(index["weight_map"]) == sorted(weights), "whatever their order in the checkpoint"
    assert files == [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    assert set(index["weight_map"].values()) == set(files)
    sharded.merge(str(tmp_path), str(tmp_path / "one"))
    assert [path.name for path in (tmp_path / "one").iterdir()] == ["model.safetensors"], "no index of one file"


def _read(rank: int, folder: Path, found: Any, is_read: Any) -> None:
    """Has the first of two processes read alone, and tells what it found."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    if rank == 0:
        state = {"model": {"a": torch.empty(3)}}
        sharded.fill(str(folder / sharded.WEIGHTS), state)
        found.put(state["model"]["a"].tolist())
        is_read.set()
    is_read.wait(60)
    torch.distributed.destroy_process_group()


def test_one_of_several_processes_may_read_alone(tmp_path: Path) -> None:
    dcp.save({"model": {"a": torch.arange(3.0)}}, checkpoint_id=tmp_path / sharded.WEIGHTS, no_dist=True)
    context = multiprocessing.get_context("fork")
    found, is_read = context.Queue(), context.Event()
    processes = [context.Process(target=_read, args=(rank, tmp_path, found, is_read)) for rank in range(2)]
    for process in processes:
        process.start()
    try:
        assert found.get(timeout=60) == [0.0, 1.0, 2.0]
    finally:
        for process in processes:
            process.join(60)
            process.kill()
