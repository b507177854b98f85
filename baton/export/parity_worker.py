"""An export, read back by the library it is for, in a process that has seen nothing else:
`python -m baton.export.parity_worker FORMAT FOLDER REQUEST ANSWERS`."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from typing import Any

from baton.export import answers
from baton.export.answers import Answer, ParityInputs

Request = dict[str, Any]


def main(export_format: str, folder: str, request_path: str, answers_path: str) -> None:
    """Loads an export, asks it, and writes answers, notes and the library's name and version."""
    with open(request_path, encoding="utf-8") as file:
        request = json.load(file)
    questions = ParityInputs(request["prompts"], request["num_tokens"], request["followed"])
    found, notes = READERS[export_format](folder, request, questions)
    answers.save(found, answers_path)
    with open(f"{answers_path}.json", "w", encoding="utf-8") as file:
        json.dump({**notes, "library": _library(export_format)}, file)


def _model(folder: str, request: Request, **settings: Any) -> Any:
    import torch
    import transformers

    torch.set_num_threads(request["threads"])
    kind = getattr(transformers, request["kind"])
    return kind.from_pretrained(folder, trust_remote_code=request["trust_remote_code"], **settings)


def _asked(model: Any, questions: ParityInputs) -> tuple[list[Answer], Request]:
    return answers.of_model(model, questions), {"weights": answers.weights(model)}


def _safetensors(folder: str, request: Request, questions: ParityInputs) -> tuple[list[Answer], Request]:
    return _asked(_model(folder, request, use_safetensors=True), questions)


def _adapter(folder: str, request: Request, questions: ParityInputs) -> tuple[list[Answer], Request]:
    import torch

    from baton.models import loading, trainable

    settings = trainable.unpacked(request["base"]) | ({} if request["num_tokens"] else {"num_labels": 1})
    base = _model(request["base"], request, use_safetensors=True, dtype=getattr(torch, request["dtype"]), **settings)
    tokenizer = loading.load_tokenizer(folder, trust_remote_code=request["trust_remote_code"])
    return _asked(loading.adapted(base, folder, tokenizer), questions)


def _gguf(folder: str, request: Request, questions: ParityInputs) -> tuple[list[Answer], Request]:
    import gguf
    import torch
    from transformers import AutoConfig

    path = os.path.join(folder, request["file"])
    hashes = {
        str(tensor.name): hashlib.sha256(tensor.data.tobytes()).hexdigest() for tensor in gguf.GGUFReader(path).tensors
    }
    # Some settings have no reader there, such as the size of Qwen 3's heads, so the weights meet their own.
    config = AutoConfig.for_model(**request["config"])
    model = _model(folder, request, gguf_file=request["file"], dtype=torch.float32, config=config)
    answers, notes = _asked(model, questions)
    notes["tensors"] = hashes
    if llama := _llama_cpp(path, request):
        notes["llama_cpp"] = llama
    return answers, notes


def _llama_cpp(path: str, request: Request) -> Request | None:
    """Asks llama.cpp itself, where its binding is installed: for tokens of texts and the greedy continuation."""
    try:
        import llama_cpp
    except ImportError:
        return None
    length = max(map(len, request["prompts"])) + request["num_tokens"] + 1
    model = llama_cpp.Llama(path, n_ctx=max(length, 64), n_threads=request["threads"], verbose=False, logits_all=True)
    texts = [model.tokenize(text.encode(), special=True) for text in request["texts"]]
    written = []
    for prompt in request["prompts"]:
        model.reset()
        model.eval(prompt)
        tokens: list[int] = []
        while len(tokens) < request["num_tokens"]:
            tokens.append(int(model.scores[model.n_tokens - 1].argmax()))
            model.eval(tokens[-1:])
        written.append(tokens)
    return {"version": llama_cpp.__version__, "texts": texts, "tokens": written}


def _onnx(folder: str, request: Request, questions: ParityInputs) -> tuple[list[Answer], Request]:
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

    if not questions.num_tokens:
        return [Answer([], logits([prompt], len(prompt))) for prompt in questions.prompts], {}
    answers, paths = [], []
    for number, prompt in enumerate(questions.prompts):
        ids = list(prompt)
        for _ in range(questions.num_tokens):
            ids.append(int(logits([ids], len(ids))[0, -1].argmax()))
        tokens = ids[len(prompt) :]
        paths.append(prompt + questions.continuation(number, tokens)[:-1])
        answers.append(Answer(tokens, logits(paths[-1:], len(paths[-1]))[0]))
    together = logits(paths, max(map(len, paths)) + 1)  # the shapes are free: all rows at once, padded
    batch = [Answer(answer.tokens, row[: len(ids)]) for ids, row, answer in zip(paths, together, answers, strict=True)]
    return answers + batch, {}


def _mlflow(folder: str, request: Request, questions: ParityInputs) -> tuple[list[Answer], Request]:
    import mlflow
    import torch

    torch.set_num_threads(request["threads"])
    parts = mlflow.transformers.load_model(folder, return_type="components")
    return _asked(parts["model"], questions)


READERS = {"safetensors": _safetensors, "adapter": _adapter, "gguf": _gguf, "onnx": _onnx, "mlflow": _mlflow}
PACKAGES = {"safetensors": "transformers", "adapter": "peft", "onnx": "onnxruntime"}


def _library(export_format: str) -> str:
    from importlib.metadata import version

    name = PACKAGES.get(export_format, export_format)
    with_transformers = f" with transformers {version('transformers')}" if export_format in ("gguf", "mlflow") else ""
    return f"{name} {version(name)}{with_transformers}"


if __name__ == "__main__":
    main(*sys.argv[1:5])
