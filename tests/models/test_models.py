"""A base model in a bucket: taken once, and again only where it has changed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from baton.errors import UserError
from baton.models import loading, user_code
from baton.store.storage import Storage
from tests.support import tiny

pytestmark = pytest.mark.s3


def test_a_model_is_taken_once_and_again_where_it_has_changed(
    s3_store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_CACHE", str(tmp_path / "cache"))
    base = f"{s3_store}/base"
    storage = Storage(base)
    with pytest.raises(UserError, match=r"has no config\.json"):
        loading.local_model(base)
    for name, data in (("config.json", b"{}"), ("model.safetensors", b"old weights"), ("deeper/more.json", b"{}")):
        storage.write(name, data)
    folder = Path(loading.local_model(base))
    assert (folder / "model.safetensors").read_bytes() == b"old weights"
    assert not (folder / "deeper").exists()

    def taken() -> dict[str, int]:
        return {name: os.stat(folder / name).st_mtime_ns for name in ("config.json", "model.safetensors")}

    before = taken()
    assert loading.local_model(base) == str(folder)
    assert taken() == before
    (folder / "config.json").write_bytes(b"")  # as a download leaves it that was interrupted
    loading.local_model(base)
    assert (folder / "config.json").read_bytes() == b"{}"
    storage.write("model.safetensors", b"the newer weights")
    loading.local_model(base)
    assert (folder / "model.safetensors").read_bytes() == b"the newer weights"


KINDS = {
    "weights": ("model.safetensors", True),
    "configuration": ("config.json", False),
    "tokenizer": ("tokenizer.model", False),
    "vocabulary": ("merges.txt", False),
    "chat template": ("chat_template.jinja", False),
    "code": ("modeling_own.py", False),
    "pickled weights": ("pytorch_model.bin", None),
    "code below": ("deeper/modeling.py", None),
}


@pytest.mark.parametrize(("name", "is_weights"), KINDS.values(), ids=KINDS)
def test_files_of_a_model_that_are_taken(
    name: str, is_weights: bool | None, s3_store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As from the hub: with its code, and without pickled weights."""
    monkeypatch.setenv("BATON_CACHE", str(tmp_path / "cache"))
    storage = Storage(f"{s3_store}/base")
    storage.write("config.json", b"{}")
    storage.write(name, b"content")
    whole, bare = (Path(loading.local_model(storage.uri(), weights=weights)) for weights in (True, False))
    assert ((whole / name).exists(), (bare / name).exists()) == (is_weights is not None, is_weights is False)
    hub = {end for end in loading.MODEL_FILES if name.endswith(end)}
    assert bool(hub) == (name != "pytorch_model.bin")
    if name != "config.json" and is_weights is not None:
        storage.remove(name)
        assert not (Path(loading.local_model(storage.uri())) / name).exists(), "it is gone there, too"


def test_code_of_a_model_in_a_bucket_asks_for_consent_and_runs(
    s3_store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    tiny.make_base(tmp_path / "base")
    local = Path(tiny.with_code(tmp_path / "base", ""))
    storage = Storage(f"{s3_store}/base")
    for path in local.iterdir():
        storage.upload(str(path), path.name)
    folder = loading.local_model(storage.uri())
    assert user_code.model_digest(folder) == user_code.model_digest(str(local))
    assert len(user_code.model_files("model.base", folder)) == 1
    model = loading.load_model(folder, trust_remote_code=True)
    assert type(model).__name__ == "OwnModel"
