"""The run report: one HTML file that loads nothing.

The template escapes everything that comes from a run (samples, recipe, names), as it is untrusted. Exactness is claimed
only where it was checked. The same report gives the same bytes.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from jinja2 import Environment

from baton.pages import collect, html, plots
from baton.pages.collect import ChunkAttempts, ProofEntry, RunReport
from baton.pages.html import count, duration, number, size
from baton.pages.plots import Curve, Mark, Plot
from baton.recipe.methods import SPECS
from baton.runs import lineage
from baton.runs.documents import PARTS, ChunkRecord, OwnState, ProofPart
from baton.runs.outcomes import Figures

PHASES = {
    "start": ("start-up", "grey"),
    "import": ("import", "muted"),
    "fetch": ("fetch", "sky"),
    "build": ("build", "purple"),
    "restore": ("restore", "orange"),
    "train": ("train", "blue"),
    "save": ("save", "amber"),
    "upload": ("upload", "green"),
}
MAX_ATTEMPT_ROWS = 120
MAX_STAGE_ROWS = 24
MAX_KILLS = 6  # in words
SMALL = 220  # height of a plot where two share a row


@dataclass(frozen=True)
class Part:
    """A part of a strip of time; `share` is of the strip's whole length."""

    name: str
    color: str
    seconds: float
    share: float


@dataclass(frozen=True)
class TimeRow:
    label: str
    parts: Sequence[Part]
    seconds: float
    note: str = ""


@dataclass(frozen=True)
class BillRow:
    label: str
    parts: Sequence[Part]
    cost: str


def loss_plot(report: RunReport) -> Plot | None:
    train = plots.series(report.losses, "loss")
    in_training = bool(plots.series(report.log, "eval_loss"))
    dash = () if in_training else (4, 4)  # two values, before and after, have no course between them
    return plots.plot(
        "Training and evaluation loss by step",
        "loss",
        [
            *plots.with_mean("training", train),
            Curve(name="evaluation", points=evaluation_points(report), color="orange", dots=True, dash=dash),
        ],
        end=_end(report),
        marks=_marks(report),
        log_y=plots.spread(train, 200),
    )


def evaluation_points(report: RunReport) -> plots.Points:
    """Returns evaluation losses by step: before training, as trained, and of the finished model.

    A method whose loss is not the model's loss on held-out rows, such as DPO, has those in training alone.
    """
    points = dict(plots.series(report.log, "eval_loss"))
    if SPECS[report.method].rows not in ("sequences", "scored"):
        return sorted(points.items())
    began = report.fork.step if report.fork and report.fork.warm else 0
    for when, step in (("before", began), ("after", report.steps)):
        value = report.figures(when).get("loss")
        if value is not None and math.isfinite(value) and (when == "before" or step):
            points.setdefault(step, float(value))
    return sorted(points.items())


def loss_legend(report: RunReport) -> list[tuple[str, str, str]]:
    """Returns hue, form and words of the marks over the curves."""
    kinds = {mark.color: mark for mark in _marks(report)}
    words = (
        ("grey", "line", "end of a chunk"),
        ("bad", "line dashed", "✗ killed"),
        ("purple", "line dashed", "preempted"),
        ("amber", "line dashed", "step skipped"),
    )
    return [row for row in words if row[0] in kinds]


def small_plots(report: RunReport, names: Mapping[str, str]) -> list[Plot]:
    """Returns a plot for each logged value of these that the run has."""
    made = []
    for key, name in names.items():
        points = plots.series(report.losses, key)
        curves = [Curve(name=name, points=points)] if key == "learning_rate" else plots.with_mean(name, points)
        marks = [mark for mark in _marks(report) if mark.kind == "end"]
        log_y = key == "grad_norm" and plots.spread(points, 100)
        settings = {"end": _end(report), "marks": [_silent(mark) for mark in marks], "log_y": log_y, "height": SMALL}
        if drawn := plots.plot(f"{name} by step", name, curves, **settings):
            made.append(drawn)
    return made


