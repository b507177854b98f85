"""The artifact of an export: the model card, or the files themselves from whatever store they are in."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from baton.errors import DamagedError
from baton.export import export
from baton.runs.outcomes import ExportedModel, ExportEntry, ModelMeta
from baton.runs.run import Run
from baton.store import bundle
from baton.store.storage import Storage
from tests.support import tiny

FILES = {"README.md": b"---\nlicense: mit\n---\n\n# tiny\n", "model.safetensors": b"\x00" * 5000, "sub/a.json": b"{}"}


def _exported(store: str, tmp_path: Path, *, whole: bool) -> tuple[Run, ExportedModel]:
    run = Run(Storage(store), "r")
    run.create(tiny.recipe("org/base", export={"artifact": whole}))
    for name, content in FILES.items():
        (tmp_path / "made" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "made" / name).write_bytes(content)
    meta = ModelMeta(format="safetensors", digest="d" * 64, step=7).to_json()
    manifest, _ = bundle.publish(run.storage, run.path("export"), str(tmp_path / "made"), kind="model", meta=meta)
    uri = run.storage.uri(manifest.path(run.path("export")))
    entries = [ExportEntry(format="safetensors", uri=uri), ExportEntry(format="gguf", uri=f"{run.uri}/exports/gguf/x")]
    return run, ExportedModel(model_uri=uri, bytes=manifest.bytes, files=len(FILES), exports=entries)


def test_a_card_with_the_address_of_each_format(store: str, tmp_path: Path) -> None:
    run, exported = _exported(store, tmp_path, whole=False)
    left = SimpleNamespace(path=str(tmp_path / "model"), metadata={})
    export.write_artifact(run, exported, left)
    assert Path(left.path).read_bytes() == FILES["README.md"]
    assert left.metadata == {
        "framework": "transformers",
        "format": "safetensors",
        "formats": "safetensors, gguf",
        "bytes": exported.bytes,
        "digest": "d" * 64,
        "step": 7,
        "address": exported.model_uri,
        "run": run.uri,
        "address_safetensors": exported.model_uri,
        "address_gguf": f"{run.uri}/exports/gguf/x",
    }


def test_the_files_themselves(store: str, tmp_path: Path) -> None:
    run, exported = _exported(store, tmp_path, whole=True)
    left = SimpleNamespace(path=str(tmp_path / "model"), metadata={})
    export.write_artifact(run, exported, left)
    found = {p.relative_to(left.path).as_posix(): p.read_bytes() for p in Path(left.path).rglob("*") if p.is_file()}
    assert found == FILES
    assert left.metadata["address"] == exported.model_uri


def test_files_that_are_not_what_was_committed_are_not_handed_on(tmp_path: Path) -> None:
    run, exported = _exported(str(tmp_path / "store"), tmp_path, whole=True)
    Path(f"{exported.model_uri}/model.safetensors").write_bytes(b"\x01" * 5000)
    with pytest.raises(DamagedError, match=r"model\.safetensors: SHA-256"):
        export.write_artifact(run, exported, SimpleNamespace(path=str(tmp_path / "model"), metadata={}))
