"""The formats: how each is written, and what must hold when it is read back."""

from __future__ import annotations

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
from baton.components.export.subject import Subject
from baton.components.shared.models import exportable
from baton.components.shared.store.bundles import Manifest

Finding = dict[str, Any]


@dataclass(frozen=True)
class Export:
    """An export that is committed.

    Attributes:
        uri: Its address.
        manifest: What is committed there.
        folder: Brings its files to this machine and returns where they are.
    """

    uri: str
    manifest: Manifest
    folder: Callable[[], str]


@dataclass(frozen=True)
class Draft:
    """An export that is written and not yet checked.

    Attributes:
        subject: What is exported.
        target: Folder with the files.
        main: The main export; None while that itself is made.
        hashes: Of the tensors of each GGUF file.
    """

    subject: Subject
    target: str
    main: Export | None = None
    hashes: dict[str, dict[str, str]] = field(default_factory=dict)

    def require_main(self) -> Export:
        """Returns the main export."""
        assert self.main
        return self.main


def _compared(export_format: str, draft: Draft, expected: Expected, **request: Any) -> Finding:
    """Reads an export back that holds the weights as they are, and compares weights, logits and tokens."""
    reading = check.read(export_format, draft.target, draft.subject.context, expected, **request)
    check.require_weights(f"the {export_format} export", reading.notes["weights"], expected.weights)
    return check.compare(export_format, reading, expected, expected.rounding)


def _write_safetensors(draft: Draft) -> None:
    subject = draft.subject
    weights.write_whole(subject.whole, subject.tokenizer, subject.recipe, subject.folder, draft.target)


def _check_safetensors(draft: Draft) -> Finding:
    subject = draft.subject
    return subject.beside_trained(_compared("safetensors", draft, subject.said_whole), subject.said_whole)


def _write_adapter(draft: Draft) -> None:
    weights.copy_model(draft.subject.folder, draft.target)


def _check_adapter(draft: Draft) -> Finding:
    subject = draft.subject
    asked = {"base": subject.base, "dtype": subject.recipe.model.dtype}
    return _compared("adapter", draft, subject.said_trained, **asked)


def _write_gguf(draft: Draft) -> None:
    subject = draft.subject
    exportable.check(subject.recipe, subject.whole.config.model_type)
    for kind in subject.recipe.export.gguf.types:
        name = _gguf_name(subject, kind)
        about = {"name": subject.recipe.name, "license": subject.facts.licence or ""}
        path = f"{draft.target}/{name}"
        draft.hashes[name] = gguf_file.write(
            subject.whole, subject.tokenizer, subject.tokenizer_folder, path, kind, **about
        )


def _gguf_name(subject: Subject, kind: str) -> str:
    return f"{subject.recipe.name}-{kind}.gguf"


def _check_gguf(draft: Draft) -> Finding:
    subject = draft.subject
    config = gguf_settings.document(subject.whole.config)
    files = {}
    for kind in subject.recipe.export.gguf.types:
        name = _gguf_name(subject, kind)
        expected = subject.ask(gguf_file.dequantized(subject.whole, kind))
        reading = check.read("gguf", draft.target, subject.context, expected, file=name, config=config)
        check.require_weights(name, reading.notes["tensors"], draft.hashes[name])
        check.require_weights(f"{name}, once loaded,", reading.notes["weights"], expected.weights)
        finding = check.compare("gguf", reading, expected, expected.rounding)
        expected_texts = [subject.tokenizer(text)["input_ids"] for text in subject.texts]
        engine = check.of_llama_cpp(name, reading, expected, expected_texts, exact=kind == "f32")
        files[name] = subject.beside_trained({**finding, **engine}, expected)
    words = "; ".join(f"{name} {finding['words']}" for name, finding in files.items())
    return {"library": finding["library"], "files": files, "words": words}


def _write_onnx(draft: Draft) -> None:
    subject = draft.subject
    onnx_graph.write(subject.in_float32(), subject.tokenizer, subject.recipe.export.onnx, draft.target)


def _check_onnx(draft: Draft) -> Finding:
    subject = draft.subject
    expected = subject.ask(subject.in_float32())
    reading = check.read("onnx", draft.target, subject.context, expected)
    finding = check.compare("onnx", reading, expected, check.TOLERANCE)
    return subject.beside_trained(finding, expected)


def _write_mlflow(draft: Draft) -> None:
    subject = draft.subject
    os.rmdir(draft.target)
    example = subject.texts[0]
    mlflow_model.write(subject.whole, subject.tokenizer, draft.target, example=example, scores=subject.scores)


def _check_mlflow(draft: Draft) -> Finding:
    subject = draft.subject
    return subject.beside_trained(_compared("mlflow", draft, subject.said_whole), subject.said_whole)


def _write_oci(draft: Draft) -> None:
    subject = draft.subject
    labels = {"baton.run": subject.run.name, "baton.run_uri": subject.run.uri, "baton.digest": subject.digest}
    oci.write(draft.require_main().folder(), draft.target, tag=subject.run.name, labels=labels)


def _check_oci(draft: Draft) -> Finding:
    files = draft.require_main().manifest.files
    return oci.check(draft.target, {name: entry["sha256"] for name, entry in files.items()})


def _write_kserve(draft: Draft) -> None:
    subject, main = draft.subject, draft.require_main()
    uri = subject.recipe.export.kserve.model_uri or main.uri
    about = {"run": subject.run.name, "digest": subject.digest}
    kserve.write(subject.recipe, draft.target, model_uri=uri, size=main.manifest.bytes, **about)


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


def write_card(draft: Draft, export_format: str, finding: Finding) -> None:
    """Puts the model card beside the model, in formats that people look at."""
    if export_format in card.LOADING:
        subject = draft.subject
        card.write(subject.run, subject.recipe, subject.facts, export_format, draft.target, finding["words"])
