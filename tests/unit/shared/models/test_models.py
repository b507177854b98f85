"""A base model in a bucket: taken once, and again only where it has changed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from baton.components.shared.core.errors import UserError
from baton.components.shared.models import loading
from baton.components.shared.store.storage import Storage

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
