"""The image layout: digests, sizes and layers as the specification has them, the same each time, damage noticed."""

from __future__ import annotations

import hashlib
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from baton.errors import BatonError
from baton.export import formats

FILES = {"config.json": b"{}", "model-1.safetensors": b"one" * 400, "model-2.safetensors": b"two" * 400}
HASHES = {name: hashlib.sha256(data).hexdigest() for name, data in FILES.items()}


@pytest.fixture
def layout(tmp_path: Path) -> Path:
    return _layout(tmp_path, "image")


def _layout(tmp_path: Path, name: str) -> Path:
    source, target = tmp_path / f"model-{name}", tmp_path / name
    source.mkdir()
    target.mkdir()
    for file, data in FILES.items():
        (source / file).write_bytes(data)
    formats.write_image_layout(str(source), str(target), tag="r", labels={"baton.run": "r"})
    return target


def _blob(layout: Path, descriptor: dict[str, Any]) -> bytes:
    algorithm, _, digest = descriptor["digest"].partition(":")
    data = (layout / "blobs" / algorithm / digest).read_bytes()
    assert (algorithm, hashlib.sha256(data).hexdigest(), len(data)) == ("sha256", digest, descriptor["size"])
    return data


def test_digests_and_sizes_hold_from_the_index_down(layout: Path) -> None:
    assert json.loads((layout / "oci-layout").read_text()) == {"imageLayoutVersion": "1.0.0"}
    (entry,) = json.loads((layout / "index.json").read_text())["manifests"]
    assert entry["annotations"] == {"org.opencontainers.image.ref.name": "r"}
    manifest = json.loads(_blob(layout, entry))
    config = json.loads(_blob(layout, manifest["config"]))
    assert config["config"]["Labels"] == {"baton.run": "r"}
    assert config["rootfs"]["diff_ids"] == [layer["digest"] for layer in manifest["layers"]]
    names = []
    for number, layer in enumerate(manifest["layers"]):
        _blob(layout, layer)
        with tarfile.open(layout / "blobs" / layer["digest"].replace(":", "/")) as tar:
            members = tar.getmembers()
            assert all((member.mtime, member.uid, member.gid) == (0, 0, 0) for member in members)
            names.append([member.name for member in members])
            for member in members[1:]:
                content = tar.extractfile(member)
                assert content
                assert content.read() == FILES[member.name.removeprefix("models/")], number
    assert names == [
        ["models", "models/config.json"],
        ["models", "models/model-1.safetensors"],
        ["models", "models/model-2.safetensors"],
    ]
    assert len(list((layout / "blobs/sha256").iterdir())) == 5  # three layers, a configuration, a manifest


def test_the_same_files_give_the_same_bytes(layout: Path, tmp_path: Path) -> None:
    again = _layout(tmp_path, "again")
    names = sorted(str(path.relative_to(layout)) for path in layout.rglob("*") if path.is_file())
    assert names == sorted(str(path.relative_to(again)) for path in again.rglob("*") if path.is_file())
    assert all((layout / name).read_bytes() == (again / name).read_bytes() for name in names)


def test_the_check_reads_what_was_written(layout: Path) -> None:
    assert formats.check_image_layout(str(layout), HASHES).words == "all digests and sizes, 3 files as in the model"


def test_other_files_than_the_models_do_not_count(layout: Path) -> None:
    with pytest.raises(BatonError, match="does not hold the model's config"):
        formats.check_image_layout(str(layout), {**HASHES, "config.json": "0" * 64})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "has another digest"),
        (lambda data: data[:-1], "is missing or of another size"),
    ],
    ids=["flipped", "cut"],
)
def test_a_damaged_layer_does_not_count(layout: Path, change: Any, said: str) -> None:
    largest = max((layout / "blobs/sha256").iterdir(), key=lambda path: path.stat().st_size)
    largest.write_bytes(change(largest.read_bytes()))
    with pytest.raises(BatonError, match=said):
        formats.check_image_layout(str(layout), HASHES)
