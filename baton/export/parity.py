"""The check that an export gives what the trained model gives, before it counts.

The trained model is asked in this process, each export in one of its own by the library it is for. Conditions:

- safetensors, adapter and MLflow hold the same weights, bit for bit;
- GGUF holds the tensors that the library's quantizer makes of the trained weights, byte for byte, and loads with just
  these weights. Their distance from the unquantized model is recorded;
- logits along the trained model's own tokens differ by rounding alone, or by `TOLERANCE` in another engine. Bits may
  differ: equal weights in another memory layout, such as a transposed layer, are summed in another order;
- greedy tokens are the trained model's, up to a choice between two that are as good as equal.

`python -m baton.export.parity FORMAT FOLDER SCRATCH` is the process that reads an export back.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import subprocess
import sys
import urllib.request
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from itertools import takewhile
from typing import Any

import numpy as np

from baton.errors import BatonError
from baton.runs.outcomes import ExportCheck, LlamaCpp
from baton.scratch import scratch_folder

TOLERANCE = 1e-3  # between logits of two engines, as a share of the largest logit
# Results that one block rounds to the model's type on the way to a logit: 2 norms of 3, 5 projections with rotation,
# scores, softmax and values, activation and product, 2 residuals.
ROUNDINGS = 16


@dataclass(frozen=True)
class ParityInputs:
    """Prompts for every model of a check, and how Transformers loads it."""

    prompts: list[list[int]]  # token ids
    num_tokens: int  # to write after each; 0 for a model that scores
    followed: list[list[int]] | None = None  # tokens along which logits are taken; the model's own if None
    texts: list[str] = field(default_factory=list)  # to compare tokenizers by, where a format has its own
    auto_class: str = "AutoModelForCausalLM"
    trust_remote_code: bool = False

    def path(self, number: int, written: list[int]) -> list[int]:
        """Returns the tokens along which logits are taken: a prompt's, and all but the last that follow it."""
        return self.prompts[number] + (written if self.followed is None else self.followed[number])[:-1]


@dataclass(frozen=True)
class ModelAnswer:
    """A model's tokens and logits for one prompt."""

    tokens: list[int]
    # In float32, which holds every smaller type exactly, of shape (tokens, vocabulary) from the prompt's first token to
    # the last but one of its continuation; of shape (1, labels) for a model that scores.
    logits: np.ndarray[Any, Any]


@dataclass(frozen=True)
class Reference:
    """The answers that an export is compared with."""

    answers: list[ModelAnswer]  # one for each prompt
    weights: dict[str, str]  # digests by name
    rounding: float  # tolerance between logits of the same weights, as a share of the largest


@dataclass(frozen=True)
class Reading:
    answers: list[ModelAnswer]  # one for each prompt; a second round where the format was asked in two ways
    notes: dict[str, Any]  # `library`, `weights` (digests by name), and the format's own


def make_reference(model: Any, inputs: ParityInputs) -> Reference:
    length = max(map(len, inputs.prompts)) + inputs.num_tokens
    return Reference(ask_model(model, inputs), weight_digests(model), rounding(model, length))


def weight_digests(model: Any) -> dict[str, str]:
    """Returns each weight's digest by type, shape and values, whatever its memory layout."""
    from baton.checkpoint.digest import tree_digest

    return {name: tree_digest(value) for name, value in model.state_dict().items()}


def rounding(model: Any, length: int) -> float:
    """Returns the largest difference between two computations of one model, as a share of the largest logit."""
    import torch

    # Equal operands give equal results in one kernel alone: another layout in memory, alignment, batch shape or
    # processor sums in another order. A rounding is off by at most u = ε/2 of its value, and n independent ones grow as
    # √n, not n (Higham and Mary, A New Approach to Probabilistic Rounding Error Analysis, SIAM J. Sci. Comput. 41,
    # 2019). Each of the two computations is given 2·u·√n. n counts what a type rounds: results in 16 bits, whose sums
    # are in float32; in float32 each addition of the dot products. Measured against float64 on all architectures of
    # GGUF and on 24 blocks, errors were 0.1 to 1.2 u·√n in float32, 0.1 to 3.3 in bfloat16 and float16, with weights
    # ten times as large as models begin with; other layouts and batches were at most 0.7 apart.
    config = model.config.get_text_config()
    width, blocks = config.hidden_size, config.num_hidden_layers
    inner = getattr(config, "intermediate_size", None) or 4 * width
    additions = blocks * (4 * width + inner + length + ROUNDINGS)
    variance = additions * (torch.finfo(torch.float32).eps / 2) ** 2
    types = {value.dtype for value in model.parameters() if value.is_floating_point()}
    coarsest = max(torch.finfo(dtype).eps for dtype in types) / 2
    if coarsest > torch.finfo(torch.float32).eps:
        variance += blocks * ROUNDINGS * coarsest**2
    return 4 * math.sqrt(variance)


