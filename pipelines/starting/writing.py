"""The file of a starter recipe: values with the reasons for them, each section with where it is described."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterator, Sequence

from baton.components.shared.recipe.mistakes import yaml_text
from baton.components.shared.runs.documents.survey import Survey
from baton.pipelines.starting.choosing import GENERATIONS, SCRATCH, WRITE, Plan

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


def value(given: object) -> str:
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
    yield f"model: {{base: {value(model)}}}"
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
    yield f"  source: {value(list(sources) if len(sources) > 1 else sources[0])}"
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
        yield f"  distillation: {{teacher: {value(plan.teacher)}}}  # {DOCS}#trainingdistillation"
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
