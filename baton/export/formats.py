"""Export formats: safetensors, an adapter, ONNX, MLflow's flavour; each with how it is checked when read back."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from baton.checkpoint.store import TRAINING_FILES
from baton.export import exportable, gguf_file, kserve, model_card, oci, parity
from baton.export.answers import Expected
from baton.export.source import ExportSource
from baton.models import prompts
from baton.recipe.evaluation import ONNX
from baton.recipe.recipe import Recipe
from baton.runs.outcomes import ExportCheck, ModelMeta
from baton.store.manifest import Manifest

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


# --- The model as safetensors: whole, an adapter folded in, or the adapter alone.


UNITS = {"MB": 10**6, "GB": 10**9}


def write_whole(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, recipe: Recipe, checkpoint: str, target: str
) -> None:
    """Writes the whole model; the checkpoint's own files are taken where they hold it as it was asked for.

    Args:
        model: The whole model, in the type asked for.
        tokenizer: Its tokenizer.
        recipe: Says type and shard size.
        checkpoint: Files of the checkpoint.
        target: Folder to write to.
    """
    spec = recipe.export
    changed = recipe.adapter or spec.dtype not in (None, recipe.model.dtype) or _has_experts(recipe, checkpoint)
    if not changed and _largest(checkpoint) <= _bytes(spec.shard_size):
        copy_model(checkpoint, target)
        return
    model.save_pretrained(target, max_shard_size=spec.shard_size)
    tokenizer.save_pretrained(target)


def copy_model(checkpoint: str, target: str) -> None:
    """Copies the files of a checkpoint that are of the model or the adapter."""
    for name in sorted(os.listdir(checkpoint)):
        if not TRAINING_FILES.match(name) and name != "README.md" and os.path.isfile(f"{checkpoint}/{name}"):
            shutil.copyfile(f"{checkpoint}/{name}", f"{target}/{name}")


def _largest(checkpoint: str) -> int:
    sizes = [
        os.path.getsize(f"{checkpoint}/{name}") for name in os.listdir(checkpoint) if name.endswith(".safetensors")
    ]
    return max(sizes, default=0)


def _bytes(size: str) -> int:
    return int(size[:-2]) * UNITS[size[-2:]]


def _has_experts(recipe: Recipe, checkpoint: str) -> bool:
    """Tells whether weights are of a mixture of experts, which a checkpoint holds under the names in memory."""
    from transformers import AutoConfig

    if not os.path.isfile(f"{checkpoint}/config.json"):
        return False
    runs_code = recipe.model.trust_remote_code
    config: Any = AutoConfig.from_pretrained(checkpoint, trust_remote_code=runs_code).get_text_config()
    return any(hasattr(config, name) for name in ("num_local_experts", "num_experts", "n_routed_experts"))


# --- The model as a graph for ONNX Runtime: `input_ids` and `attention_mask` in, `logits` out, in float32.


ONNX_FILE = "model.onnx"


def save_onnx(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, spec: ONNX, target: str) -> None:
    """Writes the graph with free batch size and length, its weights beside it, and the tokenizer.

    Args:
        model: The whole model, in float32.
        tokenizer: Its tokenizer.
        spec: Version of the operators.
        target: Folder to write to.
    """
    import torch
    from transformers.exporters.exporter_onnx import OnnxConfig, OnnxExporter

    model.config.use_cache = False
    ids = torch.arange(2 * 8).reshape(2, 8) % model.config.get_text_config().vocab_size
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0  # so that the mask is not taken for one that can be left out
    settings: Any = OnnxConfig(dynamic=True, opset_version=spec.opset)
    with _quiet():
        exported = OnnxExporter().export(model, {"input_ids": ids, "attention_mask": mask}, config=settings)
        OnnxExporter.save_program(exported.program, f"{target}/{ONNX_FILE}")
    model.config.save_pretrained(target)
    tokenizer.save_pretrained(target)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps the exporters' progress and notes on versions out of the stage's log."""
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


# --- The model in MLflow's `transformers` flavour, with signature, example and requirements.


MLFLOW_PACKAGES = ("transformers", "torch", "accelerate")
"""What the model needs where it is loaded, pinned to what it was checked with."""


