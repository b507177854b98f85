"""Reads an export back in a fresh process: `python -m baton.export.parity_worker FORMAT FOLDER SCRATCH`."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from importlib.metadata import version
from typing import Any

from baton.export.parity import ModelAnswer, ParityInputs, ask_model, save_answers, weight_digests

Request = dict[str, Any]
Answers = tuple[list[ModelAnswer], dict[str, Any]]  # with notes on the export


def main(export_format: str, folder: str, scratch: str) -> None:
    """Asks the export as `request.json` in the scratch folder says, and writes answers and notes beside it."""
    with open(f"{scratch}/request.json", encoding="utf-8") as file:
        request = json.load(file)
    answers, notes = READERS[export_format](folder, request, ParityInputs(**request["inputs"]))
    save_answers(answers, f"{scratch}/answers.npz")
    package = {"safetensors": "transformers", "adapter": "peft", "onnx": "onnxruntime"}.get(
        export_format, export_format
    )
    library = f"{package} {version(package)}"
    if export_format in ("gguf", "mlflow"):
        library += f" with transformers {version('transformers')}"
    with open(f"{scratch}/notes.json", "w", encoding="utf-8") as file:
        json.dump({**notes, "library": library}, file)


def _load(folder: str, request: Request, inputs: ParityInputs, **settings: Any) -> Any:
    import torch
    import transformers

    torch.set_num_threads(request["threads"])
    auto_class = getattr(transformers, inputs.auto_class)
    return auto_class.from_pretrained(folder, trust_remote_code=inputs.trust_remote_code, **settings)


def _ask(model: Any, inputs: ParityInputs) -> Answers:
    return ask_model(model, inputs), {"weights": weight_digests(model)}


def _safetensors(folder: str, request: Request, inputs: ParityInputs) -> Answers:
    return _ask(_load(folder, request, inputs, use_safetensors=True), inputs)


def _adapter(folder: str, request: Request, inputs: ParityInputs) -> Answers:
    import torch

    from baton.models import loading, trainable

    settings = trainable.unpacked(request["base"]) | ({} if inputs.num_tokens else {"num_labels": 1})
    dtype = getattr(torch, request["dtype"])
    base = _load(request["base"], request, inputs, use_safetensors=True, dtype=dtype, **settings)
    tokenizer = loading.load_tokenizer(folder, trust_remote_code=inputs.trust_remote_code)
    return _ask(loading.adapted(base, folder, tokenizer), inputs)


def _gguf(folder: str, request: Request, inputs: ParityInputs) -> Answers:
    import gguf
    import torch
    from transformers import AutoConfig

    path = os.path.join(folder, request["file"])
    hashes = {
        str(tensor.name): hashlib.sha256(tensor.data.tobytes()).hexdigest() for tensor in gguf.GGUFReader(path).tensors
    }
    # The trained model's own: from GGUF, Transformers does not read settings such as the size of Qwen 3's heads.
    config = AutoConfig.for_model(**request["config"])
    model = _load(folder, request, inputs, gguf_file=request["file"], dtype=torch.float32, config=config)
    answers, notes = _ask(model, inputs)
    return answers, {**notes, "tensors": hashes, "llama_cpp": _llama_cpp(path, request["threads"], inputs)}


def _llama_cpp(path: str, num_threads: int, inputs: ParityInputs) -> dict[str, Any] | None:
    """Asks llama.cpp itself for tokens of texts and the greedy continuation, None where it is not installed."""
    try:
        import llama_cpp
    except ImportError:
        return None
    length = max(map(len, inputs.prompts)) + inputs.num_tokens + 1
    model = llama_cpp.Llama(path, n_ctx=max(length, 64), n_threads=num_threads, verbose=False, logits_all=True)
    texts = [model.tokenize(text.encode(), special=True) for text in inputs.texts]
    written = []
    for prompt in inputs.prompts:
        model.reset()
        model.eval(prompt)
        tokens: list[int] = []
        while len(tokens) < inputs.num_tokens:
            tokens.append(int(model.scores[model.n_tokens - 1].argmax()))
            model.eval(tokens[-1:])
        written.append(tokens)
    return {"version": llama_cpp.__version__, "texts": texts, "tokens": written}


def _onnx(folder: str, request: Request, inputs: ParityInputs) -> Answers:
    import numpy as np
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = request["threads"]
    session = onnxruntime.InferenceSession(f"{folder}/model.onnx", options, providers=["CPUExecutionProvider"])

    def logits(rows: list[list[int]], width: int) -> np.ndarray[Any, Any]:
        ids = np.array([row + [0] * (width - len(row)) for row in rows], dtype=np.int64)
        mask = np.array([[1] * len(row) + [0] * (width - len(row)) for row in rows], dtype=np.int64)
        answers: np.ndarray[Any, Any] = session.run(["logits"], {"input_ids": ids, "attention_mask": mask})[0]
        return answers

    if not inputs.num_tokens:
        return [ModelAnswer([], logits([prompt], len(prompt))) for prompt in inputs.prompts], {}
    answers, paths = [], []
    for number, prompt in enumerate(inputs.prompts):
        ids = list(prompt)
        for _ in range(inputs.num_tokens):
            ids.append(int(logits([ids], len(ids))[0, -1].argmax()))
        tokens = ids[len(prompt) :]
        paths.append(inputs.path(number, tokens))
        answers.append(ModelAnswer(tokens, logits(paths[-1:], len(paths[-1]))[0]))
    together = logits(paths, max(map(len, paths)) + 1)  # the shapes are free: all rows at once, padded
    batch = zip(answers, paths, together, strict=True)
    return answers + [ModelAnswer(answer.tokens, row[: len(path)]) for answer, path, row in batch], {}


def _mlflow(folder: str, request: Request, inputs: ParityInputs) -> Answers:
    import mlflow
    import torch

    torch.set_num_threads(request["threads"])
    return _ask(mlflow.transformers.load_model(folder, return_type="components")["model"], inputs)


READERS = {"safetensors": _safetensors, "adapter": _adapter, "gguf": _gguf, "onnx": _onnx, "mlflow": _mlflow}

if __name__ == "__main__":
    main(*sys.argv[1:4])
