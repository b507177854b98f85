"""The check that an export gives what the trained model gives, before it counts.

The trained model is asked in this process, each export in one of its own by the library it is for. What must hold:

- the same tokens, greedily, always;
- the same bits of the logits where the format keeps the arithmetic: safetensors, adapter, MLflow;
- logits no further than `TOLERANCE` from the model's where another engine computes them: ONNX Runtime;
- for GGUF the tensors in the file, byte for byte those that the library's quantizer makes of the trained weights, and
  tokens and logits of a model with just these weights. How far it is from the unquantized model is written down.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from typing import Any

from components.export import answers
from components.export.answers import Answer, Questions
from components.shared.errors import BatonError

TOLERANCE = 1e-3
"""Largest difference between logits of two engines, as a share of the largest logit."""


@dataclass(frozen=True)
class Context:
    """What every check of a run needs.

    Attributes:
        questions: What is asked.
        texts: Texts whose tokens are compared, where a format has a tokenizer of its own.
        kind: Name of the class of Transformers that loads the model.
        trust_remote_code: As in the recipe.
    """

    questions: Questions
    texts: list[str]
    kind: str
    trust_remote_code: bool


@dataclass(frozen=True)
class Reading:
    """What an export said in its own process.

    Attributes:
        answers: One for each prompt; a second round where the format was asked in two ways.
        notes: What the reader had to say about it beside.
    """

    answers: list[Answer]
    notes: dict[str, Any]


def read(export_format: str, folder: str, context: Context, **request: Any) -> Reading:
    """Asks an export in a process of its own, without network.

    Raises:
        BatonError: its library cannot load it.
    """
    import torch

    document = {
        "prompts": context.questions.prompts,
        "num_tokens": context.questions.num_tokens,
        "texts": context.texts,
        "kind": context.kind,
        "trust_remote_code": context.trust_remote_code,
        "threads": torch.get_num_threads(),
        **request,
    }
    with tempfile.TemporaryDirectory(prefix="baton-check-") as scratch:
        with open(f"{scratch}/request.json", "w", encoding="utf-8") as file:
            json.dump(document, file)
        arguments = [export_format, folder, f"{scratch}/request.json", f"{scratch}/answers.npz"]
        done = subprocess.run(
            [sys.executable, "-m", "components.export.reading", *arguments],
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
        with open(f"{scratch}/answers.npz.json", encoding="utf-8") as file:
            return Reading(answers.load(f"{scratch}/answers.npz"), json.load(file))


def compare(export_format: str, reading: Reading, expected: list[Answer], *, bitwise: bool) -> dict[str, Any]:
    """Holds what an export said against what it must say.

    Returns:
        The finding: `library`, number of `tokens` compared, `bitwise`, `max_abs_difference` of logits, and `words`.

    Raises:
        BatonError: tokens differ, or logits do by more than the format allows.
    """
    rounds = len(reading.answers) // len(expected)
    tokens, same, furthest = sum(len(answer.tokens) for answer in expected), True, 0.0
    for said, due in zip(reading.answers, expected * rounds, strict=True):
        if said.tokens != due.tokens:
            raise BatonError(
                f"the {export_format} export does not write what the trained model writes: {said.tokens} instead of "
                f"{due.tokens}; it does not count."
            )
        difference, limit = distance(said, due), TOLERANCE * float(abs(due.logits).max())
        same, furthest = same and difference == 0, max(furthest, difference)
        if (bitwise and difference) or not difference <= limit:  # nor where one of them is no number
            allowed = "the same bits were expected" if bitwise else f"at most {limit:.3g} was expected"
            raise BatonError(
                f"the {export_format} export's logits differ from the trained model's by {difference:.3g}; {allowed}. "
                "It does not count."
            )
    what = f"{tokens} of {tokens} tokens the same" if tokens else "scores compared"
    bits = "logits the same bit for bit" if same else f"logits differ by {furthest:.2g} at most"
    return {
        "library": reading.notes["library"],
        "tokens": tokens,
        "bitwise": same,
        "max_abs_difference": furthest,
        "words": f"{reading.notes['library']}: {what}, {bits}",
    }


def require_tensors(name: str, reading: Reading, expected: dict[str, str]) -> None:
    """Holds the tensors that were read from a GGUF file against what the quantizer made, by SHA-256.

    Raises:
        BatonError: one is missing, is there beside them, or differs.
    """
    found = reading.notes["tensors"]
    if found != expected:
        wrong = sorted(key for key in {*found, *expected} if found.get(key) != expected.get(key))
        raise BatonError(f"{name} does not hold the quantized weights in {', '.join(wrong[:5])}; it does not count.")


def of_llama_cpp(
    name: str, reading: Reading, expected: list[Answer], texts: list[list[int]], *, exact: bool
) -> dict[str, Any]:
    """Holds what llama.cpp said, where its binding is installed, against what it must say.

    It rounds activations to the type of the weights, so that only with weights in float32 must the tokens be the same;
    those that a text is split into must always be.

    Args:
        name: Of the file.
        reading: With the notes of the reader.
        expected: What the model says with the file's weights.
        texts: Token ids of the check's texts.
        exact: Whether tokens must be the same.

    Returns:
        `llama_cpp`, with its `version` and the number of `tokens` shared; nothing where it is not installed.

    Raises:
        BatonError: it reads the vocabulary in another way, or writes other tokens where it must not.
    """
    said = reading.notes.get("llama_cpp")
    if said is None:
        return {}
    if said["texts"] != texts:
        raise BatonError(f"llama.cpp splits texts into other tokens by {name} than the tokenizer does.")
    due = [answer.tokens for answer in expected]
    shared = agreement(said["tokens"], due)
    if exact and said["tokens"] != due:
        raise BatonError(f"llama.cpp writes {said['tokens']} with {name} instead of {due}; it does not count.")
    return {"llama_cpp": {"version": said["version"], "tokens": shared}}


def distance(one: Answer, other: Answer) -> float:
    """Returns the largest difference between two answers' logits; infinite between different shapes."""
    if one.logits.shape != other.logits.shape:
        return float("inf")
    return float(abs(one.logits - other.logits).max())


def agreement(said: list[list[int]], trained: list[list[int]]) -> int:
    """Returns how many tokens two lists of continuations share before they part."""
    count = 0
    for one, other in zip(said, trained, strict=True):
        for mine, theirs in zip(one, other, strict=True):
            if mine != theirs:
                break
            count += 1
    return count