def ask_model(model: Any, inputs: ParityInputs) -> list[ModelAnswer]:
    """Asks a Transformers model, or PEFT's around it; its own settings for writing are put back."""
    import torch
    from transformers import GenerationConfig

    def logits(ids: list[int]) -> Any:
        return model(input_ids=torch.tensor([ids])).logits.float().numpy()

    def continuation(prompt: list[int]) -> list[int]:
        ids = torch.tensor([prompt])
        out = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=inputs.num_tokens, do_sample=False
        )
        written: list[int] = out[0, len(prompt) :].tolist()
        return written

    model.eval()
    with torch.inference_mode():
        if not inputs.num_tokens:
            return [ModelAnswer([], logits(prompt)) for prompt in inputs.prompts]
        inner = model.get_base_model() if hasattr(model, "get_base_model") else model
        kept = inner.generation_config
        model.generation_config = GenerationConfig()  # without the base's own ends and penalties
        written = [continuation(prompt) for prompt in inputs.prompts]
        model.generation_config = inner.generation_config = kept
        return [ModelAnswer(tokens, logits(inputs.path(number, tokens))[0]) for number, tokens in enumerate(written)]


def save_answers(answers: list[ModelAnswer], path: str) -> None:

    arrays: dict[str, Any] = {}
    for number, answer in enumerate(answers):
        arrays[f"tokens-{number}"] = np.array(answer.tokens, dtype=np.int64)
        arrays[f"logits-{number}"] = answer.logits
    np.savez(path, **arrays)


