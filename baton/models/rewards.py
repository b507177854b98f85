"""Reward functions: the ready ones, and the user's own, each giving one number per completion.

`READY` makes the ready ones from their options; the user's own are found by `module:object`. All are called as TRL
calls them. `prompts` and `completions` are lists of texts or messages, the row's other columns lists of texts. A text
prompt is judged as text, with `data.separator` at its end; `prompt_messages` has the conversation that the model saw.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING, Any

import torch

from baton.errors import UserError
from baton.models import hooks
from baton.models.chat import PROMPT_TEXT
from baton.recipe.methods import RewardFunction

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Reward = Callable[..., list[float | None]]

THINK = r"<think>.*?</think>\s*\S.*"  # thinking between tags, then an answer
# A dash after a letter, digit or bracket is no sign: `10-18` ends on 18.
_NUMBER = re.compile(r"(?:(?<![\w)])-)?\$?\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True)
class JudgedModel:
    """A model with its tokenizer, in the place of a trainer, for functions that ask for one."""

    model: PreTrainedModel
    processing_class: PreTrainedTokenizerBase


def build(functions: list[RewardFunction]) -> list[Reward]:
    """Returns the functions of a recipe, each with the name that its values are logged under."""
    return [_build(function) for function in functions]


def _build(function: RewardFunction) -> Reward:
    name, options = function.use, function.options
    reward: Any
    if name not in READY:
        reward = hooks.find(name)
        reward = functools.partial(reward, **options) if options else reward
        name = name.rpartition(":")[2]
    else:
        try:
            reward = READY[name](**options)
        except TypeError as error:
            raise UserError(f"reward {name!r} does not take these options: {error}.") from None
    if not hasattr(reward, "__name__"):
        reward.__name__ = name
    return reward  # type: ignore[no-any-return]


def bind(functions: list[Any], trainer: Any) -> None:
    """Gives the trainer to the functions that ask for it."""
    for function in functions:
        if hasattr(function, "bind"):
            function.bind(trainer)


def columns(row: dict[str, Any]) -> dict[str, Any]:
    """Returns a row's columns for functions where its prompt was a text and became a conversation."""
    rest = {name: value for name, value in row.items() if name != PROMPT_TEXT}
    return {**rest, "prompt_messages": row["prompt"]}


def text(completion: Any) -> str:
    """Returns a completion as text, given as text or as messages."""
    if isinstance(completion, str):
        return completion
    return "".join(message.get("content") or "" for message in completion)


def exact_reward(right: float = 1.0, wrong: float = 0.0, ignore_case: bool = False) -> Callable[..., list[float]]:
    """Returns a function that gives `right` to a completion that is the answer, white space at its ends aside."""

    def plain(value: str) -> str:
        return value.strip().casefold() if ignore_case else value.strip()

    def exact(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        pairs = zip(completions, answer, strict=True)
        return [right if plain(text(completion)) == plain(truth) else wrong for completion, truth in pairs]

    return exact


def format_reward(pattern: str = THINK, right: float = 1.0, wrong: float = 0.0) -> Callable[..., list[float]]:
    """Returns a function that gives `right` to a completion that wholly matches; a dot is also a line's end."""
    try:
        compiled = re.compile(pattern, re.DOTALL)
    except (re.error, RecursionError, OverflowError) as error:
        raise UserError(f"reward 'format': pattern {pattern!r} is not a regular expression: {error}.") from None

    def format(completions: list[Any], **_: Any) -> list[float]:
        return [right if compiled.fullmatch(text(completion).strip()) else wrong for completion in completions]

    return format


def length_reward(target: int = 100, width: int | None = None) -> Callable[..., list[float]]:
    """Returns a function that gives 1 to a completion of `target` tokens, falling to 0 at the distance `width`."""
    reach = width or target

    def length(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [max(0.0, 1.0 - abs(len(ids) - target) / reach) for ids in completion_ids]

    return length


def numeric_reward(right: float = 1.0, wrong: float = 0.0, mark: str = "####") -> Callable[..., list[float]]:
    """Returns a function that gives `right` to a completion with the answer's `final_number`, as in GSM8K."""

    def numeric(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        pairs = zip(completions, answer, strict=True)
        return [
            right if (value := final_number(text(completion), mark)) is not None and value == final_number(truth, mark)
            else wrong
            for completion, truth in pairs
        ]  # fmt: skip

    return numeric


def final_number(text: str, mark: str = "####") -> Decimal | None:
    """Returns the number a text ends on: the first after the last mark, else the last one."""
    _, separator, tail = text.rpartition(mark)
    numbers = _NUMBER.findall(tail) if separator else _NUMBER.findall(text)
    if not numbers:
        return None
    chosen = numbers[0] if separator else numbers[-1]
    try:
        return Decimal(chosen.replace(",", "").replace("$", "")).normalize()
    except InvalidOperation:
        return None


class InformationGain:
    """The gain in likelihood of the row's answer by a completion, taken as thinking.

    After RLP (Hatamizadeh et al., "Reinforcement as a Pretraining Objective", arXiv:2510.01265), equation 3: `r = log
    p(x | context, thought) - log p(x | context)`, in nats per token of `x`, the row's `answer`. Both terms are of the
    current model; the paper's baseline is a moving average of it. `clip` is the largest reward either way, before the
    factor `scale`; 0 for none.
    """

    __name__ = "information_gain"

    def __init__(self, scale: float = 1.0, clip: float = 0.0) -> None:
        self.scale = scale
        self.clip = clip
        self._trainer: Any = None

    def bind(self, trainer: Any) -> None:
        self._trainer = trainer

    def __call__(
        self,
        prompts: list[Any],
        completion_ids: list[list[int]],
        answer: list[str],
        prompt_messages: list[Any] | None = None,
        **columns: Any,
    ) -> list[float]:
        tokenizer = self._trainer.processing_class
        gains = []
        declared = columns.get("tools") or [None] * len(prompts)
        asked = prompt_messages or prompts
        for prompt, tools, thought, truth in zip(asked, declared, completion_ids, answer, strict=True):
            head = self._prompt_ids(prompt, tools)
            tail = tokenizer(truth, add_special_tokens=False)["input_ids"]
            thought = thought[:-1] if thought and thought[-1] == tokenizer.eos_token_id else thought
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


READY: dict[str, Callable[..., Any]] = {
    "exact": exact_reward,
    "format": format_reward,
    "length": length_reward,
    "numeric": numeric_reward,
    "information_gain": InformationGain,
}
