"""What whoever may write to a store may do to those who read it: other paths, other code, pickles."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from baton.checkpoint.restore import Restorer
from baton.checkpoint.store import CheckpointMeta, CheckpointStore
from baton.errors import BatonError, DamagedError, StoreError, UserError
from baton.evaluate import evaluate
from baton.export import parity
from baton.models import loading, trained, user_code
from baton.recipe.recipe import Recipe
from baton.runs.documents import OwnCode, TokenizedRows
from baton.runs.run import Run
from baton.store import bundle
from baton.store.manifest import Manifest, read_manifest
from baton.store.storage import Storage
from tests.threats.marks import Mark

UP = "../elsewhere/secret"


def leaving(storage: Storage, local: Path) -> dict[str, Callable[[], object]]:
    """Every operation of a store, on a path that leads out of it."""
    return {
        "read": lambda: storage.read(UP),
        "write": lambda: storage.write(UP, b"x"),
        "create": lambda: storage.create(UP, b"x"),
        "size": lambda: storage.size(UP),
        "list": lambda: storage.list("runs/../../elsewhere"),
        "find": lambda: storage.find("runs/../../elsewhere"),
        "remove": lambda: storage.remove(UP),
        "upload": lambda: storage.upload(str(local), UP),
        "download": lambda: storage.download(UP, f"{local}-here", 6),
        "copy": lambda: storage.copy(UP, "inside", 6),
        "copy-out": lambda: storage.copy("own", UP, 3),
        "hash": lambda: storage.sha256(UP),
    }


def test_no_path_leads_out_of_a_store(store: str, tmp_path: Path) -> None:
    storage, local, secret = Storage(store), tmp_path / "local", tmp_path / "elsewhere" / "secret"
    secret.parent.mkdir()
    secret.write_text("secret")
    local.write_text("x")
    storage.write("own", b"own")
    for name, operation in leaving(storage, local).items():
        with pytest.raises(StoreError) as caught:
            operation()
        assert ".." in str(caught.value), name
    assert [path.name for path in secret.parent.iterdir()] == ["secret"]
    assert secret.read_text() == "secret"
    here = Path(f"{local}-here")
    assert not here.exists() or b"secret" not in here.read_bytes()
    # Names that only look like it are names.
    storage.write("a..b/..c", b"1")
    assert storage.list("a..b") == ["..c"]


def test_a_document_that_names_a_path_outside_is_refused(tmp_path: Path) -> None:
    """`tokens.json` says where tokens lie: a folder beside the store would be read, and marked as damaged."""
    outside, run = Storage(str(tmp_path / "elsewhere")), Run(Storage(str(tmp_path / "store")), "r")
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "a").write_text("a")
    bundle.publish(outside, "tokens", str(tmp_path / "files"), kind="tokens", meta={})
    before = sorted(path.name for path in (tmp_path / "elsewhere" / "tokens").iterdir())
    run.write(TokenizedRows(prefix="../elsewhere/tokens"))
    with pytest.raises(StoreError, match=r"'\.\./elsewhere/tokens' leads out of the store .*Find out who wrote"):
        trained.tokens_manifest(run)
    assert sorted(path.name for path in (tmp_path / "elsewhere" / "tokens").iterdir()) == before
    run.write(TokenizedRows(prefix="tokens"))
    bundle.publish(run.storage, "tokens", str(tmp_path / "files"), kind="tokens", meta={})
    assert trained.tokens_manifest(run)[0] == "tokens"


def own_code(storage: Storage, tmp_path: Path) -> tuple[Run, str, Manifest]:
    """A run with a module of the user's, in the store."""
    (tmp_path / "own.py").write_text("REWARD = 1\n")
    run = Run(storage, "r")
    user_code.ship(run, str(tmp_path / "own.py"))
    prefix = run.need(OwnCode).prefix
    manifest = read_manifest(storage, prefix)
    assert manifest
    return run, prefix, manifest


