"""Starter recipes: the method that suits the rows, values with their reasons, and the file."""

from __future__ import annotations

import math
import os
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from baton.errors import UserError
from baton.recipe import yaml_text
from baton.recipe.methods import SPECS
from baton.runs.documents import Fit, Survey

# --- The method that suits rows, and where the field begins with it: batch size, learning rate, epochs, lengths.


SCRATCH = "scratch"
"""Instead of a model: one that is built from its configuration."""
IN_TURN = ("dpo", "kto", "sft", "pretrain", "grpo")
"""Methods in the order in which rows are held against them: who asks for most first."""
ENOUGH = 0.5
"""Share of the rows that a method has to be able to use to be chosen."""
CHARACTERS = 3
"""Characters of a token, where they are not counted; most texts have more."""
LENGTHS = (128, 256, 512, 1024, 2048, 4096)
FEW, MANY = 100, 20_000
"""Rows of which a number is held out, not a share; and rows of which one pass is enough."""
STEPS = 8
"""Steps of a pass, at least, where batches are made smaller for them."""
CHUNK_STEPS, MAX_CHUNKS, UNKNOWN_CHUNKS = 50, 8, 4
"""Steps of a chunk at least; chunks at most, and where steps are not known."""

BATCH = {"pretrain": 32, "grpo": 32, "rloo": 32}
"""Method → rows of a step, or completions; 16 with the others."""
WRITE = ("grpo", "rloo")
"""Methods of which `training.batch_size` counts completions."""
GENERATIONS = 8
RATES = {
    "sft": (2e-5, 2e-4),
    "pretrain": (2e-5, 1e-4),
    "reward": (1e-5, 1e-4),
    "dpo": (5e-7, 5e-6),
    "kto": (5e-7, 5e-6),
    "orpo": (8e-6, 8e-5),
    "cpo": (1e-6, 1e-5),
    "grpo": (1e-6, 1e-5),
    "rloo": (1e-6, 1e-5),
    "distillation": (1e-5, 1e-4),
}
"""Method → learning rate for all weights, and for LoRA."""
FROM_SCRATCH = 1e-3


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a starter recipe says.

    Attributes:
        method: Training method.
        fit: What the rows are to it.
        model: Hub id, folder or URI, or `scratch`.
        adapter: Whether LoRA is trained instead of all weights.
        teacher: Of distillation, the teacher.
        held_out: As `data.split.eval`.
        max_length: As `data.max_length`.
        length_reason: Why so long.
        batch_size: As `training.batch_size`.
        micro_batch_size: As `training.micro_batch_size`.
        epochs: As `training.epochs`.
        learning_rate: As `training.learning_rate`.
        steps: About how many steps that makes; None where the rows were not counted.
        chunks: As `chunks.count`.
    """

    method: str
    fit: Fit
    model: str
    adapter: bool
    teacher: str | None
    held_out: float
    max_length: int
    length_reason: str
    batch_size: int
    micro_batch_size: int
    epochs: int
    learning_rate: float
    steps: int | None
    chunks: int


def method_for(survey: Survey, source: str) -> str:
    """Returns the method that suits rows best.

    Args:
        survey: The rows.
        source: What they are called in messages.

    Raises:
        UserError: no method learns from them, or none without something that only a person knows.
    """
    for method in IN_TURN:
        fit = survey.of(method)
        is_plain = method == "sft" and fit.format == "text"
        if _is_enough(fit, survey) and not is_plain and (method != "grpo" or fit.answers >= ENOUGH * fit.usable):
            return method
    if fitting := usable_by(survey):
        raise UserError(
            f"{source} holds prompts without answers, and what is to be learned from them is not in the rows.",
            remedy=f"Name the method, one of {', '.join(fitting)}: grpo and rloo take rewards, distillation --teacher.",
        )
    nearest = max(survey.fits, key=lambda fit: (fit.usable, bool(fit.format)))
    raise UserError(
        f"{source}: no training method learns from its rows ({_named_columns(survey)}): {nearest.reason}",
        remedy="docs/rows.md shows the shapes of rows; `data.columns` in a recipe maps columns of other names.",
    )


def require_fit(survey: Survey, method: str, source: str) -> Fit:
    """Returns what rows are to a method.

    Raises:
        UserError: there is no such method, or it does not learn from them; the message says what it would need, and
            which methods do.
    """
    if method not in SPECS:
        raise UserError(f"method {method!r} is unknown; expected one of {', '.join(SPECS)}.")
    fit = survey.of(method)
    if fit.usable:
        return fit
    needs = " or ".join(NEEDS[name] for name in SPECS[method].formats if name in NEEDS)
    others = usable_by(survey)
    would = f"{', '.join(others)} would do: --method {others[0]}." if others else "docs/rows.md shows what does."
    why = f" {fit.reason[0].upper()}{fit.reason[1:]}." if fit.format and fit.reason else ""
    raise UserError(
        f"{method} does not learn from {source}, whose rows have {_named_columns(survey)}: it needs {needs}.{why}",
        remedy=would,
    )


NEEDS = {
    "text": "text",
    "prompt-completion": "a prompt and a completion",
    "messages": "messages",
    "preference": "chosen and rejected",
    "rated": "prompt, completion and label",
    "prompt": "a prompt",
}
"""Format → what its rows have, in words; the others are ways to write these."""


def usable_by(survey: Survey) -> list[str]:
    """Returns the methods that can use at least half of the rows, the likeliest first."""
    fits = [fit for fit in survey.fits if _is_enough(fit, survey)]
    found = [method for fit in fits for method in fit.methods]
    return sorted(found, key=lambda name: IN_TURN.index(name) if name in IN_TURN else len(IN_TURN))


def plan(
    survey: Survey, method: str, model: str, *, full: bool, teacher: str | None, lengths: list[int], source: str
) -> Plan:
    """Returns what a starter recipe says.

    Args:
        survey: The rows.
        method: Training method, which learns from them.
        model: Hub id, folder or URI, or `scratch`.
        full: Whether all weights are to be trained.
        teacher: Of distillation, the teacher.
        lengths: Tokens of the rows that were measured, ascending; none where there is no tokenizer here.
        source: What the rows are called in messages.

    Raises:
        UserError: see `require_fit`.
    """
    fit = require_fit(survey, method, source)
    held_out = _held_out(survey)
    per_row, least = (GENERATIONS, GENERATIONS) if method in WRITE else (1, 4 if method == "kto" else 1)
    train, batch = None, BATCH.get(method, 16)
    if survey.rows is not None:
        train = max(1, survey.rows - int(held_out if held_out >= 1 else held_out * survey.rows))
        while batch > least and batch * STEPS > train * per_row:
            batch //= 2
    epochs = 3 if method == "sft" and (train is None or train < MANY) else 1
    steps = None if train is None else max(1, math.ceil(train * per_row * epochs / batch))
    max_length, reason = _length(fit, lengths, model, is_packed=method == "pretrain")
    adapter, is_new = not full and model != SCRATCH, model == SCRATCH and method in ("sft", "pretrain")
    return Plan(
        method=method,
        fit=fit,
        model=model,
        adapter=adapter,
        teacher=teacher,
        held_out=held_out,
        max_length=max_length,
        length_reason=reason,
        batch_size=batch,
        micro_batch_size=min(batch, 8 if method in WRITE else 4),
        epochs=epochs,
        learning_rate=FROM_SCRATCH if is_new else RATES[method][adapter],
        steps=steps,
        chunks=UNKNOWN_CHUNKS if steps is None else max(1, min(MAX_CHUNKS, steps // CHUNK_STEPS)),
    )


def _held_out(survey: Survey) -> float:
    """Returns `data.split.eval`: a share, of few rows a number, as a share of these might come to none."""
    if survey.rows is not None and survey.rows < FEW:
        return float(max(2, survey.rows // 10))
    return 0.05 if survey.rows is None or survey.rows >= MANY // 10 else 0.1


def _length(fit: Fit, lengths: list[int], model: str, *, is_packed: bool) -> tuple[int, str]:
    """Returns `data.max_length`, and why."""
    if lengths:
        most, longest = lengths[int(0.99 * (len(lengths) - 1))], lengths[-1]
        chosen = next((length for length in LENGTHS if length >= most), LENGTHS[-1])
        if is_packed:
            chosen = max(chosen, 256 if model == SCRATCH else 1024)
        over = sum(length > chosen for length in lengths)
        cut = f"{over} of them would be cut" if over else "none is cut"
        half = lengths[len(lengths) // 2]
        return chosen, f"In tokens: of {len(lengths)} rows half have up to {half}, the longest has {longest}; {cut}."
    guess = (fit.characters[1] if fit.characters else 1500) / CHARACTERS
    chosen = next((length for length in LENGTHS if length >= guess), LENGTHS[-1])
    return chosen, (
        f"Tokens were not looked at, as the tokenizer of {model} is not on this machine: a guess by the characters of "
        "the rows, three to a token. `baton data check` counts them."
    )


def _is_enough(fit: Fit, survey: Survey) -> bool:
    return fit.usable > 0 and fit.usable >= ENOUGH * survey.looked_at


def _named_columns(survey: Survey) -> str:
    return f"columns {', '.join(survey.columns)}" if survey.columns else "no columns"


# --- The file of a starter recipe: values with the reasons for them, each section with where it is described.


DOCS = "docs/recipe.md"
WIDTH = 100
NUMBERS = 0.8
"""Share of answers that end in a number from which that is what is rewarded."""
WHY_RATE = {
    "sft": ("usual for all weights", "usual for LoRA, ten times that of all weights"),
    "pretrain": ("usual for going on from a trained model", "usual for LoRA"),
    "reward": ("usual for a reward model", "usual for a reward model with LoRA"),
    "dpo": ("DPO takes small ones, 5e-7 to 5e-6", "DPO takes small ones, with LoRA too"),
    "kto": ("KTO's authors advise 5e-7 to 5e-6", "KTO's authors advise 5e-7 to 5e-6; LoRA takes the upper end"),
    "orpo": ("that of the ORPO paper", "ten times that of the ORPO paper, for LoRA"),
    "cpo": ("usual for CPO", "usual for CPO with LoRA"),
    "grpo": ("usual for rewards", "usual for rewards with LoRA"),
    "rloo": ("usual for rewards", "usual for rewards with LoRA"),
    "distillation": ("usual for all weights", "usual for LoRA"),
}


def to_yaml(plan: Plan, survey: Survey, *, name: str, model: str, sources: Sequence[str]) -> str:
    """Returns a recipe's file.

    Args:
        plan: What it says.
        survey: The rows.
        name: Name of the recipe.
        model: As `model.base`, as the recipe is to name it; not for `scratch`.
        sources: As `data.source`, as the recipe is to name them.
    """
    begins = "a model from scratch" if plan.model == SCRATCH else model
    lines = [
        f"# {plan.method} of {begins} on {', '.join(os.path.basename(source) for source in sources)}.",
        f"# Written by `baton init`, which has looked at {survey.looked_at:,} rows; all settings are in {DOCS}.",
        f"name: {name}",
        f"store: baton-store  # runs and data; a bucket, such as s3://bucket, for a cluster: {DOCS}#store",
        *_model(plan, model),
        *_data(plan, survey, sources),
        *_training(plan),
        *_rest(plan),
    ]
    return "\n".join(lines) + "\n"


def yaml_value(given: object) -> str:
    """Returns a value as YAML on one line."""
    return yaml_text.dump(given, default_flow_style=True, allow_unicode=True, width=10**6).strip().removesuffix("\n...")


def _note(text: str, indent: str = "") -> Iterator[str]:
    """Yields a comment, in lines as wide as people write them."""
    mark = f"{indent}# "
    yield from textwrap.wrap(
        text, WIDTH, initial_indent=mark, subsequent_indent=mark, break_long_words=False, break_on_hyphens=False
    )


def _model(plan: Plan, model: str) -> Iterator[str]:
    yield ""
    if plan.model == SCRATCH:
        yield from _note(f"A small model and its tokenizer, both learned from these rows: {DOCS}#modelfrom_scratch")
        yield "model:"
        yield "  from_scratch: {architecture: llama, hidden_size: 256, num_hidden_layers: 4, num_attention_heads: 4}"
        yield "  tokenizer: {train: {vocab_size: 4096}}"
        return
    yield from _note(f"What training starts from: {DOCS}#model")
    yield f"model: {{base: {yaml_value(model)}}}"
    yield ""
    if plan.adapter:
        yield from _note(
            "LoRA: a percent or so of the weights is trained, so that one GPU does and checkpoints are small. Rank 16 "
            "on all linear layers is where most begin. Without it all weights are trained, at a learning rate ten "
            f"times lower: {DOCS}#adapter"
        )
        yield "adapter: {type: lora, r: 16, alpha: 32, target_modules: all-linear}"
    else:
        yield from _note(f"All weights are trained. For an adapter: adapter: {{type: lora, r: 16}}, {DOCS}#adapter")


def _data(plan: Plan, survey: Survey, sources: Sequence[str]) -> Iterator[str]:
    fit, unusable = plan.fit, survey.looked_at - plan.fit.usable
    named = ", ".join(f"{ours} is {_columns(theirs)}" for ours, theirs in fit.columns.items())
    count = f"{survey.rows:,} rows" if survey.rows is not None else "Rows"
    yield ""
    yield from _note(f"{count} of {fit.format}{f' ({named})' if named else ''}, found by looking: {DOCS}#data")
    if unusable:
        why = " ".join(fit.reason.split())[:80] or "they cannot be read"
        yield from _note(
            f"{unusable} of the first {survey.looked_at:,} cannot be used: {why}. `baton data check` has all."
        )
    yield "data:"
    yield f"  source: {yaml_value(list(sources) if len(sources) > 1 else sources[0])}"
    yield from _note(plan.length_reason, "  ")
    yield f"  max_length: {plan.max_length}"
    if plan.method == "pretrain":
        yield "  packing: true  # rows are joined and cut, so that no step is spent on padding"
    yield f"  split: {{eval: {plan.held_out:g}}}  # by content: a row never changes sides as the data grows"
    if unusable:
        yield "  max_rejected: 0.5  # share of unusable rows that a run may have; they are kept with their reasons"


def _training(plan: Plan) -> Iterator[str]:
    yield ""
    yield from _note(f"How it learns: {DOCS}#training")
    yield "training:"
    yield f"  method: {plan.method}"
    yield from _method(plan)
    about = "" if plan.steps is None else f": about {plan.steps:,} steps"
    yield f"  epochs: {plan.epochs}  # passes over the rows{about}"
    unit = "completions" if plan.method in WRITE else "rows"
    yield f"  batch_size: {plan.batch_size}  # {unit} per optimizer step: what is learned depends on it"
    yield f"  micro_batch_size: {plan.micro_batch_size}  # {unit} per forward pass: lower it where memory is short"
    why = "usual for small models from scratch" if plan.model == SCRATCH else WHY_RATE[plan.method][plan.adapter]
    yield f"  learning_rate: {_rate(plan.learning_rate)}  # {why}"
    yield "  lr_scheduler: cosine"
    yield f"  warmup_steps: {0.03 if plan.method in ('sft', 'pretrain') else 0.1}  # below 1 a share of all steps"


def _method(plan: Plan) -> Iterator[str]:
    """Yields the method's own section, where it needs one."""
    fit = plan.fit
    if plan.method in WRITE:
        yield f"  {plan.method}:  # {DOCS}#training{plan.method}"
        yield f"    rewards: {_rewards(plan)}"
        yield f"    num_generations: {GENERATIONS}  # completions per prompt, compared with each other"
        if plan.model == SCRATCH:
            yield "    beta: 0.0  # a model from scratch has no reference to be held to"
    elif plan.method == "distillation":
        yield f"  distillation: {{teacher: {yaml_value(plan.teacher)}}}  # {DOCS}#trainingdistillation"
    elif plan.method == "kto" and 0 < fit.good < fit.usable:
        bad = fit.usable - fit.good
        if not 1 <= fit.good / bad <= 4 / 3:
            fewer, weight = ("undesirable", fit.good / bad) if fit.good > bad else ("desirable", bad / fit.good)
            told = f"{fit.good:,} good answers and {bad:,} bad ones: weighted, both sides count alike"
            yield from _note(f"{told} ({DOCS}#trainingkto)", "  ")
            yield f"  kto: {{{fewer}_weight: {weight:.2f}}}"