def throughput_plot(report: RunReport) -> Plot | None:
    rates = [
        (attempt, (attempt.to_step - attempt.from_step) / attempt.seconds["train"])
        for attempt in report.chunk_attempts
        if attempt.to_step > attempt.from_step and attempt.seconds.get("train", 0.0) > 0 and attempt.outcome != "killed"
    ]
    unit = "steps"
    if report.plan and any(attempt.tokens for attempt, _ in rates):
        unit, per_epoch = "tokens", report.plan.steps_per_epoch
        rates = [(attempt, rate * attempt.tokens / per_epoch) for attempt, rate in rates if attempt.tokens]
    points: dict[float, float] = {}
    for attempt, rate in rates:
        # Steps of a killed attempt get the rate of its successor, which trains the same chunk.
        points |= {min([attempt.from_step, *list(points)[-1:]]): rate, attempt.to_step: rate}
    return plots.plot(
        "Throughput of each chunk by step",
        f"{unit} per second",
        [Curve(name=f"{unit} per second", points=sorted(points.items()), bars=True)],
        end=_end(report),
        marks=_marks(report),
        from_zero=True,
        height=SMALL,
    )


def time_strip(report: RunReport) -> list[Part]:
    """Returns where the run's time went: data, chunks by phase, steps trained twice, evaluation and export."""
    seconds = {phase: sum(attempt.seconds.get(phase) or 0.0 for attempt in report.chunk_attempts) for phase in PHASES}
    lost = min(report.newest.work.lost_seconds if report.newest and report.newest.work else 0.0, seconds["train"])
    stages = {"data": 0.0, "verify": 0.0, "evaluate": 0.0, "export": 0.0}
    kinds = {"checkpoint": "verify", "evaluate": "evaluate", "gate": "evaluate", "export": "export"}
    for stage, spent in report.stages.items():
        kind = next((kinds[word] for word in kinds if stage.startswith(word)), "data")
        if not stage.startswith("train"):
            stages[kind] += spent
    rows = (
        ("data", "grey", stages["data"]),
        ("start-up", "muted", sum(seconds[phase] for phase in ("start", "import", "fetch", "build"))),
        ("restore", "orange", seconds["restore"]),
        ("training", "blue", seconds["train"] - lost),
        ("lost to interruptions", "bad", lost),
        ("save and upload", "green", seconds["save"] + seconds["upload"]),
        ("verify", "purple", stages["verify"]),
        ("evaluation", "sky", stages["evaluate"]),
        ("export", "amber", stages["export"]),
    )
    return _parts(rows, sum(spent for *_, spent in rows))


def attempt_rows(report: RunReport) -> list[TimeRow]:
    rows = _attempt_rows(report.chunks)
    longest = max((sum(seconds.values()) for _, seconds, _ in rows), default=0.0)
    return [
        TimeRow(
            label,
            _parts([(*PHASES[phase], spent) for phase, spent in seconds.items()], longest),
            sum(seconds.values()),
            note,
        )
        for label, seconds, note in rows
    ]


def bill_rows(report: RunReport) -> list[BillRow]:
    """Returns the run's bill, and the price of the same work in other ways."""
    bill = report.bill
    if bill is None:
        return []
    longest = max(bill.total, bill.on_demand, bill.script)
    parts = (
        ("steps kept", "blue", bill.kept),
        ("steps lost", "bad", bill.lost),
        ("starts", "muted", bill.starting),
        ("saving", "green", bill.saving),
        ("evaluation and export", "sky", bill.after),
    )
    rows = (
        ("This run", parts, bill.total),
        ("On demand, not interrupted", [("on demand", "grey", bill.on_demand)], bill.on_demand),
        ("Script without checkpoints, as often interrupted", [("script", "grey", bill.script)], bill.script),
    )
    return [BillRow(label, _parts(row, longest), bill.budget.cost(total)) for label, row, total in rows]


