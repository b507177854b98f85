"""Export formats: a writer and a check for each, listed in `FORMATS`."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import logging
import math
import os
import re
import shutil
import tarfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

import yaml

from baton.checkpoint.store import TRAINING_FILES
from baton.errors import BatonError
from baton.export import exportable, gguf_file, parity
from baton.export.parity import Reference
from baton.export.source import ExportSource
from baton.recipe.evaluation import ONNX
from baton.recipe.recipe import Recipe
from baton.runs.outcomes import ExportCheck, ModelMeta
from baton.store import bundle
from baton.store.manifest import Manifest

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class CommittedExport:
    uri: str
    manifest: Manifest
    meta: ModelMeta
    folder: Callable[[], str]  # fetches its files and returns their local folder


@dataclass(frozen=True)
class ExportDraft:
    """An export that is written and not yet checked."""

    source: ExportSource
    target: str
    main: CommittedExport | None = None  # None while the main export itself is made
    hashes: dict[str, dict[str, str]] = field(default_factory=dict)  # GGUF file → tensor → SHA-256

    def require_main(self) -> CommittedExport:
        assert self.main
        return self.main


SIZE_UNITS = {"MB": 10**6, "GB": 10**9}


def _write_safetensors(draft: ExportDraft) -> None:
    """Writes the whole model; an unchanged checkpoint's own files are copied."""
    source, spec = draft.source, draft.source.recipe.export
    is_changed = source.recipe.adapter or spec.dtype not in (None, source.recipe.model.dtype) or _has_experts(source)
    files = [f"{source.folder}/{name}" for name in os.listdir(source.folder) if name.endswith(".safetensors")]
    limit = int(spec.shard_size[:-2]) * SIZE_UNITS[spec.shard_size[-2:]]
    if is_changed or max(map(os.path.getsize, files), default=0) > limit:
        source.merged.save_pretrained(draft.target, max_shard_size=spec.shard_size)
        source.tokenizer.save_pretrained(draft.target)
    else:
        _copy_model(draft)


def _has_experts(source: ExportSource) -> bool:
    """Tells whether the model is a mixture of experts, whose checkpoint names weights as in memory."""
    from transformers import AutoConfig

    if not os.path.isfile(f"{source.folder}/config.json"):
        return False
    runs_code = source.recipe.model.trust_remote_code
    config: Any = AutoConfig.from_pretrained(source.folder, trust_remote_code=runs_code).get_text_config()
    return any(hasattr(config, name) for name in ("num_local_experts", "num_experts", "n_routed_experts"))


def _copy_model(draft: ExportDraft) -> None:
    """Copies the model's or adapter's files of a checkpoint."""
    folder = draft.source.folder
    for name in sorted(os.listdir(folder)):
        if not TRAINING_FILES.match(name) and name != "README.md" and os.path.isfile(f"{folder}/{name}"):
            shutil.copyfile(f"{folder}/{name}", f"{draft.target}/{name}")


def _compare_weights(export_format: str, draft: ExportDraft, reference: Reference, **request: Any) -> ExportCheck:
    """Reads back an export with unchanged weights, and compares weights, logits and tokens."""
    reading = parity.read(export_format, draft.target, draft.source.inputs, reference, **request)
    parity.require_weights(f"the {export_format} export", reading.notes["weights"], reference.weights)
    return parity.compare(export_format, reading, reference, reference.rounding)


def _check_safetensors(draft: ExportDraft, export_format: str = "safetensors") -> ExportCheck:
    reference = draft.source.merged_reference
    return draft.source.compare_with_trained(_compare_weights(export_format, draft, reference), reference)


def _check_adapter(draft: ExportDraft) -> ExportCheck:
    source = draft.source
    request = {"base": source.base, "dtype": source.recipe.model.dtype}
    return _compare_weights("adapter", draft, source.trained_reference, **request)


def _write_gguf(draft: ExportDraft) -> None:
    source = draft.source
    exportable.check(source.recipe, source.merged.config.model_type)
    tokenizer_folder = f"{source.scratch}/tokenizer"
    source.tokenizer.save_pretrained(tokenizer_folder)
    about = {"name": source.recipe.name, "license": source.licence or ""}
    for kind in source.recipe.export.gguf.types:
        name = f"{source.recipe.name}-{kind}.gguf"
        path = f"{draft.target}/{name}"
        draft.hashes[name] = gguf_file.write(source.merged, source.tokenizer, tokenizer_folder, path, kind, **about)


