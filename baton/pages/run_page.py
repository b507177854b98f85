"""The run report: one HTML file without network or script.

The template escapes everything that comes from a run (samples, recipe, names), as it is untrusted. Exactness is claimed
only where it was checked. Plots are inline SVG in the page's light or dark theme; the same report gives the same bytes.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from baton.pages import collect, html, svg
from baton.pages.collect import ChunkAttempts, ProofEntry, RunReport
from baton.pages.html import count, duration, number, size
from baton.recipe.methods import SPECS
from baton.runs import lineage
from baton.runs.documents import PARTS, ChunkRecord, OwnState, ProofPart
from baton.runs.outcomes import Figures

PHASES = {
    "start": ("start-up", svg.GREY),
    "import": ("import", svg.MUTED),
    "fetch": ("fetch", svg.SKY),
    "build": ("build", svg.PURPLE),
    "restore": ("restore", svg.ORANGE),
    "train": ("train", svg.BLUE),
    "save": ("save", svg.AMBER),
    "upload": ("upload", svg.GREEN),
}
MAX_ATTEMPT_ROWS = 120
MAX_STAGE_ROWS = 24


def draw(report: RunReport) -> dict[str, Markup]:
    """Returns all plots that have something to show, by name."""
    plots = {
        "loss": ("Training and eval loss by step", loss_plot),
        "method": (
            "What the method logs beside the loss, by step",
            lambda report: _small_plots(report, SPECS[report.method].logged),
        ),
        "optimization": (
            "Learning rate and gradient norm by step",
            lambda report: _small_plots(report, {"learning_rate": "learning rate", "grad_norm": "gradient norm"}),
        ),
        "throughput": ("Throughput of each chunk by step", throughput_plot),
        "attempts": ("Time of each chunk attempt by phase", attempt_plot),
        "stages": ("Time of each pipeline stage", stage_plot),
    }
    return svg.draw_all(plots, report)


def loss_plot(report: RunReport) -> Figure | None:
    train, evals = svg.series(report.losses, "loss"), svg.series(report.log, "eval_loss")
    if not len(train[0]) and not len(evals[0]):
        return None
    figure, (ax,) = svg.blank_figure(380)
    svg.curve(ax, train, "train")
    if len(evals[0]):
        style = "-o" if len(evals[0]) <= 60 else "-"
        ax.plot(*svg.thin(evals), style, color=svg.ORANGE, lw=1.2, ms=5, label="eval")
    if len(train[1]):
        _log_if_wide(ax, train[1], 200)
    _mark_levels(ax, report)
    _step_axis(ax, report)
    _mark_interruptions(ax, report)
    _mark(ax, report.skipped, 1, "v", svg.AMBER, "step skipped")
    ax.set_ylabel("loss")
    for handle in figure.legend(loc="outside upper left", ncols=4).get_lines():
        handle.set_linewidth(max(1.5, handle.get_linewidth()))
    return figure


def _small_plots(report: RunReport, names: Mapping[str, str]) -> Figure | None:
    series = {name: svg.series(report.losses, key) for key, name in names.items()}
    curves = {name: points for name, points in series.items() if len(points[0])}
    if not curves:
        return None
    columns = min(2, len(curves))
    rows = math.ceil(len(curves) / columns)
    figure, axes = svg.blank_figure(210 * rows, rows, columns)
    for ax, (name, points) in zip(axes, curves.items(), strict=False):
        svg.curve(ax, points, name, smooth=name != "learning rate")
        if name == "gradient norm":
            _log_if_wide(ax, points[1], 100)
        elif name == "learning rate" and ax.get_ylim()[0] < points[1].max() / 10:
            ax.set_ylim(bottom=0)
        ax.set_ylabel(name)
        _step_axis(ax, report, labels=False)
    for ax in axes[len(curves) :]:
        ax.remove()
    return figure


def throughput_plot(report: RunReport) -> Figure | None:
    rates = [
        (attempt, (attempt.to_step - attempt.from_step) / attempt.seconds["train"])
        for attempt in report.chunk_attempts
        if attempt.to_step > attempt.from_step and attempt.seconds.get("train", 0.0) > 0
    ]
    unit = "steps"
    if report.plan and any(attempt.tokens for attempt, _ in rates):
        unit, per_epoch = "tokens", report.plan.steps_per_epoch
        rates = [(attempt, rate * attempt.tokens / per_epoch) for attempt, rate in rates if attempt.tokens]
    if not rates:
        return None
    figure, (ax,) = svg.blank_figure(190)
    starts, ends, heights = zip(*((attempt.from_step, attempt.to_step, rate) for attempt, rate in rates), strict=True)
    ax.bar(starts, heights, np.subtract(ends, starts), align="edge", color=svg.BLUE, alpha=0.3, lw=0)
    ax.hlines(heights, starts, ends, color=svg.BLUE, lw=2)
    ax.set_ylim(0, max(heights) * 1.1)
    ax.set_ylabel(f"{unit} per second")
    ax.yaxis.set_major_formatter(FuncFormatter(svg.compact))
    _step_axis(ax, report)
    _mark_interruptions(ax, report)
    return figure


def attempt_plot(report: RunReport) -> Figure | None:
    rows = _attempt_rows(report.chunks)
    if not rows:
        return None
    values = [np.array([row[phase] for _, row, _ in rows]) for phase in PHASES]
    figure, ax, scale = _bar_figure([label for label, *_ in rows], np.sum(values, axis=0), [note for *_, note in rows])
    left = np.zeros(len(rows))
    for (label, color), seconds in zip(PHASES.values(), values, strict=True):
        ax.barh(range(len(rows)), seconds / scale, 0.76, left, color=color, label=label, lw=0)
        left += seconds / scale
    figure.legend(loc="outside upper left", ncols=8, handlelength=0.9)
    return figure


def stage_plot(report: RunReport) -> Figure | None:
    stages: dict[str, float] = {}
    for stage, spent in report.stages.items():
        name = "".join(character for character in stage if character.isprintable())
        name = name if len(name) <= 24 else f"{name[:23]}…"
        stages[name] = stages.get(name, 0.0) + spent
    if len(stages) > MAX_STAGE_ROWS:
        stages = _merge_numbered(stages)
    if not stages:
        return None
    seconds = np.array(list(stages.values()))
    figure, ax, scale = _bar_figure(list(stages), seconds, [""] * len(stages))
    ax.barh(range(len(stages)), seconds / scale, 0.7, color=svg.BLUE, lw=0)
    return figure


def _log_if_wide(ax: Axes, values: np.ndarray, ratio: float) -> None:
    if values.min() > 0 and values.max() / np.median(values) > ratio:
        ax.set_yscale("log")


def _step_axis(ax: Axes, report: RunReport, *, labels: bool = True) -> None:
    """Draws the step axis over the whole plan, with a thin line at each hand-over."""
    ends = report.targets
    last = max([*ends, *(entry["step"] for entry in report.losses[-1:]), ax.get_xlim()[1] if not ends else 1])
    svg.step_axis(ax, last)
    line_width = 0.9 if len(ends) <= 30 else 0.4
    room = (svg.WIDTH - 120) / max(len(ends), 1)
    apart, every = (next((n for n in (1, 2, 5, 10, 20, 50) if n * room >= width), 100) for width in (7, 62))
    ax.vlines(ends[apart - 1 : -1 : apart], 0, 1, transform=ax.get_xaxis_transform(), color=svg.GREY, lw=line_width)
    if not labels:
        return
    for index, (start, end) in enumerate(pairwise([0, *ends]), 1):
        if every == 1 or index % every == 0:
            ax.annotate(
                f"chunk {index}", ((start + end) / 2, 1), (0, 3), ax.get_xaxis_transform(),
                "offset points", ha="center", va="bottom", fontsize=10.5, color=svg.MUTED,
            )  # fmt: skip


def _mark_interruptions(ax: Axes, report: RunReport) -> None:
    steps = [attempt.to_step for attempt in report.chunk_attempts if attempt.outcome in ("partial", "failed")]
    _mark(ax, steps, 0, "X", svg.PURPLE, "attempt interrupted")


def _mark(ax: Axes, steps: Sequence[int], height: float, marker: str, color: str, label: str) -> None:
    if steps:
        ax.plot(
            steps, [height] * len(steps), marker, ms=8, color=color, mec="none", clip_on=False,
            transform=ax.get_xaxis_transform(), label=label, zorder=5,
        )  # fmt: skip


def _mark_levels(ax: Axes, report: RunReport) -> None:
    measured = {name: report.figures(name).get("loss") for name in ("before", "after")}
    levels = {name: float(value) for name, value in measured.items() if value is not None and math.isfinite(value)}
    for value in levels.values():
        ax.axhline(value, color=svg.GREEN, lw=1.1, ls=(0, (5, 4)))
    low, high = sorted(ax.get_ylim())
    crowded = len(levels) == 2 and abs(levels["before"] - levels["after"]) < 0.13 * (high - low)
    upper = max(levels, key=lambda name: levels[name], default="")
    for name, value in levels.items():
        offset = (15 if name == upper else -15) if crowded else 0
        ax.annotate(
            f"{name}\n{value:.2f}", (1, value), (6, offset), ax.get_yaxis_transform(), "offset points",
            va="center", fontsize=10.5, color=svg.GREEN, annotation_clip=False,
        )  # fmt: skip


def _attempt_rows(chunks: Sequence[ChunkAttempts]) -> list[tuple[str, dict[str, float], str]]:
    """Returns label, seconds by phase and a note for each attempt, or for each chunk where attempts are many."""
    by_chunk = sum(len(chunk.attempts) for chunk in chunks) > MAX_ATTEMPT_ROWS
    rows: list[tuple[str, dict[str, float], str]] = []
    for chunk in chunks:
        name = f"{'spare' if chunk.spare else 'chunk'} {chunk.index}"
        seconds = [{phase: attempt.seconds.get(phase) or 0.0 for phase in PHASES} for attempt in chunk.attempts]
        count = len(seconds)
        if by_chunk and count:
            total = {phase: sum(part[phase] for part in seconds) for phase in PHASES}
            rows.append((name, total, f"{count} attempts" if count > 1 else ""))
            continue
        for at, (attempt, part) in enumerate(zip(chunk.attempts, seconds, strict=True), 1):
            note = "" if attempt.outcome == "done" else attempt.outcome.replace("_", " ")
            rows.append((f"{name}, attempt {at}" if count > 1 else name, part, note))
    return rows


def _merge_numbered(stages: Mapping[str, float]) -> dict[str, float]:
    """Joins `train chunk 1` … `train chunk 100` to `train chunk × 100`."""
    bases = [re.sub(r"\W*\d+$", "", name) for name in stages]
    merged: dict[str, float] = {}
    for base, seconds in zip(bases, stages.values(), strict=True):
        name = f"{base} × {bases.count(base)}" if bases.count(base) > 1 else base
        merged[name] = merged.get(name, 0.0) + seconds
    return merged


def _bar_figure(labels: Sequence[str], seconds: np.ndarray, notes: Sequence[str]) -> tuple[Figure, Axes, float]:
    """Returns an empty bar plot with row labels and times at the bars' ends, and its unit of time in seconds."""
    row_height = 25 if len(labels) <= 16 else 17 if len(labels) <= 40 else 10
    figure, (ax,) = svg.blank_figure(row_height * len(labels) + 84)
    unit, scale = next((u for u in (("hours", 3600), ("minutes", 60)) if seconds.max() > 3 * u[1]), ("seconds", 1))
    every = 1 if row_height > 10 else 5
    ticks = [row for row in range(len(labels)) if every == 1 or row % every == 0]
    ax.set_yticks(ticks, [labels[row] for row in ticks])
    ax.set_ylim(len(labels) - 0.4, -0.6)
    ax.set_xlim(0, max(float(seconds.max()) / scale, 1e-9) * 1.16)
    ax.grid(visible=False)
    ax.grid(axis="x")
    ax.tick_params(axis="y", length=0, labelcolor=svg.INK)
    ax.spines["left"].set_visible(False)
    ax.set_xlabel(unit)
    ax.xaxis.set_major_locator(MaxNLocator(8))
    for row, (value, note) in enumerate(zip(seconds, notes, strict=True)):
        if every == 1 or note:
            text = duration(float(value)) + (f", {note}" if note else "")
            ax.annotate(
                text, (float(value) / scale, row), (5, 0), "data", "offset points", va="center",
                fontsize=min(10.5, row_height - 1), color=svg.PURPLE if note else svg.MUTED,
            )  # fmt: skip
    return figure, ax, float(scale)