def stage_rows(report: RunReport) -> list[TimeRow]:
    stages = dict(report.stages)
    if len(stages) > MAX_STAGE_ROWS:
        stages = _merge_numbered(stages)
    longest = max(stages.values(), default=0.0)
    return [TimeRow(stage, _parts([(stage, "blue", spent)], longest), spent) for stage, spent in stages.items()]


def _parts(rows: Sequence[tuple[str, str, float]], whole: float) -> list[Part]:
    return [Part(name, color, seconds, seconds / whole) for name, color, seconds in rows if seconds > 0 and whole > 0]


def _ends(report: RunReport) -> Sequence[int]:
    """Returns the steps at which chunks end; of a run that stopped early those that it reached."""
    if report.stopped_before is None:
        return report.targets
    return [*(end for end in report.targets if end < report.steps), report.steps]


def _end(report: RunReport) -> float:
    return max([*_ends(report), *(entry["step"] for entry in report.losses[-1:]), 1])


def _marks(report: RunReport) -> list[Mark]:
    preempted, killed = (
        sorted({attempt.to_step for attempt in report.chunk_attempts if attempt.outcome == outcome})
        for outcome in ("partial", "killed")
    )
    return [
        *plots.chunk_marks(_ends(report)),
        *(Mark(at=step, color="purple") for step in preempted),
        *(Mark(at=step, color="bad", text="✗") for step in killed),
        *(Mark(at=step, color="amber") for step in report.skipped),
    ]


def kills_note(report: RunReport) -> str:
    """Returns each kill and the step that training resumed from, in words."""
    told = []
    for attempt in report.chunk_attempts:
        if attempt.outcome == "killed":
            saved = attempt.to_step - attempt.lost_steps
            start = f"resumed from step {saved:,}" if saved else "started again from the beginning"
            repeated = f": {count(attempt.lost_steps, 'step')} repeated" if attempt.lost_steps else ""
            told.append(f"Killed after step {attempt.to_step:,}, {start}{repeated}.")
    more = f" And {count(len(told) - MAX_KILLS, 'more kill')}." if len(told) > MAX_KILLS else ""
    return " ".join(told[:MAX_KILLS]) + more


def _silent(mark: Mark) -> Mark:
    return Mark(at=mark.at, start=mark.start, kind=mark.kind, color=mark.color)


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
            if attempt.outcome == "killed":
                note = f"killed after step {attempt.to_step:,}"
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


MARKS = {
    "match": ("✓", "match"),
    "absent": ("–", "absent: this run has none"),
    "of other processes": ("–", "of another number of processes: not compared"),
}
GONE = {"removed": "removed by retention", "damaged": "found damaged"}
MAX_SAMPLES = 40
NUM_OPEN_SAMPLES = 4
NUM_OPEN_CHECKPOINTS = 8
MAX_SAMPLE_CHARS = 6000


@dataclass(frozen=True, kw_only=True)
class ProofRow:
    """One checkpoint's link in the chain of digests."""

    part: ProofPart
    gone: str | None
    marks: tuple[tuple[str, str, str], ...]  # part, symbol and word; empty where nothing was restored before it
    problems: tuple[str, ...]
    is_end: bool  # of a chunk, whose files are read back from the store
    changes: tuple[str, ...]  # since the previous checkpoint: the fingerprint, and lost state of the user's code

    @property
    def tone(self) -> str:
        if self.problems:
            return "bad"
        return "good" if self.part.level == "bitwise" else "warn"

    @property
    def note(self) -> str:
        """Returns whether the stored files were verified, where they are to be."""
        if self.gone:
            return f"files verified, since {GONE[self.gone]}"
        return "files verified" if self.part.verified else "files not verified yet" if self.is_end else ""


@dataclass(frozen=True, kw_only=True)
class ResumeProof:
    rows: tuple[ProofRow, ...]
    parts: tuple[str, ...]
    tone: str
    word: str
    sentence: str