def save_mlflow_model(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, target: str, *, example: str, scores: bool
) -> None:
    """Writes the model.

    Args:
        model: The whole model.
        tokenizer: Its tokenizer.
        target: Folder to write to; it does not exist yet.
        example: A text as the model is given it.
        scores: Whether it scores texts instead of writing them.
    """
    import mlflow
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, DataType, Schema

    logging.getLogger("mlflow").setLevel(logging.ERROR)
    texts = Schema([ColSpec(DataType.string)])
    labelled = Schema([ColSpec(DataType.string, "label"), ColSpec(DataType.double, "score")])
    mlflow.transformers.save_model(
        transformers_model={"model": model, "tokenizer": tokenizer},
        path=target,
        task="text-classification" if scores else "text-generation",
        signature=ModelSignature(inputs=texts, outputs=labelled if scores else texts),
        input_example=[example],
        pip_requirements=[f"{name}=={version(name).partition('+')[0]}" for name in MLFLOW_PACKAGES],
    )


# --- The formats: how each is written, and what must hold when it is read back.


@dataclass(frozen=True)
class Export:
    """An export that is committed.

    Attributes:
        uri: Its address.
        manifest: What is committed there.
        meta: What it says of the files.
        folder: Brings its files to this machine and returns where they are.
    """

    uri: str
    manifest: Manifest
    meta: ModelMeta
    folder: Callable[[], str]


@dataclass(frozen=True)
class Draft:
    """An export that is written and not yet checked.

    Attributes:
        source: What is exported.
        target: Folder with the files.
        main: The main export; None while that itself is made.
        hashes: Of the tensors of each GGUF file.
    """

    source: ExportSource
    target: str
    main: Export | None = None
    hashes: dict[str, dict[str, str]] = field(default_factory=dict)

    def require_main(self) -> Export:
        """Returns the main export."""
        assert self.main
        return self.main


def _compared(export_format: str, draft: Draft, expected: Expected, **request: Any) -> ExportCheck:
    """Reads an export back that holds the weights as they are, and compares weights, logits and tokens."""
    reading = parity.read(export_format, draft.target, draft.source.context, expected, **request)
    parity.require_weights(f"the {export_format} export", reading.notes["weights"], expected.weights)
    return parity.compare(export_format, reading, expected, expected.rounding)


def _write_safetensors(draft: Draft) -> None:
    source = draft.source
    write_whole(source.whole, source.tokenizer, source.recipe, source.folder, draft.target)


def _check_safetensors(draft: Draft) -> ExportCheck:
    source = draft.source
    return source.beside_trained(_compared("safetensors", draft, source.said_whole), source.said_whole)


def _write_adapter(draft: Draft) -> None:
    copy_model(draft.source.folder, draft.target)


def _check_adapter(draft: Draft) -> ExportCheck:
    source = draft.source
    asked = {"base": source.base, "dtype": source.recipe.model.dtype}
    return _compared("adapter", draft, source.said_trained, **asked)


def _write_gguf(draft: Draft) -> None:
    source = draft.source
    exportable.check(source.recipe, source.whole.config.model_type)
    for kind in source.recipe.export.gguf.types:
        name = _gguf_name(source, kind)
        about = {"name": source.recipe.name, "license": source.facts.licence or ""}
        path = f"{draft.target}/{name}"
        draft.hashes[name] = gguf_file.write(
            source.whole, source.tokenizer, source.tokenizer_folder, path, kind, **about
        )


def _gguf_name(source: ExportSource, kind: str) -> str:
    return f"{source.recipe.name}-{kind}.gguf"


def _check_gguf(draft: Draft) -> ExportCheck:
    source = draft.source
    config = gguf_file.plain_config(source.whole.config)
    files = {}
    for kind in source.recipe.export.gguf.types:
        name = _gguf_name(source, kind)
        expected = source.ask(gguf_file.dequantized(source.whole, kind))
        reading = parity.read("gguf", draft.target, source.context, expected, file=name, config=config)
        parity.require_weights(name, reading.notes["tensors"], draft.hashes[name])
        parity.require_weights(f"{name}, once loaded,", reading.notes["weights"], expected.weights)
        finding = parity.compare("gguf", reading, expected, expected.rounding)
        expected_texts = [source.tokenizer(text)["input_ids"] for text in source.texts]
        engine = parity.of_llama_cpp(name, reading, expected, expected_texts, exact=kind == "f32")
        finding = finding.model_copy(update={"llama_cpp": engine}) if engine else finding
        files[name] = source.beside_trained(finding, expected)
    words = "; ".join(f"{name} {finding.words}" for name, finding in files.items())
    return ExportCheck(library=finding.library, files=files, words=words)


