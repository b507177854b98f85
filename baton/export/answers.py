"""A model's answers to a few token sequences: digests of weights, tokens written greedily, logits."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class ParityInputs:
    """Prompts, as tokens, and how many tokens to write after each.

    Attributes:
        prompts: Token ids of each prompt.
        num_tokens: Tokens to write; 0 for a model that scores.
        followed: For each prompt the tokens along which logits are taken; those that the model itself writes if None.
    """

    prompts: list[list[int]]
    num_tokens: int
    followed: list[list[int]] | None = None

    def continuation(self, number: int, written: list[int]) -> list[int]:
        """Returns the tokens along which the logits of a prompt are taken."""
        return written if self.followed is None else self.followed[number]


@dataclass(frozen=True)
class Answer:
    """A model's tokens and logits for one prompt.

    Attributes:
        tokens: Ids of what it writes.
        logits: In float32, which holds every smaller type exactly, of shape (tokens, vocabulary) at each place from
            the prompt's first to the last but one of its continuation; (1, labels) of a model that scores.
    """

    tokens: list[int]
    logits: np.ndarray[Any, Any]


@dataclass(frozen=True)
class Expected:
    """Weights' digests and answers of the model that an export is compared with.

    Attributes:
        answers: One for each prompt.
        weights: Digest of each weight, by name.
        rounding: How far logits of the same weights may lie apart, as a share of the largest.
    """

    answers: list[Answer]
    weights: dict[str, str]
    rounding: float


def expected(model: Any, questions: ParityInputs) -> Expected:
    """Asks a model that exports are compared with."""
    length = max(map(len, questions.prompts)) + questions.num_tokens
    return Expected(of_model(model, questions), weights(model), rounding(model, length))


def weights(model: Any) -> dict[str, str]:
    """Returns the digest of each weight by type, shape and values, however it lies in memory."""
    from baton.checkpoint.digest import tree_digest

    return {name: tree_digest(value) for name, value in model.state_dict().items()}


ROUNDINGS = 16
"""Results that one block rounds to the model's type on the way to a logit: 2 norms of 3, 5 projections with rotation,
scores, softmax and values, activation and product, 2 residuals."""


def rounding(model: Any, length: int) -> float:
    """Returns how far two computations of the same weights may lie apart, as a share of the largest logit.

    Equal operands give equal results in one kernel alone: another layout in memory, alignment, batch shape or processor
    sums in another order. A rounding is off by at most u = ε/2 of its value, and n independent ones grow as √n, not n
    (Higham and Mary, A New Approach to Probabilistic Rounding Error Analysis, SIAM J. Sci. Comput. 41, 2019). Each of
    the two computations is given 2·u·√n. n counts what a type rounds: results in 16 bits, whose sums are in float32;
    in float32 each addition of the dot products. Measured against float64 on all architectures that GGUF takes and on
    24 blocks, errors were 0.1 to 1.2 u·√n in float32, 0.1 to 3.3 in bfloat16 and float16, where weights are ten times
    as large as models begin with; other layouts and batches lay at most 0.7 apart.
    """
    import torch

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


def of_model(model: Any, questions: ParityInputs) -> list[Answer]:
    """Asks a Transformers model, or one of PEFT around it; its own settings for writing stay what they are."""
    model.eval()
    if not questions.num_tokens:
        return [Answer([], _logits(model, prompt)) for prompt in questions.prompts]
    from transformers import GenerationConfig

    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    kept = inner.generation_config
    model.generation_config = GenerationConfig()  # no end, no penalty, nothing that a base may bring along
    written = [_written(model, prompt, questions.num_tokens) for prompt in questions.prompts]
    model.generation_config = inner.generation_config = kept
    paths = [prompt + questions.continuation(at, written[at])[:-1] for at, prompt in enumerate(questions.prompts)]
    return [Answer(tokens, _logits(model, path)[0]) for tokens, path in zip(written, paths, strict=True)]


def _written(model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    import torch

    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False
        )
    written: list[int] = out[0, len(prompt) :].tolist()
    return written


def _logits(model: Any, ids: list[int]) -> np.ndarray[Any, Any]:
    import torch

    with torch.inference_mode():
        logits: np.ndarray[Any, Any] = model(input_ids=torch.tensor([ids])).logits.float().numpy()
    return logits


def save(answers: list[Answer], path: str) -> None:
    """Writes answers as a NumPy archive."""
    import numpy as np

    arrays: dict[str, Any] = {}
    for number, answer in enumerate(answers):
        arrays[f"tokens-{number}"] = np.array(answer.tokens, dtype=np.int64)
        arrays[f"logits-{number}"] = answer.logits
    np.savez(path, **arrays)


def load(path: str) -> list[Answer]:
    """Reads answers back, in the order of the prompts."""
    import numpy as np

    with np.load(path, allow_pickle=False) as arrays:
        return [
            Answer(arrays[f"tokens-{number}"].tolist(), arrays[f"logits-{number}"])
            for number in range(len(arrays.files) // 2)
        ]
