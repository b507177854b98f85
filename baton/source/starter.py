"""Starter recipes: the method for the rows, values with their reasons, and the file."""

import math
import os
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from baton.errors import UserError
from baton.recipe import yaml_text
from baton.recipe.methods import SPECS, TAUGHT
from baton.runs.documents import Fit, Survey

SCRATCH = "scratch"
"""Represents a model that is built from its configuration."""
IN_TURN = ("dpo", "kto", "sft", "pretrain", "grpo")
"""Methods in the order in which they are tried: the most demanding first."""
ENOUGH = 0.5
"""Share of usable rows from which a method is chosen."""
LENGTHS = (128, 256, 512, 1024, 2048, 4096)
FEW, MANY = 100, 20_000
"""Rows below which a number is held out, not a share; rows from which one pass is enough."""
STEPS = 8
"""Steps of a pass, for which batches are made smaller."""
CHUNK_STEPS, MAX_CHUNKS, UNKNOWN_CHUNKS = 50, 8, 4
"""Fewest steps of a chunk; most chunks; chunks for an unknown number of steps."""

WRITE = tuple(name for name, spec in SPECS.items() if spec.is_judged_by_rewards)
"""Methods whose `training.batch_size` counts completions."""
BATCH = {"pretrain": 32, **dict.fromkeys(WRITE, 32)}
"""Method → rows or completions of a step; 16 with the others."""
GENERATIONS = 8


@dataclass(frozen=True, kw_only=True)
class StarterPlan:
    """Values of a starter recipe; `steps` is about right, and None where the rows were not counted."""

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
    """Returns the method that suits rows best; `source` is their name in messages."""
    for method in IN_TURN:
        fit = survey.of(method)
        is_plain = method == "sft" and fit.format == "text"
        if _is_enough(fit, survey) and not is_plain and (method != "grpo" or fit.answers >= ENOUGH * fit.usable):
            return method
    if fitting := usable_by(survey):
        raise UserError(
            f"{source} holds prompts without answers, so the rows alone teach nothing.",
            remedy=f"Name the method, one of {', '.join(fitting)}: {' and '.join(WRITE)} take rewards, "
            f"{' and '.join(TAUGHT)} --teacher.",
        )
    nearest = max(survey.fits, key=lambda fit: (fit.usable, bool(fit.format)))
    raise UserError(
        f"{source}: no training method learns from its rows ({_named_columns(survey)}): {nearest.reason}",
        remedy="docs/guides/data.md shows the shapes of rows; `data.columns` in a recipe maps columns of other names.",
    )


def require_fit(survey: Survey, method: str, source: str) -> Fit:
    """Returns how rows fit a method that can use some of them."""
    if method not in SPECS:
        raise UserError(f"method {method!r} is unknown; expected one of {', '.join(SPECS)}.")
    fit = survey.of(method)
    if fit.usable:
        return fit
    needs = " or ".join(NEEDS[name] for name in SPECS[method].formats if name in NEEDS)
    others = usable_by(survey)
    would = f"{', '.join(others)} would do: --method {others[0]}." if others else "docs/guides/data.md shows what does."
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
"""Format → its columns, in words; the others are ways to write these."""


def usable_by(survey: Survey) -> list[str]:
    """Returns the methods that can use at least half of the rows, the likeliest first."""
    fits = [fit for fit in survey.fits if _is_enough(fit, survey)]
    found = [method for fit in fits for method in fit.methods]
    return sorted(found, key=lambda name: IN_TURN.index(name) if name in IN_TURN else len(IN_TURN))


