"""The check that an export gives what the trained model gives, before it counts.

The trained model is asked in this process, each export in one of its own by the library it is for. What must hold:

- the same weights, bit for bit, wherever the format holds them as they are: safetensors, adapter, MLflow;
- for GGUF the tensors in the file, byte for byte those that the library's quantizer makes of the trained weights, and
  a model that loads with just these weights. How far it is from the unquantized model is written down;
- logits along the trained model's own tokens that lie no further from its than rounding explains, or than `TOLERANCE`
  where another engine computes them. Not the same bits: equal weights that lie otherwise in memory, as in a transposed
  layer, are summed in another order on some processors;
- the tokens that the trained model writes greedily, up to a choice between two that are as good as equal.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from baton.errors import BatonError
from baton.export import answers
from baton.export.answers import Answer, Expected, ParityInputs
from baton.runs.outcomes import ExportCheck, LlamaCpp
from baton.scratch import scratch_folder

TOLERANCE = 1e-3
"""Largest difference between logits of two engines, as a share of the largest logit."""


@dataclass(frozen=True)
class Context:
    """Questions and settings that all checks of a run share.

    Attributes:
        questions: What is asked.
        texts: Texts whose tokens are compared, where a format has its own tokenizer.
        kind: Name of the class of Transformers that loads the model.
        trust_remote_code: As in the recipe.
    """

    questions: ParityInputs
    texts: list[str]
    kind: str
    trust_remote_code: bool


@dataclass(frozen=True)
class Reading:
    """An export's answers from its own process.

    Attributes:
        answers: One for each prompt; a second round where the format was asked in two ways.
        notes: What the reader had to say about it beside: `library`, and `weights`, their digests by name.
    """

    answers: list[Answer]
    notes: dict[str, Any]


def read(export_format: str, folder: str, context: Context, expected: Expected, **request: Any) -> Reading:
    """Asks an export in its own process, without network, for logits along the tokens that it is to write.

    Raises:
        BatonError: its library cannot load it.
    """
    import torch

    document = {
        "prompts": context.questions.prompts,
        "num_tokens": context.questions.num_tokens,
        "followed": [answer.tokens for answer in expected.answers],
        "texts": context.texts,
        "kind": context.kind,
        "trust_remote_code": context.trust_remote_code,
        "threads": torch.get_num_threads(),
        **request,
    }
    with scratch_folder("check") as scratch:
        with open(f"{scratch}/request.json", "w", encoding="utf-8") as file:
            json.dump(document, file)
        arguments = [export_format, folder, f"{scratch}/request.json", f"{scratch}/answers.npz"]
        done = subprocess.run(
            [sys.executable, "-m", "baton.export.parity_worker", *arguments],
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


def compare(export_format: str, reading: Reading, expected: Expected, share: float) -> ExportCheck:
    """Holds what an export said against what it must say.

    Args:
        export_format: The format.
        reading: What the export said.
        expected: What it must say.
        share: How far its logits may lie from those, as a share of the largest.

    Raises:
        BatonError: logits lie further apart, or tokens differ where no two are as good as equal.
    """
    rounds = len(reading.answers) // len(expected.answers)
    tokens = sum(len(answer.tokens) for answer in expected.answers)
    furthest, shared = 0.0, []
    for actual, due in zip(reading.answers, expected.answers * rounds, strict=True):
        difference, limit = distance(actual, due), share * float(abs(due.logits).max())
        if not difference <= limit:  # nor where one of them is no number
            raise BatonError(
                f"the {export_format} export's logits differ from the trained model's by {difference:.3g}; at most "
                f"{limit:.3g} was expected. It does not count."
            )
        furthest = max(furthest, difference)
        shared.append(require_tokens(f"the {export_format} export", actual.tokens, due, limit))
    same = sum(shared[: len(expected.answers)])
    words = [f"{same} of {tokens} tokens the same" if tokens else "scores compared"]
    if same < tokens:
        words.append("the next one a tie")
    words.append(f"logits differ by {furthest:.2g} at most" if furthest else "logits the same bit for bit")
    if "weights" in reading.notes:
        words.insert(0, "weights the same bit for bit")
    return ExportCheck(
        library=reading.notes["library"],
        tokens=tokens,
        bitwise=furthest == 0,
        max_abs_difference=furthest,
        words=f"{reading.notes['library']}: {', '.join(words)}",
    )


def require_tokens(what: str, tokens: list[int], due: Answer, limit: float) -> int:
    """Holds tokens that were written greedily against those that must be.

    Where logits may be `limit` off on either side, of two tokens nearer to each other than twice that either may be
    written; what comes after it follows from another text and is not compared.

    Returns:
        How many are the same before the first that differs.

    Raises:
        BatonError: one differs, and the model prefers the other by more.
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
    """Holds the weights that were read back against those that must be there, by their digests.

    Raises:
        BatonError: one is missing, is there beside them, or differs.
    """
    if found != expected:
        wrong = sorted(key for key in {*found, *expected} if found.get(key) != expected.get(key))
        raise BatonError(f"{what} does not hold the trained weights in {', '.join(wrong[:5])}; it does not count.")


def of_llama_cpp(
    name: str, reading: Reading, expected: Expected, texts: list[list[int]], *, exact: bool
) -> LlamaCpp | None:
    """Holds what llama.cpp said, where its binding is installed, against what it must say.

    It rounds activations to the type of the weights, so that only with weights in float32 must the tokens be the same,
    up to a choice between two as good as equal; those that a text is split into must always be.

    Args:
        name: Of the file.
        reading: With the notes of the reader.
        expected: What the model says with the file's weights.
        texts: Token ids of the check's texts.
        exact: Whether tokens must be the same.

    Returns:
        Its version and the number of tokens shared; None where it is not installed.

    Raises:
        BatonError: it reads the vocabulary in another way, or writes other tokens where it must not.
    """
    answers = reading.notes.get("llama_cpp")
    if answers is None:
        return None
    if answers["texts"] != texts:
        raise BatonError(f"llama.cpp splits texts into other tokens by {name} than the tokenizer does.")
    shared = agreement(answers["tokens"], [answer.tokens for answer in expected.answers])
    if exact:
        for tokens, due in zip(answers["tokens"], expected.answers, strict=True):
            require_tokens(f"llama.cpp with {name}", tokens, due, TOLERANCE * float(abs(due.logits).max()))
    return LlamaCpp(version=answers["version"], tokens=shared)


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
