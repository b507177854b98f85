"""The formats: how each is written, and what must hold when it is read back."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from baton.components.export import (
    card,
    check,
    gguf_file,
    gguf_settings,
    kserve,
    mlflow_model,
    oci,
    onnx_graph,
    weights,
)
from baton.components.export.answers import Expected
from baton.components.export.export_source import ExportSource
from baton.components.shared.models import exportable, prompting
from baton.components.shared.runs.documents.outcome import Finding, ModelMeta
from baton.components.shared.store.bundles import Manifest


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


def _compared(export_format: str, draft: Draft, expected: Expected, **request: Any) -> Finding:
    """Reads an export back that holds the weights as they are, and compares weights, logits and tokens."""
    reading = check.read(export_format, draft.target, draft.source.context, expected, **request)
    check.require_weights(f"the {export_format} export", reading.notes["weights"], expected.weights)
    return check.compare(export_format, reading, expected, expected.rounding)


def _write_safetensors(draft: Draft) -> None:
    source = draft.source
    weights.write_whole(source.whole, source.tokenizer, source.recipe, source.folder, draft.target)


def _check_safetensors(draft: Draft) -> Finding:
    source = draft.source
    return source.beside_trained(_compared("safetensors", draft, source.said_whole), source.said_whole)


def _write_adapter(draft: Draft) -> None:
    weights.copy_model(draft.source.folder, draft.target)


def _check_adapter(draft: Draft) -> Finding:
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


def _check_gguf(draft: Draft) -> Finding:
    source = draft.source
    config = gguf_settings.document(source.whole.config)
    files = {}
    for kind in source.recipe.export.gguf.types:
        name = _gguf_name(source, kind)
        expected = source.ask(gguf_file.dequantized(source.whole, kind))
        reading = check.read("gguf", draft.target, source.context, expected, file=name, config=config)
        check.require_weights(name, reading.notes["tensors"], draft.hashes[name])
        check.require_weights(f"{name}, once loaded,", reading.notes["weights"], expected.weights)
        finding = check.compare("gguf", reading, expected, expected.rounding)
        expected_texts = [source.tokenizer(text)["input_ids"] for text in source.texts]
        engine = check.of_llama_cpp(name, reading, expected, expected_texts, exact=kind == "f32")
        finding = finding.model_copy(update={"llama_cpp": engine}) if engine else finding
        files[name] = source.beside_trained(finding, expected)
    words = "; ".join(f"{name} {finding.words}" for name, finding in files.items())
    return Finding(library=finding.library, files=files, words=words)


def _write_onnx(draft: Draft) -> None:
    source = draft.source
    onnx_graph.write(source.in_float32(), source.tokenizer, source.recipe.export.onnx, draft.target)


def _check_onnx(draft: Draft) -> Finding:
    source = draft.source
    expected = source.ask(source.in_float32())
    reading = check.read("onnx", draft.target, source.context, expected)
    finding = check.compare("onnx", reading, expected, check.TOLERANCE)
    return source.beside_trained(finding, expected)


def _write_mlflow(draft: Draft) -> None:
    source = draft.source
    os.rmdir(draft.target)
    example = source.texts[0]
    mlflow_model.write(source.whole, source.tokenizer, draft.target, example=example, scores=source.scores)


def _check_mlflow(draft: Draft) -> Finding:
    source = draft.source
    return source.beside_trained(_compared("mlflow", draft, source.said_whole), source.said_whole)


def _write_oci(draft: Draft) -> None:
    source = draft.source
    labels = {"baton.run": source.run.name, "baton.run_uri": source.run.uri, "baton.digest": source.digest}
    oci.write(draft.require_main().folder(), draft.target, tag=source.run.name, labels=labels)


def _check_oci(draft: Draft) -> Finding:
    files = draft.require_main().manifest.files
    return oci.check(draft.target, {name: entry["sha256"] for name, entry in files.items()})


def _write_kserve(draft: Draft) -> None:
    source, main = draft.source, draft.require_main()
    uri = source.recipe.export.kserve.model_uri or main.uri
    about = {"run": source.run.name, "digest": source.digest}
    kserve.write(source.recipe, draft.target, model_uri=uri, size=main.manifest.bytes, **about)


def _check_kserve(draft: Draft) -> Finding:
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
    check: Callable[[Draft], Finding]
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
    if source.prompting is None or export_format not in (*card.LOADING, "mlflow"):
        return
    with open(f"{draft.target}/{prompting.FILE}", "w", encoding="utf-8") as file:
        json.dump(source.prompting.to_json(), file, indent=2)
    for folder, _, names in os.walk(draft.target):
        if source.prompting.is_chat and prompting.SETTINGS in names:
            prompting.write_ends(folder, source.tokenizer)


def write_card(draft: Draft, export_format: str, finding: Finding) -> None:
    """Puts the model card beside the model, in formats that people look at."""
    if export_format in card.LOADING:
        source = draft.source
        card.write(source.run, source.recipe, source.facts, export_format, draft.target, finding.words)