def environment(*folders: Path) -> Environment:
    """Returns a loader of this page's template, and of templates in other folders that extend it."""
    made = html.environment(*folders, Path(__file__).parent)
    made.filters |= {"clip": clip}
    return made


def render(report: RunReport, *, live: bool = False, note: str = "") -> str:
    """Returns the report as one HTML document; the same report gives the same bytes.

    `live` is the form that `baton watch` serves; `note` is a remark above the figures.
    """
    proof = read_proof(report)
    tone, sentence = verdict(report, proof)
    evaluation = report.evaluation
    samples = evaluation.samples if evaluation else []
    checkpoints = [entry.part for entry in reversed(report.proof) if not entry.gone]
    lost = sum(entry["loss"] is not None and not math.isfinite(entry["loss"]) for entry in report.losses)
    curve_note = f"{count(lost, 'logged loss', 'logged losses')} not finite and left out of the curve."
    template = environment().get_template("run_page.html.j2")
    return template.render(
        report=report,
        live=live,
        note=note,
        tone=tone,
        sentence=sentence,
        tiles=tiles(report),
        loss=loss_plot(report),
        loss_legend=loss_legend(report),
        method_plots=small_plots(report, SPECS[report.method].logged),
        optimization_plots=small_plots(report, {"learning_rate": "learning rate", "grad_norm": "gradient norm"}),
        throughput=throughput_plot(report),
        time_strip=time_strip(report),
        bill_rows=bill_rows(report),
        phases=list(PHASES.values()),
        attempt_rows=attempt_rows(report),
        stage_rows=stage_rows(report),
        checkpoints=checkpoints[:NUM_OPEN_CHECKPOINTS],
        older_checkpoints=checkpoints[NUM_OPEN_CHECKPOINTS:],
        proof=proof,
        family=list(lineage.walk(report.family)) if len(report.family) > 1 else [],
        time_note=time_note(report.chunk_attempts),
        cost_note=cost_note(report),
        curve_note=curve_note if lost else "",
        kills_note=kills_note(report),
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
    if report.state in ("failed", "canceled"):
        logged = [int(entry["step"]) for entry in report.losses[-1:]]
        reached = max([*logged, *(entry.part.step for entry in report.proof)], default=0)
        planned = max([*report.targets, report.steps])
        where = f"at step {reached:,} of {planned:,}" if planned else "before the first step"
        told = proof.sentence if loss_tone == "none" else f"{loss}; {proof.sentence}"
        ended = f"The run failed {where}. {told[:1].upper()}{told[1:]}."
        if failure := report.failure:
            ended = f"The run {'was canceled' if failure.is_cancelled else 'failed'} in {failure.stage}"
            ended += "." if report.is_bare else f", {where}."
        return "bad", ended
    if report.as_of or not report.is_trained:
        return ("warn" if report.state in ("interrupted", "stopped") else "good"), _progress(report)
    if report.evaluation and (gate := report.evaluation.gate) and not gate.passed:
        return "bad", f"The gate rejects the model, and nothing was exported: {'; '.join(gate.failed)}. {loss}."
    extent = f"in {count(report.steps, 'step')} over {count(len(_ends(report)), 'chunk')}"
    if report.stopped_before:
        spending = report.spending or {}
        why = "for its budget" if "last_step" in spending else "as evaluation did not improve"
        why += "" if spending.get("is_decayed", True) else ", before its learning rate had decayed"
        extent += f", stopped before step {report.stopped_before:,} {why}"
    tone = "warn" if loss_tone == "warn" and proof.tone == "good" else proof.tone
    return tone, f"{loss} {extent}; {proof.sentence}."


def _progress(report: RunReport) -> str:
    planned = max([*report.targets, report.steps])
    if not planned:
        return "Preparing the data." if report.is_live else f"{report.state.capitalize()}, before the first step."
    chunk = sum(end <= report.reached for end in report.targets) + 1
    if chunk > len(report.targets):
        is_well = report.state in ("running", "succeeded")
        what = "Trained" if is_well else f"{report.state.capitalize()} after training"
        place = f"all {count(planned, 'step')}"
    else:
        what = "Training" if report.is_live else report.state.capitalize()
        place = f"step {report.reached:,} of {planned:,}, chunk {chunk} of {len(report.targets)}"
    losses = plots.series(report.losses, "loss")
    return f"{what}: {place}{f'; loss {number(losses[-1][1])}' if losses else ''}."


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
    """Judges every checkpoint's entry: comparisons, the link to its parent, changes."""
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
                is_end=part.step in report.targets,
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
        changes += [f"state of {name} was not checked before" for name in own.carried]
    return tuple(changes)


def _judge(rows: Sequence[ProofRow], report: RunReport) -> tuple[str, str, str]:
    """Returns tone, one word and a clause for the whole proof; never more than the rows bear out."""
    if not rows:
        return "warn", "no proof", "no resume proof was recorded"
    # The gravest first: a broken chain, a resume that was only consistent, one unchecked, files not verified.
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
        return "warn", "consistent", f"not every resume was bit-identical: {what}"
    pending = "muted" if report.as_of else "warn"  # before a run's end nothing is at fault
    began = report.fork.step if report.fork and report.fork.warm else 0
    ends = [step for step in report.targets if step >= began]
    # An attempt may train on past the end of an earlier chunk that was left undone.
    through = {end for end in ends for attempt in report.attempts if attempt.from_step < end < attempt.to_step}
    crossed = [pair for pair in pairwise(ends) if pair[0] not in through and pair[1] <= rows[-1].part.step]
    points = {row.part.restored_step for row in restored}
    seen = sum(any(start <= point < end for point in points) for start, end in crossed)
    if seen < len(crossed):
        told = f"{seen} of {count(len(crossed), 'resume')} checked" + (", bit-identical each" if seen else "")
        return pending, "partly checked" if seen else "not checked", told
    if not restored:
        why = "nothing had to resume" if len(ends) < 2 else "no checkpoint follows a resume"
        return "good", "no resume", why
    told = _resumes(len(points & set(report.targets)), report)
    if unread := sum(not row.part.verified for row in rows if row.is_end and row.part.step >= began):
        files = f"files of {count(unread, 'checkpoint')} in the store not verified yet"
        return pending, "files not verified yet", f"{told}; {files}"
    return "good", "bit-identical", told


def _resumes(between: int, report: RunReport) -> str:
    """Returns the clause on resumes that were all bit-identical; `between` of them from chunk to chunk."""
    # An attempt before the first checkpoint, or one that nothing has followed yet, is not resumed from.
    attempts = report.chunk_attempts
    saved = [each for each in attempts if each.outcome != "killed" or each.to_step > each.lost_steps]
    cut = [each.outcome for each in saved if each.outcome in ("killed", "partial") and each is not attempts[-1]]
    after = f"after {'a kill' if 'partial' not in cut else 'an interruption'}"
    if between + len(cut) == 1:
        return f"the resume {after if cut else 'from chunk to chunk'} was bit-identical"
    parts = [f"{between:,} from chunk to chunk" if between else "", f"{len(cut):,} {after}" if cut else ""]
    return f"every resume was bit-identical: {', '.join(filter(None, parts))}"


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
        shown.append(("Reward accuracy", f"{accuracy:.0%}", remark))
    if report.reached:
        num_chunks = len(report.targets)
        begun = sum(end <= report.reached for end in report.targets) + 1
        is_over = report.is_trained or begun > num_chunks
        extent = (
            f"in {count(num_chunks, 'chunk')}"
            if is_over
            else f"of {report.targets[-1]:,}, chunk {begun} of {num_chunks}"
        )
        shown.append(("Steps", f"{report.reached:,}", extent))
    if report.pace and report.plan:
        left = (report.plan.num_steps - report.reached) * report.pace
        shown.append(("Time left", duration(left), "of training, at the pace of this chunk"))
        tokens = report.tokens.tokens / report.plan.steps_per_epoch / report.pace if report.tokens else 0.0
        told = f"{number(1 / report.pace)} steps a second"
        shown.append(("Throughput", number(tokens) if tokens else told, f"tokens a second, {told}" if tokens else ""))
    if report.trained_tokens:
        shown.append(("Tokens trained", number(report.trained_tokens), ""))
    if report.split and report.split.train is not None:
        shown.append(("Training rows", number(report.split.train), f"{number(report.split.eval)} for eval"))
    if report.evaluation and (parameters := report.evaluation.parameters):
        trained = report.newest.trainable_parameters if report.newest else None
        remark = "" if trained is None else f"{number(trained)} trained"
        shown.append(("Parameters", number(parameters), "all trained" if trained == parameters else remark))
    if total := chunk_seconds(report.chunk_attempts):
        shown.append(("Time in chunks", duration(total), f"in {count(len(report.chunk_attempts), 'attempt')}"))
        if report.newest and report.newest.fingerprint.device not in ("", "cpu"):
            hours = total * (report.newest.fingerprint.world_size or 1) / 3600
            shown.append(("GPU-hours", number(hours), "of all chunks that have ended"))
    if report.spending:
        limits = [str(report.spending[key]) for key in ("limit", "by") if report.spending[key]]
        shown.append(("Spent", str(report.spending["spent"]), f"on training, of {', '.join(limits)}"))
    if use := report.gpu_use:
        memory = f"up to {size(round(use.megabytes * 1e6))} in use" if use.megabytes else ""
        shown.append(("GPU use", "—" if use.utilization is None else f"{use.utilization:.0f}%", memory))
    return shown


def chunk_seconds(attempts: Sequence[ChunkRecord]) -> float:
    """Returns the seconds in chunk attempts."""
    return sum(attempt.seconds.get(phase) or 0.0 for attempt in attempts for phase in PHASES)


def time_note(attempts: Sequence[ChunkRecord]) -> str:
    total = chunk_seconds(attempts)
    if not total:
        return ""
    cut = sum(attempt.outcome in ("partial", "killed") for attempt in attempts)
    note = f"Shares of the time in all stages. {count(len(attempts), 'attempt')} at chunks: {duration(total)} in all."
    return f"{note} {count(cut, 'attempt')} ended early." if cut else note


def cost_note(report: RunReport) -> str:
    """Returns the known costs of chunks other than training, in one line."""
    work = report.newest.work if report.newest else None
    sent = sum(attempt.bytes_sent for attempt in report.attempts)
    received = sum(attempt.bytes_received for attempt in report.attempts)
    stalls = [seconds for attempt in report.attempts for seconds in attempt.save_stalls]
    told = [
        f"goodput {work.goodput:.0%} of the time since the first chunk began" if work else "",
        f"{count(work.lost_steps, 'step')} lost to interruptions" if work else "",
        f"{count(len(report.restarts), 'process', 'processes')} lost and started again" if report.restarts else "",
        f"{count(len(report.lost_pods), 'pod')} lost" if report.lost_pods else "",
        f"{size(sent)} sent" + (f" and {size(received)} fetched" if received else "") if sent else "",
        f"a save holds training up for {duration(statistics.median(stalls))} (median)" if stalls else "",
    ]
    line = ", ".join(part for part in told if part)
    return f"{line[:1].upper()}{line[1:]}." if line else ""


def clip(text: str | None) -> str:
    if text is None or len(text) <= MAX_SAMPLE_CHARS:
        return text or ""
    return f"{text[:MAX_SAMPLE_CHARS]}… ({count(len(text) - MAX_SAMPLE_CHARS, 'more character')})"
