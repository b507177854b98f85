"""Text written by a causal language model: the same model writes the same text."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from baton.errors import RowError, UserError
from baton.models import chat, loading, user_code

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def write_all(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    *,
    max_new_tokens: int,
    max_length: int,
    batch_size: int = 1,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> list[str]:
    """Returns the model's continuation of each prompt, up to an end of text or of a turn.

    Prompts are cut at `max_length` tokens. Those of like length share a batch, padded on the left. The texts are those
    of single prompts, except where two tokens are within the last bits of each other: kernels of another shape round
    another way. At `temperature` 0 the likeliest token is taken. `seed` and a prompt's place in the list decide its
    draws, whatever batch it is in.
    """
    ids = [prompt_ids(tokenizer, prompt, max_length) for prompt in prompts]
    order = sorted(range(len(ids)), key=lambda number: len(ids[number]))
    stops = stop_ids(model, tokenizer)
    texts = [""] * len(ids)
    for first in range(0, len(order), batch_size):
        numbers = order[first : first + batch_size]
        drawing = _drawing(temperature, top_p, [(seed, number) for number in numbers]) if temperature else None
        continuations = _continue(model, tokenizer, [ids[number] for number in numbers], max_new_tokens, stops, drawing)
        for number, continuation in zip(numbers, continuations, strict=True):
            end = next((at for at, token in enumerate(continuation) if token in stops), len(continuation))
            texts[number] = str(tokenizer.decode(continuation[:end], skip_special_tokens=True))
        progress(first + len(numbers), len(order))
    return texts


def stop_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Returns the tokens that end a text, by tokenizer, the model's own settings, chat template and recipe."""
    own = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    return chat.end_tokens(tokenizer, [tokenizer.eos_token_id, *(own if isinstance(own, list) else [own])])


def prompt_ids(tokenizer: PreTrainedTokenizerBase, prompt: str, max_length: int) -> list[int]:
    """Returns a prompt's tokens; a beginning of text by the chat template is not put in front twice."""
    begun = bool(tokenizer.bos_token) and prompt.startswith(str(tokenizer.bos_token))
    text = prompt or str(tokenizer.eos_token)
    return list(tokenizer(text, truncation=True, max_length=max_length, add_special_tokens=not begun)["input_ids"])


def _continue(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[list[int]],
    max_new_tokens: int,
    stops: list[int],
    drawing: Any,
) -> list[list[int]]:
    import torch

    width = max(len(ids) for ids in prompts)
    filler = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else stops[0]
    padded = [[filler] * (width - len(ids)) + ids for ids in prompts]
    mask = [[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts]
    with torch.inference_mode():
        out = model.generate(
            input_ids=torch.tensor(padded, device=model.device),
            attention_mask=torch.tensor(mask, device=model.device),
            max_new_tokens=max_new_tokens,
            do_sample=False,  # a drawing puts its noise into the scores, and then the highest is taken
            repetition_penalty=1.0,  # with another in a model's own settings, the likeliest token is not taken
            logits_processor=drawing,
            pad_token_id=filler,
            eos_token_id=stops or None,
        )
    continuations: list[list[int]] = out[:, width:].tolist()
    return continuations


def _drawing(temperature: float, top_p: float, seeds: list[tuple[int, int]]) -> Any:
    """Returns processors that turn the choice of the highest score into a draw from the softmax."""
    from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopPLogitsWarper

    from baton.models.rng import GumbelNoise

    steps: list[Any] = [TemperatureLogitsWarper(temperature)] if temperature != 1.0 else []
    steps += [TopPLogitsWarper(top_p)] if top_p < 1.0 else []
    return LogitsProcessorList([*steps, GumbelNoise(seeds)])


def rendered(prompt: Any, tokenizer: PreTrainedTokenizerBase, tools: list[dict[str, Any]] | None = None) -> str:
    """Returns a prompt as text: messages and tools as the chat template writes them, up to the answer."""
    if isinstance(prompt, str):
        return prompt
    (made,) = chat.ChatTemplate(tokenizer).render_each([chat.Conversation(prompt, tools)], prompts=True)
    if isinstance(made, RowError):
        raise UserError(f"{str(made)[:300]}.", remedy="Fix the row, or set model.chat_template to one that does.")
    return made.text


def load(model_uri: str, *, trust_remote_code: bool = False) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Loads an exported model, a checkpoint or a hub model, ready to write, an adapter on its base."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    folder = loading.local_model(model_uri)
    with user_code.asking_for_trust(model_uri):
        tokenizer = loading.load_tokenizer(folder, trust_remote_code=trust_remote_code)
        if os.path.isfile(f"{folder}/config.json"):
            return loading.load_model(folder, trust_remote_code=trust_remote_code).eval(), tokenizer
        with open(f"{folder}/adapter_config.json", encoding="utf-8") as file:
            base = json.load(file)["base_model_name_or_path"]
        whole = loading.load_model(loading.local_model(base), trust_remote_code=trust_remote_code)
        return loading.adapted(whole, folder, tokenizer).eval(), tokenizer