def rewrite(storage: Storage, prefix: str, manifest: Manifest, files: dict[str, bytes]) -> None:
    """Put files in the place of a bundle's, with a manifest that vouches for them."""
    for name, content in files.items():
        storage.write(manifest.path(prefix, name), content)
    entries = {name: {"size": len(data), "sha256": _sha256(data)} for name, data in files.items()}
    changed: Any = {**vars(manifest), "files": {**manifest.files, **entries}}
    storage.write(f"{prefix}/manifest.json", Manifest(**changed).as_written().encode())


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def imported(folder: str) -> str:
    """What a process prints that has a folder before its other ones and imports the user's module."""
    script = f"import sys; sys.path.insert(0, {folder!r}); import own, colorsys; print(own.REWARD, colorsys.__file__)"
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout


PLANTED = {
    "another-module": {"own.py": b"REWARD = 2\n"},
    "a-module-beside-it": {"colorsys.py": b"REWARD = 2\n"},
    "its-bytecode": {"__pycache__/own.cpython-311.pyc": b"bytecode"},
}


@pytest.mark.parametrize("files", PLANTED.values(), ids=PLANTED)
def test_code_with_a_new_manifest_is_refused(files: dict[str, bytes], store: str, tmp_path: Path) -> None:
    """`code.json` is in what checkpoints are made of, and is signed: it holds the digest of the code itself."""
    storage = Storage(store)
    run, prefix, manifest = own_code(storage, tmp_path)
    rewrite(storage, prefix, manifest, files)
    vouched = read_manifest(storage, prefix)
    assert vouched
    bundle.fetch(storage, prefix, vouched, str(tmp_path / "plain"), in_place=False)  # by its manifest it is whole
    with pytest.raises(BatonError, match="does not hold the code that the run began with; none of it has run"):
        user_code.fetch(run, str(tmp_path / "pod"))


def test_a_file_beside_the_code_is_not_imported(tmp_path: Path) -> None:
    """One that the manifest does not name, in a folder that is read in place by whoever reads it so."""
    storage = Storage(str(tmp_path / "store"))
    run, prefix, manifest = own_code(storage, tmp_path)
    storage.write(manifest.path(prefix, "colorsys.py"), b"REWARD = 2\n")
    folder = user_code.fetch(run, str(tmp_path / "pod"))
    assert folder
    assert storage.key() not in imported(folder)
    assert storage.key() in imported(storage.key(manifest.path(prefix)))


def test_without_signatures_a_new_manifest_is_believed(tmp_path: Path) -> None:
    """What signatures are for: `tests/train/checkpointing/test_signed.py` refuses the same."""
    store = CheckpointStore(Run(Storage(str(tmp_path / "store")), "r"))
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "weights").write_bytes(b"trained")
    writer = store.open_writer(2)
    writer.send(str(tmp_path / "files"))
    checkpoint, _ = store.commit(2, writer, CheckpointMeta(digest="d", identity="this"))
    path = checkpoint.manifest.path(store.prefix(2), "weights")

    store.storage.write(path, b"another")
    with pytest.raises(DamagedError, match="SHA-256"):
        store.fetch(checkpoint, str(tmp_path / "here"))
    for mark in (tmp_path / "store").rglob("damaged-*"):
        mark.unlink()
    rewrite(store.storage, store.prefix(2), checkpoint.manifest, {"weights": b"another"})
    restored = Restorer(store, 9, "this", None, lambda _: str(tmp_path)).fetch()
    assert restored
    assert Path(restored.folder, "weights").read_bytes() == b"another"


def _pickled_weights(folder: Path, mark: Mark, name: str, stem: str) -> None:
    """Weights as pickle, of which one value is the mark, in the place of safetensors."""
    for path in folder.glob("*.safetensors"):
        path.unlink()
    torch.save({stem: mark}, folder / name)


