"""How much a completion, taken as thinking, raises the likelihood of what follows over not thinking.

After RLP (Hatamizadeh et al., "Reinforcement as a Pretraining Objective", arXiv:2510.01265), equation 3:
`r = log p(x | context, thought) - log p(x | context)`, in nats per token of `x`, the row's `answer`. Both terms are of
the model as it is now; the paper's baseline is a moving average of it.
"""

from __future__ import annotations

from typing import Any

import torch


class InformationGain:
    """The reward function.

    Args:
        scale: Factor.
        clip: Largest reward either way, before the factor; none when 0.
    """

    __name__ = "information_gain"

    def __init__(self, scale: float = 1.0, clip: float = 0.0) -> None:
        self.scale = scale
        self.clip = clip
        self._trainer: Any = None

    def bind(self, trainer: Any) -> None:
        """Takes the trainer whose model judges."""
        self._trainer = trainer

    def __call__(
        self,
        prompts: list[Any],
        completion_ids: list[list[int]],
        answer: list[str],
        prompt_messages: list[Any] | None = None,
        **columns: Any,
    ) -> list[float]:
        """Returns the gain of each completion."""
        tokenizer = self._trainer.processing_class
        gains = []
        declared = columns.get("tools") or [None] * len(prompts)
        asked = prompt_messages or prompts
        for prompt, tools, thought, truth in zip(asked, declared, completion_ids, answer, strict=True):
            head = self._prompt_ids(prompt, tools)
            tail = tokenizer(truth, add_special_tokens=False)["input_ids"]
            end = tokenizer.eos_token_id
            thought = thought[:-1] if thought and thought[-1] == end else thought
            gain = self._log_likelihood(head + thought, tail) - self._log_likelihood(head, tail)
            gains.append(self.scale * (max(-self.clip, min(self.clip, gain)) if self.clip else gain))
        return gains

    def _prompt_ids(self, prompt: Any, tools: list[Any] | None) -> list[int]:
        tokenizer = self._trainer.processing_class
        if isinstance(prompt, str):
            return list(tokenizer(prompt)["input_ids"])
        rendered = tokenizer.apply_chat_template(
            prompt, tools, tokenize=True, return_dict=True, add_generation_prompt=True
        )
        return list(rendered["input_ids"])

    def _log_likelihood(self, context: list[int], tail: list[int]) -> float:
        """Returns the mean log-probability of `tail` after `context`, in nats per token."""
        if not tail or not context:
            return 0.0
        model = self._trainer.model
        was_training = model.training
        model.eval()
        try:
            with torch.no_grad():
                ids = torch.tensor([context + tail], device=model.device)
                logits = model(input_ids=ids).logits[0, len(context) - 1 : -1].float()
                log_likelihoods = torch.log_softmax(logits, -1).gather(-1, ids[0, len(context) :, None])
                return float(log_likelihoods.mean())
        finally:
            model.train(was_training)


def make(scale: float = 1.0, clip: float = 0.0) -> InformationGain:
    """Returns the function; see `InformationGain`."""
    return InformationGain(scale, clip)