def _check_gguf(draft: ExportDraft) -> ExportCheck:
    source = draft.source
    config = gguf_file.plain_config(source.merged.config)
    texts = [source.tokenizer(text)["input_ids"] for text in source.inputs.texts]
    files = {}
    for kind, (name, hashes) in zip(source.recipe.export.gguf.types, draft.hashes.items(), strict=True):
        reference = parity.make_reference(gguf_file.dequantized(source.merged, kind), source.inputs)
        reading = parity.read("gguf", draft.target, source.inputs, reference, file=name, config=config)
        parity.require_weights(name, reading.notes["tensors"], hashes)
        parity.require_weights(f"{name}, once loaded,", reading.notes["weights"], reference.weights)
        finding = parity.compare("gguf", reading, reference, reference.rounding)
        engine = parity.check_llama_cpp(name, reading, reference, texts, exact=kind == "f32")
        finding = finding.model_copy(update={"llama_cpp": engine}) if engine else finding
        files[name] = source.compare_with_trained(finding, reference)
    words = "; ".join(f"{name} {finding.words}" for name, finding in files.items())
    return ExportCheck(library=finding.library, files=files, words=words)


ONNX_FILE = "model.onnx"


def _write_onnx(draft: ExportDraft) -> None:
    source = draft.source
    save_onnx(source.in_float32(), source.tokenizer, source.recipe.export.onnx, draft.target)


def save_onnx(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, spec: ONNX, target: str) -> None:
    """Writes a float32 graph (`input_ids`, `attention_mask` → `logits`) for ONNX Runtime, and the tokenizer."""
    import torch
    from transformers.exporters.exporter_onnx import OnnxConfig, OnnxExporter

    model.config.use_cache = False
    ids = torch.arange(2 * 8).reshape(2, 8) % model.config.get_text_config().vocab_size
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0  # else the exporter takes the mask for one that can be left out
    settings: Any = OnnxConfig(dynamic=True, opset_version=spec.opset)
    with _quiet():
        exported = OnnxExporter().export(model, {"input_ids": ids, "attention_mask": mask}, config=settings)
        OnnxExporter.save_program(exported.program, f"{target}/{ONNX_FILE}")
    model.config.save_pretrained(target)
    tokenizer.save_pretrained(target)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    import transformers

    before = transformers.logging.get_verbosity()
    torch_log = logging.getLogger("torch.onnx")
    level = torch_log.level
    transformers.logging.set_verbosity_error()
    torch_log.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers.logging.set_verbosity(before)
        torch_log.setLevel(level)


def _check_onnx(draft: ExportDraft) -> ExportCheck:
    source = draft.source
    reference = parity.make_reference(source.in_float32(), source.inputs)
    reading = parity.read("onnx", draft.target, source.inputs, reference)
    return source.compare_with_trained(parity.compare("onnx", reading, reference, parity.TOLERANCE), reference)


MLFLOW_PACKAGES = ("transformers", "torch", "accelerate")  # pinned to the versions of the check


def _write_mlflow(draft: ExportDraft) -> None:
    import mlflow
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, DataType, Schema

    source = draft.source
    os.rmdir(draft.target)  # MLflow makes it
    logging.getLogger("mlflow").setLevel(logging.ERROR)
    texts = Schema([ColSpec(DataType.string)])
    labelled = Schema([ColSpec(DataType.string, "label"), ColSpec(DataType.double, "score")])
    mlflow.transformers.save_model(
        transformers_model={"model": source.merged, "tokenizer": source.tokenizer},
        path=draft.target,
        task="text-classification" if source.scores else "text-generation",
        signature=ModelSignature(inputs=texts, outputs=labelled if source.scores else texts),
        input_example=source.inputs.texts[:1],
        pip_requirements=[f"{name}=={version(name).partition('+')[0]}" for name in MLFLOW_PACKAGES],
    )


MEDIA = "application/vnd.oci.image"
OCI_FOLDER = "models"


class BlobDescriptor(TypedDict):
    mediaType: str
    digest: str
    size: int
    annotations: NotRequired[dict[str, str]]


def _write_oci(draft: ExportDraft) -> None:
    run = draft.source.run
    labels = {"baton.run": run.name, "baton.run_uri": run.uri, "baton.digest": draft.source.digest}
    write_image_layout(draft.require_main().folder(), draft.target, tag=run.name, labels=labels)