def _rewards(plan: Plan) -> str:
    if not plan.fit.answers:
        return "[length]  # a placeholder, as rows have no answer: put here what judges a completion, module:function"
    if plan.fit.numbers >= NUMBERS * plan.fit.answers:
        return "[numeric]  # the right final number, as the answers end in one"
    return "[exact]  # the answer itself"


def _rest(plan: Plan) -> Iterator[str]:
    yield ""
    each = "" if plan.steps is None else f", here of some {max(1, plan.steps // plan.chunks):,} steps"
    yield from _note(
        f"Each chunk is a process, or a pod, of its own{each}: it restores what the one before has left. The result is "
        f"the same for any number of them. A lost pod costs the time since the last checkpoint: {DOCS}#chunks"
    )
    yield f"chunks: {{count: {plan.chunks}, checkpoint_every: 5m}}"
    yield ""
    yield from _note(
        f"Judged on what is held out, beside the model before training; a gate could reject it: {DOCS}#evaluation"
    )
    yield "evaluation: {per_epoch: 1, samples: 8}"
    yield ""
    yield from _note(
        "Precision, memory and GPU as the machine that runs it has them; for a cluster name one: cpu, cuda-small or "
        f"cuda-large. {DOCS}#resources"
    )
    yield "resources: {profile: auto}"


def _columns(theirs: str | list[str]) -> str:
    return theirs if isinstance(theirs, str) else " and ".join(theirs)


def _rate(rate: float) -> str:
    digits, _, power = f"{rate:e}".partition("e")
    return f"{float(digits):.1f}e{int(power)}"