@pytest.fixture
def model(tiny_base: str, tmp_path: Path) -> Path:
    """A model's folder with pickled weights that hold the mark."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_base, folder)
    _pickled_weights(folder, Mark(tmp_path), "pytorch_model.bin", "lm_head.weight")
    return folder


LOADERS: dict[str, Callable[[str, Recipe], object]] = {
    "chat, export check": lambda folder, recipe: loading.load_model(folder),
    "training": lambda folder, recipe: loading.load_model(folder, recipe),
    "model in production": lambda folder, recipe: evaluate.load_production(folder, recipe),
}


@pytest.mark.parametrize("load", LOADERS.values(), ids=LOADERS)
def test_pickled_weights_of_a_model_are_not_read(
    load: Callable[[str, Recipe], object], model: Path, recipe: Recipe, tmp_path: Path
) -> None:
    mark = Mark(tmp_path)
    with pytest.raises((OSError, UserError), match=r"model\.safetensors"):
        load(str(model), recipe)
    assert not mark.ran
    torch.load(model / "pytorch_model.bin", weights_only=False)
    assert mark.ran


def test_pickled_weights_of_an_adapter_are_not_run(tiny_base: str, tmp_path: Path) -> None:
    """PEFT takes them where there are no others: by torch's reader, which calls nothing."""
    from peft import LoraConfig, get_peft_model

    mark, folder = Mark(tmp_path), tmp_path / "adapter"
    get_peft_model(loading.load_model(tiny_base), LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(folder)
    _pickled_weights(folder, mark, "adapter_model.bin", "base_model.model.x")
    tokenizer = loading.load_tokenizer(tiny_base)
    with pytest.raises(Exception, match="Weights only load failed"):
        loading.adapted(loading.load_model(tiny_base), str(folder), tokenizer)
    assert not mark.ran
    torch.load(folder / "adapter_model.bin", weights_only=False)
    assert mark.ran


def test_what_lies_beside_models_and_rows_is_not_read(tiny_base: str, recipe: Recipe, tmp_path: Path) -> None:
    import datasets

    mark, model, rows = Mark(tmp_path), tmp_path / "model", tmp_path / "rows"
    shutil.copytree(tiny_base, model)
    datasets.Dataset.from_dict({"input_ids": [[1, 2]]}).save_to_disk(str(rows))
    for folder in (model, rows):
        for name in ("training_args.bin", "optimizer.pt", "rng_state.pth", "tokenizer.pkl", "cache-x.pkl", "state.pt"):
            torch.save(mark, folder / name)
    loading.load_model(str(model), recipe)
    loading.load_tokenizer(str(model))
    assert trained.open_rows(str(rows))[0] == {"input_ids": [1, 2]}
    assert not mark.ran
    torch.load(rows / "state.pt", weights_only=False)
    assert mark.ran


def test_an_array_of_objects_is_not_read(tmp_path: Path) -> None:
    mark, path = Mark(tmp_path), tmp_path / "answers.npz"
    np.savez(path, **{"tokens-0": np.array([mark], dtype=object), "logits-0": np.zeros(1)})
    with pytest.raises(ValueError, match="allow_pickle=False"):
        parity.load_answers(str(path))
    assert not mark.ran
    with np.load(path, allow_pickle=True) as arrays:
        arrays["tokens-0"]
    assert mark.ran


def test_rows_of_tokens_are_no_pickle(tmp_path: Path) -> None:
    """What a folder of `datasets` says of its rows: names of types, and files, which are Arrow's."""
    import datasets

    rows = tmp_path / "rows"
    datasets.Dataset.from_dict({"a": [1]}).save_to_disk(str(rows))
    document = json.loads((rows / "dataset_info.json").read_text())
    document["features"]["a"] = {"_type": "os.system", "command": f"mkdir {tmp_path / 'it-ran'}"}
    (rows / "dataset_info.json").write_text(json.dumps(document))
    with pytest.raises(ValueError, match=r"[Ff]eature type"):
        trained.open_rows(str(rows))
    assert not (tmp_path / "it-ran").exists()


def test_a_link_in_a_store_is_not_written_through(tmp_path: Path) -> None:
    """In a folder that others may write to, a name of Baton's may be a link: it is replaced, and not followed."""
    storage, target = Storage(str(tmp_path / "store")), tmp_path / "target"
    target.write_text("mine")
    (tmp_path / "store").mkdir()
    for name in ("written", "uploaded"):
        os.symlink(target, tmp_path / "store" / name)
    storage.write("written", b"x")
    (tmp_path / "local").write_text("y")
    storage.upload(str(tmp_path / "local"), "uploaded")
    assert target.read_text() == "mine"
    assert (storage.read("written"), storage.read("uploaded")) == (b"x", b"y")