def write_image_layout(source: str, target: str, *, tag: str, labels: dict[str, str]) -> None:
    """Writes a folder's files as an OCI image layout under /models, as KServe expects of `oci://`.

    https://github.com/opencontainers/image-spec/blob/main/image-layout.md. The same files give the same bytes. The
    image holds data alone and mounts as an image volume; older KServe's sidecar needs a shell (`FROM busybox`).
    """
    blobs = f"{target}/blobs/sha256"
    os.makedirs(blobs)

    def describe(content: Mapping[str, object], media: str) -> BlobDescriptor:
        data = _canonical_json(content)
        digest = hashlib.sha256(data).hexdigest()
        _write_bytes(f"{blobs}/{digest}", data)
        return {"mediaType": media, "digest": f"sha256:{digest}", "size": len(data)}

    names = sorted(os.listdir(source))
    large = [name for name in names if name.endswith(".safetensors")]
    # A layer for each file of weights, so that a registry and its clients keep unchanged ones.
    groups = [[name for name in names if name not in large], *([name] for name in large)]
    layers = [_write_layer(source, group, blobs) for group in groups if group]
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Labels": labels},
        "rootfs": {"type": "layers", "diff_ids": [layer["digest"] for layer in layers]},  # of tars not compressed
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": f"{MEDIA}.manifest.v1+json",
        "config": describe(config, f"{MEDIA}.config.v1+json"),
        "layers": layers,
    }
    entry = describe(manifest, f"{MEDIA}.manifest.v1+json")
    entry["annotations"] = {"org.opencontainers.image.ref.name": tag}
    index = {"schemaVersion": 2, "mediaType": f"{MEDIA}.index.v1+json", "manifests": [entry]}
    _write_bytes(f"{target}/index.json", _canonical_json(index))
    _write_bytes(f"{target}/oci-layout", _canonical_json({"imageLayoutVersion": "1.0.0"}))


def _canonical_json(document: Mapping[str, object]) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


def _write_bytes(path: str, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)


def _write_layer(source: str, names: list[str], blobs: str) -> BlobDescriptor:
    path = f"{blobs}/unfinished"
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        folder = tarfile.TarInfo(OCI_FOLDER)
        folder.type, folder.mode = tarfile.DIRTYPE, 0o755
        tar.addfile(folder)
        for name in names:
            entry = tarfile.TarInfo(f"{OCI_FOLDER}/{name}")  # owner root, time 0
            entry.size, entry.mode = os.path.getsize(f"{source}/{name}"), 0o644
            with open(f"{source}/{name}", "rb") as file:
                tar.addfile(entry, file)
    digest = bundle.file_sha256(path)
    os.replace(path, f"{blobs}/{digest}")
    return {
        "mediaType": f"{MEDIA}.layer.v1.tar",
        "digest": f"sha256:{digest}",
        "size": os.path.getsize(f"{blobs}/{digest}"),
    }


def _check_oci(draft: ExportDraft) -> ExportCheck:
    files = draft.require_main().manifest.files
    return check_image_layout(draft.target, {name: entry["sha256"] for name, entry in files.items()})


def check_image_layout(folder: str, expected: dict[str, str]) -> ExportCheck:
    """Reads a layout from its index down and compares every file of the model."""

    def checked(descriptor: BlobDescriptor) -> str:
        path = f"{folder}/blobs/{descriptor['digest'].replace(':', '/')}"
        if not os.path.isfile(path) or os.path.getsize(path) != descriptor["size"]:
            raise BatonError(
                f"the oci export's {descriptor['digest']} is missing or of another size; it does not count."
            )
        if f"sha256:{bundle.file_sha256(path)}" != descriptor["digest"]:
            raise BatonError(f"the oci export's {descriptor['digest']} has another digest; it does not count.")
        return path

    def document(path: str) -> Any:
        with open(path, encoding="utf-8") as file:
            return json.load(file)

    manifest = document(checked(document(f"{folder}/index.json")["manifests"][0]))
    config = document(checked(manifest["config"]))
    if config["rootfs"]["diff_ids"] != [layer["digest"] for layer in manifest["layers"]]:
        raise BatonError("the oci export's configuration lists other layers than its manifest; it does not count.")
    digests: dict[str, str] = {}
    for layer in manifest["layers"]:
        with tarfile.open(checked(layer), "r:") as tar:
            for member in (member for member in tar if member.isfile()):
                content: Any = tar.extractfile(member)
                digests[member.name.removeprefix(f"{OCI_FOLDER}/")] = hashlib.file_digest(content, "sha256").hexdigest()
    if digests != expected:
        wrong = sorted(name for name in {*digests, *expected} if digests.get(name) != expected.get(name))
        raise BatonError(f"the oci export does not hold the model's {', '.join(wrong)}; it does not count.")
    return ExportCheck(library="tarfile", words=f"all digests and sizes, {len(digests)} files as in the model")


