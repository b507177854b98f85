"""Writing text with a causal language model, greedily: the same model writes the same text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from components.shared import models

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Judged:
    """A model with its tokenizer, for reward functions that look at what wrote a completion."""

    model: PreTrainedModel
    processing_class: PreTrainedTokenizerBase


def write(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    *,
    max_new_tokens: int,
    max_length: int,
) -> str:
    """Returns what the model writes after a prompt, without the prompt.

    Args:
        model: A causal language model, in evaluation mode.
        tokenizer: Its tokenizer.
        prompt: Text to continue; cut at `max_length` tokens.
        max_new_tokens: Longest continuation in tokens.
        max_length: Longest prompt in tokens.
    """
    import torch

    given = tokenizer(prompt or str(tokenizer.eos_token), return_tensors="pt", truncation=True, max_length=max_length)
    tensors = {name: given[name].to(model.device) for name in ("input_ids", "attention_mask")}
    with torch.inference_mode():
        out = model.generate(
            **tensors,
            max_new_tokens=max_new_tokens,
            do_sample=False,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    return str(tokenizer.decode(out[0, tensors["input_ids"].shape[1] :], skip_special_tokens=True))


def rendered(prompt: Any, tokenizer: PreTrainedTokenizerBase) -> str:
    """Returns a prompt as text: messages as the chat template writes them, up to where the assistant begins."""
    if isinstance(prompt, str):
        return prompt
    return str(tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True))


def load(model_uri: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Loads an exported model, a checkpoint or a hub model; an adapter is put on its base.

    Raises:
        UserError: there is no such model.
    """
    import json
    import os

    import transformers

    transformers.utils.logging.disable_progress_bar()
    folder = models.local_model(model_uri)
    tokenizer = models.load_tokenizer(folder)
    if os.path.isfile(f"{folder}/config.json"):
        return models.load_model(folder).eval(), tokenizer
    from peft import PeftModel

    with open(f"{folder}/adapter_config.json", encoding="utf-8") as file:
        base = json.load(file)["base_model_name_or_path"]
    return PeftModel.from_pretrained(models.load_model(models.local_model(base)), folder).eval(), tokenizer
