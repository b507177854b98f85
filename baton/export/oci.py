"""The model as an OCI image layout (https://github.com/opencontainers/image-spec/blob/main/image-layout.md).

The files lie under /models, as KServe expects of an `oci://` address: those without weights in a first layer, each
file of weights in one of its own, so that a registry keeps what did not change. The image holds data alone: it mounts
as an image volume; KServe's sidecar of older releases wants a shell in it too (`FROM busybox` and this copied in).
"""

from __future__ import annotations

import hashlib
import json
import os
import tarfile
from collections.abc import Mapping
from typing import Any, NotRequired, TypedDict

from baton.errors import BatonError
from baton.runs.outcomes import ExportCheck
from baton.store import bundle

MEDIA = "application/vnd.oci.image"
LAYER = f"{MEDIA}.layer.v1.tar"
FOLDER = "models"


class Descriptor(TypedDict):
    """Names a blob of the image: its kind, digest and bytes."""

    mediaType: str
    digest: str
    size: int
    annotations: NotRequired[dict[str, str]]


def write(source: str, target: str, *, tag: str, labels: dict[str, str]) -> None:
    """Writes the layout; the same files give the same bytes.

    Args:
        source: Folder with the model's files.
        target: Folder to write to.
        tag: Name of the image in the index.
        labels: Go into the image's configuration.
    """
    blobs = f"{target}/blobs/sha256"
    os.makedirs(blobs)
    names = sorted(os.listdir(source))
    large = [name for name in names if name.endswith(".safetensors")]
    # A layer for each file of weights: who has one already need not fetch it again.
    groups = [[name for name in names if name not in large], *([name] for name in large)]
    layers = [_layer(source, group, blobs) for group in groups if group]
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Labels": labels},
        "rootfs": {"type": "layers", "diff_ids": [layer["digest"] for layer in layers]},  # of tars not compressed
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": f"{MEDIA}.manifest.v1+json",
        "config": _document(config, f"{MEDIA}.config.v1+json", blobs),
        "layers": layers,
    }
    entry = _document(manifest, f"{MEDIA}.manifest.v1+json", blobs)
    entry["annotations"] = {"org.opencontainers.image.ref.name": tag}
    index = {"schemaVersion": 2, "mediaType": f"{MEDIA}.index.v1+json", "manifests": [entry]}
    _write(f"{target}/index.json", _json(index))
    _write(f"{target}/oci-layout", _json({"imageLayoutVersion": "1.0.0"}))


def check(folder: str, expected: dict[str, str]) -> ExportCheck:
    """Reads a layout from its index down and compares every file of the model.

    Args:
        folder: The layout.
        expected: SHA-256 of each file under /models.

    Raises:
        BatonError: a digest or size is not what the layout says, or a file is not the model's.
    """
    index = _read(f"{folder}/index.json")
    manifest = json.loads(_blob(folder, index["manifests"][0]))
    config = json.loads(_blob(folder, manifest["config"]))
    if config["rootfs"]["diff_ids"] != [layer["digest"] for layer in manifest["layers"]]:
        raise BatonError("the oci export's configuration lists other layers than its manifest; it does not count.")
    digests: dict[str, str] = {}
    for layer in manifest["layers"]:
        _require(folder, layer)
        with tarfile.open(_path(folder, layer), "r:") as tar:
            for member in (member for member in tar if member.isfile()):
                content = tar.extractfile(member)
                assert content
                digests[member.name.removeprefix(f"{FOLDER}/")] = hashlib.file_digest(content, "sha256").hexdigest()  # type: ignore[arg-type]
    if digests != expected:
        wrong = sorted(name for name in {*digests, *expected} if digests.get(name) != expected.get(name))
        raise BatonError(f"the oci export does not hold the model's {', '.join(wrong)}; it does not count.")
    return ExportCheck(library="tarfile", words=f"all digests and sizes, {len(digests)} files as in the model")


def _layer(source: str, names: list[str], blobs: str) -> Descriptor:
    path = f"{blobs}/unfinished"
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        folder = tarfile.TarInfo(FOLDER)
        folder.type, folder.mode = tarfile.DIRTYPE, 0o755
        tar.addfile(folder)
        for name in names:
            entry = tarfile.TarInfo(f"{FOLDER}/{name}")  # owner root, time 0
            entry.size, entry.mode = os.path.getsize(f"{source}/{name}"), 0o644
            with open(f"{source}/{name}", "rb") as file:
                tar.addfile(entry, file)
    digest = bundle.file_sha256(path)
    os.replace(path, f"{blobs}/{digest}")
    return {"mediaType": LAYER, "digest": f"sha256:{digest}", "size": os.path.getsize(f"{blobs}/{digest}")}


def _document(content: Mapping[str, object], media: str, blobs: str) -> Descriptor:
    data = _json(content)
    digest = hashlib.sha256(data).hexdigest()
    _write(f"{blobs}/{digest}", data)
    return {"mediaType": media, "digest": f"sha256:{digest}", "size": len(data)}


def _require(folder: str, descriptor: Descriptor) -> None:
    path = _path(folder, descriptor)
    if not os.path.isfile(path) or os.path.getsize(path) != descriptor["size"]:
        raise BatonError(f"the oci export's {descriptor['digest']} is missing or of another size; it does not count.")
    if f"sha256:{bundle.file_sha256(path)}" != descriptor["digest"]:
        raise BatonError(f"the oci export's {descriptor['digest']} has another digest; it does not count.")


def _blob(folder: str, descriptor: Descriptor) -> bytes:
    _require(folder, descriptor)
    with open(_path(folder, descriptor), "rb") as file:
        return file.read()


def _path(folder: str, descriptor: Descriptor) -> str:
    return f"{folder}/blobs/{descriptor['digest'].replace(':', '/')}"


def _read(path: str) -> dict[str, Any]:
    with open(path, encoding="utf-8") as file:
        document: dict[str, Any] = json.load(file)
    return document


def _json(document: Mapping[str, object]) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


def _write(path: str, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