MARKS = {
    "match": ("✓", "match"),
    "absent": ("–", "absent: this run has none"),
    "of other processes": ("–", "of another number of processes: not compared"),
}
MAX_SAMPLES = 40
NUM_OPEN_SAMPLES = 4
MAX_SAMPLE_CHARS = 6000


@dataclass(frozen=True, kw_only=True)
class ProofRow:
    """One checkpoint's link in the chain of digests."""

    part: ProofPart
    gone: str | None
    marks: tuple[tuple[str, str, str], ...]  # part, symbol and word; empty where nothing was restored before it
    problems: tuple[str, ...]
    changes: tuple[str, ...]  # since the previous checkpoint: the fingerprint, and lost state of the user's code

    @property
    def tone(self) -> str:
        if self.problems:
            return "bad"
        return "good" if self.part.level == "bitwise" else "warn"


@dataclass(frozen=True, kw_only=True)
class ResumeProof:
    rows: tuple[ProofRow, ...]
    parts: tuple[str, ...]
    tone: str
    word: str
    sentence: str


def render(report: RunReport) -> str:
    """Returns the report as one HTML document; the same report gives the same bytes."""
    environment = html.environment(Path(__file__).parent)
    environment.filters |= {"clip": clip, "duration": duration}
    proof = read_proof(report)
    tone, sentence = verdict(report, proof)
    evaluation = report.evaluation
    samples = evaluation.samples if evaluation else []
    lost = sum(entry["loss"] is not None and not math.isfinite(entry["loss"]) for entry in report.losses)
    curve_note = f"{count(lost, 'logged loss', 'logged losses')} not finite and left out of the curve."
    return environment.get_template("run_page.html.j2").render(
        report=report,
        tone=tone,
        sentence=sentence,
        tiles=tiles(report),
        plots=draw(report),
        proof=proof,
        family=list(lineage.walk(report.family)) if len(report.family) > 1 else [],
        time_note=time_note(report.chunk_attempts),
        cost_note=cost_note(report),
        curve_note=curve_note if lost else "",
        evaluation=evaluation,
        figures=collect.figure_rows(evaluation) if evaluation else [],
        example_pages=collect.example_pages(report.examples.shown),
        samples=samples[:NUM_OPEN_SAMPLES],
        more_samples=samples[NUM_OPEN_SAMPLES:MAX_SAMPLES],
        num_hidden_samples=max(len(samples) - MAX_SAMPLES, 0),
    )