KSERVE_FILE = "inferenceservice.yaml"
MAX_LABEL = 63  # characters of a label's value
LABEL = re.compile(rf"[A-Za-z0-9]([\w.-]{{0,{MAX_LABEL - 2}}}[A-Za-z0-9])?")
SERVER_GIB = 4  # a server's own memory, beside one and a half times the weights


def _write_kserve(draft: ExportDraft) -> None:
    source, main = draft.source, draft.require_main()
    uri = source.recipe.export.kserve.model_uri or main.uri
    about = {"run": source.run.name, "digest": source.digest}
    document = inference_service(source.recipe, model_uri=uri, size=main.manifest.bytes, **about)
    with open(f"{draft.target}/{KSERVE_FILE}", "w", encoding="utf-8") as file:
        yaml.safe_dump(document, file, sort_keys=False)


def inference_service(recipe: Recipe, *, model_uri: str, size: int, run: str, digest: str) -> dict[str, Any]:
    """Returns KServe's `InferenceService` for its Hugging Face runtime; `size` is the model's bytes."""
    spec = recipe.export.kserve
    gpus = recipe.resources.gpus if spec.gpus is None else spec.gpus
    name = spec.name or recipe.name
    arguments = [f"--model_name={name}"]
    if recipe.training.spec.scores:
        arguments.append("--task=sequence_classification")
    if recipe.model.trust_remote_code:
        arguments.append("--trust_remote_code")
    memory = f"{math.ceil(size * 1.5 / 2**30) + SERVER_GIB}Gi"
    accelerators = {recipe.resources.accelerator: str(gpus)} if gpus else {}
    model = {
        "modelFormat": {"name": "huggingface"},
        "args": arguments,
        "storageUri": model_uri,
        "resources": {
            "requests": {"cpu": "1", "memory": memory, **accelerators},
            "limits": {"memory": memory, **accelerators},
        },
    }
    account = {"serviceAccountName": spec.service_account} if spec.service_account else {}
    return {
        "apiVersion": "serving.kserve.io/v1beta1",
        "kind": "InferenceService",
        "metadata": {
            "name": name if name[0].isalpha() else f"m-{name}",  # a service's name begins with a letter
            **({"namespace": spec.namespace} if spec.namespace else {}),
            "labels": {
                "app.kubernetes.io/managed-by": "baton",
                "baton/run": run[:MAX_LABEL].rstrip("-"),
                "baton/digest": digest[:MAX_LABEL],
            },
            "annotations": {"baton/run": run, "baton/digest": digest},
        },
        "spec": {"predictor": {**account, "model": model}},
    }


def _check_kserve(draft: ExportDraft) -> ExportCheck:
    with open(f"{draft.target}/{KSERVE_FILE}", encoding="utf-8") as file:
        return check_inference_service(yaml.safe_load(file))


def check_inference_service(document: dict[str, Any]) -> ExportCheck:
    uri = document["spec"]["predictor"]["model"]["storageUri"]
    values = document["metadata"]["labels"].values()
    if document["kind"] != "InferenceService" or not all(LABEL.fullmatch(value) for value in values):
        raise BatonError(f"the kserve export is no InferenceService with valid labels: {document['metadata']}.")
    return ExportCheck(library="yaml", words=f"read back, serves {uri}")


@dataclass(frozen=True)
class FormatSpec:
    write: Callable[[ExportDraft], None]
    check: Callable[[ExportDraft], ExportCheck]  # raises where the export does not count
    settings: tuple[str, ...] = ()  # keys of the recipe's export section that decide its bytes
    made_of_main: bool = False  # holds or names the main export's files


FORMATS = {
    "safetensors": FormatSpec(_write_safetensors, _check_safetensors, ("dtype", "shard_size")),
    "adapter": FormatSpec(_copy_model, _check_adapter),
    "gguf": FormatSpec(_write_gguf, _check_gguf, ("dtype", "gguf")),
    "onnx": FormatSpec(_write_onnx, _check_onnx, ("dtype", "onnx")),
    "mlflow": FormatSpec(_write_mlflow, functools.partial(_check_safetensors, export_format="mlflow"), ("dtype",)),
    "oci": FormatSpec(_write_oci, _check_oci, ("dtype", "shard_size"), made_of_main=True),
    "kserve": FormatSpec(_write_kserve, _check_kserve, ("dtype", "shard_size", "kserve"), made_of_main=True),
}
