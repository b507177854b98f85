"""The model as a graph for ONNX Runtime: `input_ids` and `attention_mask` in, `logits` out, in float32."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from baton.components.shared.recipe.export import ONNX

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

FILE = "model.onnx"


def write(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, spec: ONNX, target: str) -> None:
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
        OnnxExporter.save_program(exported.program, f"{target}/{FILE}")
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