def verdict(report: RunReport, proof: ResumeProof) -> tuple[str, str]:
    """Returns the page's tone (good, warn, bad) and the sentence that sums the run up."""
    loss_tone, loss = loss_clause(report.figures("before"), report.figures("after"))
    if report.state in ("failed", "cancelled"):
        logged = [int(entry["step"]) for entry in report.losses[-1:]]
        reached = max([*logged, *(entry.part.step for entry in report.proof)], default=0)
        planned = max([*report.targets, report.steps])
        where = f"at step {reached:,} of {planned:,}" if planned else "before the first step"
        told = proof.sentence if loss_tone == "none" else f"{loss}; {proof.sentence}"
        ended = f"The run failed {where}. {told[:1].upper()}{told[1:]}."
        if failure := report.failure:
            ended = f"The run {'was cancelled' if failure.is_cancelled else 'failed'} in {failure.stage}"
            ended += "." if report.is_bare else f", {where}."
        return "bad", ended
    if report.evaluation and (gate := report.evaluation.gate) and not gate.passed:
        return "bad", f"The gate rejects the model, and nothing was exported: {'; '.join(gate.failed)}. {loss}."
    extent = f"in {count(report.steps, 'step')} over {count(len(report.targets), 'chunk')}"
    if report.stopped_before:
        extent += f", stopped before step {report.stopped_before:,} as evaluation did not improve"
    tone = "warn" if loss_tone == "warn" and proof.tone == "good" else proof.tone
    return tone, f"{loss} {extent}; {proof.sentence}."