def load_answers(path: str) -> list[ModelAnswer]:

    with np.load(path, allow_pickle=False) as arrays:
        return [
            ModelAnswer(arrays[f"tokens-{number}"].tolist(), arrays[f"logits-{number}"])
            for number in range(len(arrays.files) // 2)
        ]


def read(export_format: str, folder: str, inputs: ParityInputs, reference: Reference, **request: Any) -> Reading:
    """Asks an export in its own process, offline, for its tokens and for logits along the reference's tokens."""
    import torch

    followed = [answer.tokens for answer in reference.answers]
    request |= {"inputs": asdict(replace(inputs, followed=followed)), "threads": torch.get_num_threads()}
    with scratch_folder("check") as scratch:
        with open(f"{scratch}/request.json", "w", encoding="utf-8") as file:
            json.dump(request, file)
        done = subprocess.run(
            [sys.executable, "-m", "baton.export.parity", export_format, folder, scratch],
            env={**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )
        if done.returncode:
            lines = done.stdout.strip().splitlines() or [f"exit code {done.returncode}"]
            raise BatonError(f"the {export_format} export cannot be loaded back: {lines[-1].strip()[:300]}")
        with open(f"{scratch}/notes.json", encoding="utf-8") as file:
            return Reading(load_answers(f"{scratch}/answers.npz"), json.load(file))


def compare(export_format: str, reading: Reading, reference: Reference, share: float) -> ExportCheck:
    """Compares an export's answers with the reference's; `share` is the tolerance as a share of the largest logit."""
    rounds = len(reading.answers) // len(reference.answers)
    num_tokens = sum(len(answer.tokens) for answer in reference.answers)
    furthest, shared = 0.0, []
    for actual, due in zip(reading.answers, reference.answers * rounds, strict=True):
        is_comparable = actual.logits.shape == due.logits.shape
        difference = float(abs(actual.logits - due.logits).max()) if is_comparable else float("inf")
        limit = share * float(abs(due.logits).max())
        if not difference <= limit:  # nor where one of them is no number
            raise BatonError(
                f"the {export_format} export's logits differ from the trained model's by {difference:.3g}; at most "
                f"{limit:.3g} was expected. It does not count."
            )
        furthest = max(furthest, difference)
        shared.append(require_tokens(f"the {export_format} export", actual.tokens, due, limit))
    same = sum(shared[: len(reference.answers)])
    words = [f"{same} of {num_tokens} tokens the same" if num_tokens else "scores compared"]
    if same < num_tokens:
        words.append("the next one a tie")
    words.append(f"logits differ by {furthest:.2g} at most" if furthest else "logits the same bit for bit")
    if "weights" in reading.notes:
        words.insert(0, "weights the same bit for bit")
    return ExportCheck(
        library=reading.notes["library"],
        tokens=num_tokens,
        bitwise=furthest == 0,
        max_abs_difference=furthest,
        words=f"{reading.notes['library']}: {', '.join(words)}",
    )


def require_tokens(what: str, tokens: list[int], due: ModelAnswer, limit: float) -> int:
    """Returns how many greedy tokens are the same before the first that differs.

    With logits up to `limit` off on either side, either of two tokens nearer than twice that counts. Later
    tokens follow from another text and are not compared.
    """
    first = len(due.logits) - len(due.tokens)  # the place whose logits choose the first token
    for place, (mine, theirs) in enumerate(zip(tokens, due.tokens, strict=True)):
        if mine != theirs:
            logits = due.logits[first + place]
            if not logits[theirs] - logits[mine] <= 2 * limit:
                raise BatonError(f"{what} writes {tokens} instead of {due.tokens}; it does not count.")
            return place
    return len(due.tokens)


def require_weights(what: str, found: dict[str, str], expected: dict[str, str]) -> None:
    if found != expected:
        wrong = sorted(key for key in {*found, *expected} if found.get(key) != expected.get(key))
        raise BatonError(f"{what} does not hold the trained weights in {', '.join(wrong[:5])}; it does not count.")


def check_llama_cpp(
    name: str, reading: Reading, reference: Reference, texts: list[list[int]], *, exact: bool
) -> LlamaCpp | None:
    """Compares llama.cpp's tokens, None where its binding is not installed.

    It rounds activations to the type of the weights. So its tokens must be the same with float32 weights alone
    (`exact`), up to a choice between two as good as equal; its tokens of texts must always be.
    """
    found = reading.notes.get("llama_cpp")
    if found is None:
        return None
    if found["texts"] != texts:
        raise BatonError(f"llama.cpp splits texts into other tokens by {name} than the tokenizer does.")
    shared = shared_tokens(found["tokens"], [answer.tokens for answer in reference.answers])
    if exact:
        for tokens, due in zip(found["tokens"], reference.answers, strict=True):
            require_tokens(f"llama.cpp with {name}", tokens, due, TOLERANCE * float(abs(due.logits).max()))
    return LlamaCpp(version=found["version"], tokens=shared)


def shared_tokens(some: list[list[int]], others: list[list[int]]) -> int:
    """Returns how many tokens two lists of continuations share before they part."""
    pairs = [zip(one, other, strict=True) for one, other in zip(some, others, strict=True)]
    return sum(1 for each in pairs for _ in takewhile(lambda pair: pair[0] == pair[1], each))


Request = dict[str, Any]
Answers = tuple[list[ModelAnswer], dict[str, Any]]  # with notes on the export


def answer_request(export_format: str, folder: str, scratch: str) -> None:
    """Asks the export by `request.json` in the scratch folder, and writes answers and notes there."""
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
        import xllamacpp
    except ImportError:
        return None
    settings = xllamacpp.CommonParams()
    settings.model.path = path
    settings.n_ctx = max(64, max(map(len, inputs.prompts)) + inputs.num_tokens + 1)
    settings.n_parallel, settings.verbosity, settings.warmup = 1, 0, False
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = num_threads
    server = xllamacpp.Server(settings)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def ask(place: str, **body: object) -> Any:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{server.listening_address}{place}", json.dumps(body).encode(), headers)
        with opener.open(request) as response:
            return json.load(response)

    texts = [ask("/tokenize", content=text, add_special=True, parse_special=True)["tokens"] for text in inputs.texts]
    written = []
    for prompt in inputs.prompts:
        tokens: list[int] = []
        while len(tokens) < inputs.num_tokens:  # one at a time: it stops at the end of a turn, and the check goes on
            answer = ask("/completion", prompt=prompt + tokens, n_predict=1, temperature=0, n_probs=1)
            tokens.append(answer["completion_probabilities"][0]["top_logprobs"][0]["id"])
        written.append(tokens)
    return {"version": xllamacpp.__version__, "texts": texts, "tokens": written}


def _onnx(folder: str, request: Request, inputs: ParityInputs) -> Answers:
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
    answer_request(*sys.argv[1:4])