def _write_onnx(draft: Draft) -> None:
    source = draft.source
    save_onnx(source.in_float32(), source.tokenizer, source.recipe.export.onnx, draft.target)


def _check_onnx(draft: Draft) -> ExportCheck:
    source = draft.source
    expected = source.ask(source.in_float32())
    reading = parity.read("onnx", draft.target, source.context, expected)
    finding = parity.compare("onnx", reading, expected, parity.TOLERANCE)
    return source.beside_trained(finding, expected)


def _write_mlflow(draft: Draft) -> None:
    source = draft.source
    os.rmdir(draft.target)
    example = source.texts[0]
    save_mlflow_model(source.whole, source.tokenizer, draft.target, example=example, scores=source.scores)


def _check_mlflow(draft: Draft) -> ExportCheck:
    source = draft.source
    return source.beside_trained(_compared("mlflow", draft, source.said_whole), source.said_whole)


def _write_oci(draft: Draft) -> None:
    source = draft.source
    labels = {"baton.run": source.run.name, "baton.run_uri": source.run.uri, "baton.digest": source.digest}
    oci.write(draft.require_main().folder(), draft.target, tag=source.run.name, labels=labels)


def _check_oci(draft: Draft) -> ExportCheck:
    files = draft.require_main().manifest.files
    return oci.check(draft.target, {name: entry["sha256"] for name, entry in files.items()})


def _write_kserve(draft: Draft) -> None:
    source, main = draft.source, draft.require_main()
    uri = source.recipe.export.kserve.model_uri or main.uri
    about = {"run": source.run.name, "digest": source.digest}
    kserve.write(source.recipe, draft.target, model_uri=uri, size=main.manifest.bytes, **about)


def _check_kserve(draft: Draft) -> ExportCheck:
    return kserve.check(draft.target)


@dataclass(frozen=True)
class Format:
    """A format.

    Attributes:
        write: Fills the draft's folder.
        check: Reads it back and returns the finding; raises where it does not count.
        settings: What of the recipe's export section it depends on.
    """

    write: Callable[[Draft], None]
    check: Callable[[Draft], ExportCheck]
    settings: tuple[str, ...] = ()


FORMATS = {
    "safetensors": Format(_write_safetensors, _check_safetensors, ("dtype", "shard_size")),
    "adapter": Format(_write_adapter, _check_adapter),
    "gguf": Format(_write_gguf, _check_gguf, ("dtype", "gguf")),
    "onnx": Format(_write_onnx, _check_onnx, ("dtype", "onnx")),
    "mlflow": Format(_write_mlflow, _check_mlflow, ("dtype",)),
    "oci": Format(_write_oci, _check_oci, ("dtype", "shard_size")),
    "kserve": Format(_write_kserve, _check_kserve, ("dtype", "shard_size", "kserve")),
}


MADE_OF_MAIN = ("oci", "kserve")
"""Formats that hold or name the files of the main export."""


def write_prompting(draft: Draft, export_format: str) -> None:
    """Puts beside a model how it was asked in training, and lets its own settings end an answer where it does."""
    source = draft.source
    if source.prompting is None or export_format not in (*model_card.LOADING, "mlflow"):
        return
    with open(f"{draft.target}/{prompts.FILE}", "w", encoding="utf-8") as file:
        json.dump(source.prompting.to_json(), file, indent=2)
    for folder, _, names in os.walk(draft.target):
        if source.prompting.is_chat and prompts.SETTINGS in names:
            prompts.write_ends(folder, source.tokenizer)


def write_card(draft: Draft, export_format: str, finding: ExportCheck) -> None:
    """Puts the model card beside the model, in formats that people look at."""
    if export_format in model_card.LOADING:
        source = draft.source
        model_card.write(source.run, source.recipe, source.facts, export_format, draft.target, finding.words)