# Figures that tell more of a method than its loss: in words, and 1 where more is better.
JUDGED_BY = {
    "reward": ("Reward", 1),
    "accuracy": ("Accuracy on held-out pairs", 1),
    "divergence": ("Divergence from the teacher", -1),
}


def loss_clause(figures_before: Figures, figures_after: Figures) -> tuple[str, str]:
    """Returns a tone (none where nothing was measured) and the change of the evaluated figure in words."""
    for key, (label, sign) in JUDGED_BY.items():
        old, new = figures_before.get(key), figures_after.get(key)
        if old is not None and new is not None:
            verb = "rose" if new > old else "fell" if new < old else "stayed"
            moved = f"from {old:.3g} to {new:.3g}" if new != old else f"at {new:.3g}"
            return "good" if sign * (new - old) > 0 else "warn", f"{label} {verb} {moved}"
        if key in figures_after and (old, new) != (None, None):
            return "warn", f"{label} was not measured {'after' if new is None else 'before'} training"
    before, after = figures_before.get("loss"), figures_after.get("loss")
    if after is not None and not math.isfinite(after):
        return "warn", "Eval loss is no longer a finite number"
    if after is None and before is not None and "loss" in figures_after:
        return "warn", "Eval loss was not measured after training"
    if before is None or after is None or not math.isfinite(before):
        known = before if after is None else after
        if known is None:
            asked = next((label for key, (label, _) in JUDGED_BY.items() if key in figures_after), "Eval loss")
            return "none", f"Trained, with no {asked[0].lower()}{asked[1:]} measured,"
        return "good", f"Eval loss was {known:.2f} {'before' if after is None else 'after'} training"
    old, new = figures_before.get("perplexity"), figures_after.get("perplexity")
    arrow = "\N{NO-BREAK SPACE}→\N{NO-BREAK SPACE}"
    known = old is not None and new is not None
    perplexity = f" (perplexity {number(old)}{arrow}{number(new)})" if known else ""
    if abs(after - before) < 0.005:
        return "warn", f"Eval loss stayed at {after:.2f}{perplexity}"
    verb = "fell" if after < before else "rose"
    return "good" if after < before else "warn", f"Eval loss {verb} from {before:.2f} to {after:.2f}{perplexity}"