def plan(
    survey: Survey, method: str, model: str, *, full: bool, teacher: str | None, lengths: list[int], source: str
) -> StarterPlan:
    """Returns a recipe's values; `lengths` are the measured rows' tokens, ascending, none without a tokenizer here."""
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
    return StarterPlan(
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
        learning_rate=1e-3 if is_new else SPECS[method].rates[adapter][0],
        steps=steps,
        chunks=UNKNOWN_CHUNKS if steps is None else max(1, min(MAX_CHUNKS, steps // CHUNK_STEPS)),
    )


def _held_out(survey: Survey) -> float:
    """Returns `data.split.eval`: a share, but a number of few rows, as a share might hold out none."""
    if survey.rows is not None and survey.rows < FEW:
        return float(max(2, survey.rows // 10))
    return 0.05 if survey.rows is None or survey.rows >= MANY // 10 else 0.1


def _length(fit: Fit, lengths: list[int], model: str, *, is_packed: bool) -> tuple[int, str]:
    """Returns `data.max_length`, and the reason."""
    if lengths:
        most, longest = lengths[int(0.99 * (len(lengths) - 1))], lengths[-1]
        chosen = next((length for length in LENGTHS if length >= most), LENGTHS[-1])
        if is_packed:
            chosen = max(chosen, 256 if model == SCRATCH else 1024)
        over = sum(length > chosen for length in lengths)
        cut = f"{over} of them would be cut" if over else "none is cut"
        half = lengths[len(lengths) // 2]
        return chosen, f"In tokens: of {len(lengths)} rows half have up to {half}, the longest has {longest}; {cut}."
    guess = (fit.characters[1] if fit.characters else 1500) / 3  # most texts have more characters to a token
    chosen = next((length for length in LENGTHS if length >= guess), LENGTHS[-1])
    return chosen, (
        f"The tokenizer of {model} is not on this machine: a guess by the characters of "
        "the rows, three to a token. `baton data check` counts them."
    )


def _is_enough(fit: Fit, survey: Survey) -> bool:
    return fit.usable > 0 and fit.usable >= ENOUGH * survey.looked_at


def _named_columns(survey: Survey) -> str:
    return f"columns {', '.join(survey.columns)}" if survey.columns else "no columns"


WIDTH = 100
NUMBERS = 0.8
"""Share of answers ending in a number from which the number is rewarded."""


def to_yaml(plan: StarterPlan, survey: Survey, *, name: str, model: str, sources: Sequence[str]) -> str:
    """Returns a recipe's file, with reasons; `model` and `sources` as the recipe is to name them."""
    import jinja2

    fit, scratch, writes = plan.fit, plan.model == SCRATCH, plan.method in WRITE
    joined = {ours: theirs if isinstance(theirs, str) else " and ".join(theirs) for ours, theirs in fit.columns.items()}
    digits, _, power = f"{plan.learning_rate:e}".partition("e")
    environment = jinja2.Environment(trim_blocks=True, keep_trailing_newline=True, undefined=jinja2.StrictUndefined)
    environment.filters |= {"count": lambda number: f"{number:,}", "yaml": yaml_value}
    template = environment.from_string(Path(__file__).with_suffix(".yaml.jinja").read_text(encoding="utf-8"))
    return template.render(
        plan=plan,
        fit=fit,
        survey=survey,
        name=name,
        model=model,
        sources=sources,
        files=", ".join(os.path.basename(source) for source in sources),
        columns=", ".join(f"{ours} is {theirs}" for ours, theirs in joined.items()),
        scratch=scratch,
        writes=writes,
        unusable=survey.looked_at - fit.usable,
        reason=" ".join(fit.reason.split())[:80] or "they cannot be read",
        rewards=_rewards(fit) if writes else "",
        generations=GENERATIONS,
        weight=_weight(fit) if plan.method == "kto" else "",
        unit="completions" if writes else "rows",
        rate=f"{float(digits):.1f}e{int(power)}",
        why_rate="usual for small models from scratch" if scratch else SPECS[plan.method].rates[plan.adapter][1],
        chunk_steps=max(1, (plan.steps or 0) // plan.chunks),
        note=_note,
    )


def yaml_value(given: object) -> str:
    """Returns a value as YAML on one line."""
    return yaml_text.dump(given, default_flow_style=True, allow_unicode=True, width=10**6).strip().removesuffix("\n...")


def _note(text: str, indent: str = "") -> str:
    """Returns a comment, wrapped."""
    mark = f"{indent}# "
    return textwrap.fill(
        text, WIDTH, initial_indent=mark, subsequent_indent=mark, break_long_words=False, break_on_hyphens=False
    )


def _rewards(fit: Fit) -> str:
    if not fit.answers:
        return "[length]  # a placeholder, as rows have no answer: put here what judges a completion, module:function"
    if fit.numbers >= NUMBERS * fit.answers:
        return "[numeric]  # the right final number, as the answers end in one"
    return "[exact]  # the answer itself"


def _weight(fit: Fit) -> str:
    """Returns the weight that balances good and bad answers, nothing where they nearly balance."""
    bad = fit.usable - fit.good
    if not (fit.good and bad) or 1 <= fit.good / bad <= 4 / 3:
        return ""
    fewer, weight = ("undesirable", fit.good / bad) if fit.good > bad else ("desirable", bad / fit.good)
    return f"{{{fewer}_weight: {weight:.2f}}}"
