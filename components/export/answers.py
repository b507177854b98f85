"""What a model says to a few token sequences: the tokens it goes on with, greedily, and its logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class Questions:
    """What models are asked.

    Attributes:
        prompts: Token ids of each prompt.
        num_tokens: Tokens to go on for; 0 for a model that scores.
    """

    prompts: list[list[int]]
    num_tokens: int


@dataclass(frozen=True)
class Answer:
    """What a model says to one prompt.

    Attributes:
        tokens: Ids of what it goes on with.
        logits: In float32, which holds every smaller type exactly, of shape (tokens, vocabulary) at each place from
            the prompt's first to the last but one of what was written; (1, labels) of a model that scores.
    """

    tokens: list[int]
    logits: np.ndarray[Any, Any]


def of_model(model: Any, questions: Questions) -> list[Answer]:
    """Asks a Transformers model, or one of PEFT around it; its own settings for writing stay what they are."""
    model.eval()
    if not questions.num_tokens:
        return [_scored(model, prompt) for prompt in questions.prompts]
    from transformers import GenerationConfig

    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    kept = inner.generation_config
    model.generation_config = GenerationConfig()  # no end, no penalty, nothing that a base may bring along
    found = [_written(model, prompt, questions.num_tokens) for prompt in questions.prompts]
    model.generation_config = inner.generation_config = kept
    return found


def _written(model: Any, prompt: list[int], num_tokens: int) -> Answer:
    import torch

    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False
        )
        logits = model(input_ids=out[:, :-1]).logits[0].float().numpy()
    return Answer(out[0, len(prompt) :].tolist(), logits)


def _scored(model: Any, prompt: list[int]) -> Answer:
    import torch

    with torch.inference_mode():
        return Answer([], model(input_ids=torch.tensor([prompt])).logits.float().numpy())


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