def read_proof(report: RunReport) -> ResumeProof:
    """Judges every checkpoint's entry: what was compared, whether it hangs on its parent, what changed."""
    entries = sorted(report.proof, key=lambda entry: entry.part.step)
    digests: dict[int | None, str | None] = {entry.part.step: entry.part.digest for entry in entries}
    rows: list[ProofRow] = []
    for before, entry in zip([None, *entries], entries, strict=False):
        part = entry.part
        checked = part.checked or {}
        wrong = {name: result for name, result in checked.items() if result not in MARKS}
        problems = [f"{name} {'differs' if result == 'mismatch' else result}" for name, result in wrong.items()]
        if digests.get(part.parent_step, part.parent_digest) != part.parent_digest:
            problems.append(f"parent is not the checkpoint of step {part.parent_step:,}")
        rows.append(
            ProofRow(
                part=part,
                gone=entry.gone,
                marks=tuple((name, *MARKS.get(result, ("✗", result))) for name, result in checked.items()),
                problems=tuple(problems),
                changes=_changes(before, entry),
            )
        )
    named = {name for row in rows for name, _, _ in row.marks}
    parts = tuple(name for name in PARTS if name in named) + tuple(sorted(named - set(PARTS)))
    tone, word, sentence = _judge(rows, report)
    return ResumeProof(rows=tuple(rows), parts=parts, tone=tone, word=word, sentence=sentence)


def _changes(before: ProofEntry | None, entry: ProofEntry) -> tuple[str, ...]:
    old, new = (one.part.fingerprint.to_json() if one else {} for one in (before, entry))
    changes = [f"{key} {old[key]} → {new[key]}" for key in new if old.get(key, new[key]) != new[key]]
    own = entry.part.hooks or OwnState()
    changes += [f"state of {name} is not carried" for name in own.lost]
    if entry.part.level != "bitwise" and before and before.part.hooks is None:
        changes += [f"state of {name} was not looked at before" for name in own.carried]
    return tuple(changes)


def _judge(rows: Sequence[ProofRow], report: RunReport) -> tuple[str, str, str]:
    """Returns tone, one word and a clause for the whole proof; never more than the rows bear out."""
    if not rows:
        return "warn", "no proof", "no resume proof was recorded"
    # The gravest first: a broken chain, a resume that was only consistent, a hand-over unchecked or not read back.
    broken = [row for row in rows if row.problems]
    if broken:
        others = f" and {count(len(broken) - 1, 'more checkpoint')}" if len(broken) > 1 else ""
        where = f"step {broken[0].part.step:,}: {broken[0].problems[0]}{others}"
        return "bad", "proof broken", f"the resume proof does not hold ({where})"
    restored = [row for row in rows if row.marks]
    changed = [row for row in rows if row.part.level != "bitwise"]
    if changed:
        reasons = list(dict.fromkeys(change for row in changed for change in row.changes))
        reason = f" ({', '.join(reasons[:3])})" if reasons else ""
        what = f"{len(changed)} of {count(len(rows), 'checkpoint')} only consistent{reason}"
        return "warn", "consistent", f"not every hand-over was bit-exact: {what}"
    began = report.fork.step if report.fork and report.fork.warm else 0
    ends = [step for step in report.targets if step >= began]
    # An attempt may train on past the end of an earlier chunk that was left undone.
    through = {end for end in ends for attempt in report.attempts if attempt.from_step < end < attempt.to_step}
    crossed = [pair for pair in pairwise(ends) if pair[0] not in through and pair[1] <= rows[-1].part.step]
    points = {row.part.restored_step for row in restored}
    seen = sum(any(start <= point < end for point in points) for start, end in crossed)
    if seen < len(crossed):
        told = f"{seen} of {count(len(crossed), 'hand-over')} checked" + (", bit-exact each" if seen else "")
        return "warn", "partly checked" if seen else "not checked", told
    if not restored:
        why = "nothing had to be handed over" if len(ends) < 2 else "no checkpoint follows a hand-over"
        return "good", "no hand-over", why
    which = "the one hand-over" if len(points) == 1 else "every hand-over"
    unread = sum(not row.part.verified for row in rows if row.part.step in ends)
    if unread:
        told = f"{which} was bit-exact, with {count(unread, 'chunk end')} not yet read back from the store"
        return "warn", "not read back", told
    return "good", "bit-exact", f"{which} was bit-exact"


def tiles(report: RunReport) -> list[tuple[str, str, str]]:
    figures_before, figures_after = report.figures("before"), report.figures("after")
    shown: list[tuple[str, str, str]] = []
    labels = {"reward": "Reward", "accuracy": "Accuracy", "loss": "Eval loss", "perplexity": "Perplexity"}
    for key, label in labels.items():
        before, after = figures_before.get(key), figures_after.get(key)
        remark = "not measured before" if before is None else f"before: {number(before)}"
        if after is not None:
            shown.append((label, number(after), remark))
        elif key in figures_after:
            shown.append((label, "not measured", remark))
        elif before is not None:
            shown.append((label, number(before), "before training"))
    if (accuracy := figures_after.get("reward_accuracy")) is not None:
        remark = f"margin {number(figures_after.get('reward_margin'))} nats"
        shown.append(("Preference accuracy", f"{accuracy:.0%}", remark))
    if report.steps:
        shown.append(("Steps", f"{report.steps:,}", f"in {count(len(report.targets), 'chunk')}"))
    if report.trained_tokens:
        shown.append(("Tokens trained", number(report.trained_tokens), ""))
    if report.split and report.split.train is not None:
        shown.append(("Training rows", number(report.split.train), f"{number(report.split.eval)} for eval"))
    if report.evaluation and (parameters := report.evaluation.parameters):
        trained = report.newest.trainable_parameters if report.newest else None
        remark = "" if trained is None else f"{number(trained)} trained"
        shown.append(("Parameters", number(parameters), "all trained" if trained == parameters else remark))
    total, train = chunk_seconds(report.chunk_attempts)
    if total:
        shown.append(("Time in chunks", duration(total), f"{train / total:.0%} of it training"))
    return shown


def chunk_seconds(attempts: Sequence[ChunkRecord]) -> tuple[float, float]:
    """Returns the seconds in chunk attempts, and those of training."""
    total = sum(attempt.seconds.get(phase) or 0.0 for attempt in attempts for phase in PHASES)
    return total, sum(attempt.seconds.get("train") or 0.0 for attempt in attempts)


def time_note(attempts: Sequence[ChunkRecord]) -> str:
    total, train = chunk_seconds(attempts)
    if not total:
        return ""
    cut = sum(attempt.outcome in ("partial", "failed") for attempt in attempts)
    note = f"{count(len(attempts), 'attempt')}, {duration(total)} in all, {train / total:.0%} training."
    return f"{note} {count(cut, 'attempt')} ended early." if cut else note


def cost_note(report: RunReport) -> str:
    """Returns the known costs of chunks beside training, in one line."""
    work = report.newest.work if report.newest else None
    sent = sum(attempt.bytes_sent for attempt in report.attempts)
    received = sum(attempt.bytes_received for attempt in report.attempts)
    stalls = [seconds for attempt in report.attempts for seconds in attempt.save_stalls]
    told = [
        f"goodput {work.goodput:.0%} since the run began" if work else "",
        f"{count(work.lost_steps, 'step')} lost to interruptions" if work else "",
        f"{count(len(report.restarts), 'process', 'processes')} lost and started again" if report.restarts else "",
        f"{size(sent)} sent" + (f" and {size(received)} fetched" if received else "") if sent else "",
        f"a save holds training up for {duration(statistics.median(stalls))} (median)" if stalls else "",
    ]
    line = ", ".join(part for part in told if part)
    return f"{line[:1].upper()}{line[1:]}." if line else ""


def clip(text: str | None) -> str:
    if text is None or len(text) <= MAX_SAMPLE_CHARS:
        return text or ""
    return f"{text[:MAX_SAMPLE_CHARS]}… ({count(len(text) - MAX_SAMPLE_CHARS, 'more character')})"
