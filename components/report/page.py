"""The run report: one HTML file that needs no network and no script.

Everything that comes from a run (samples, recipe, names) is untrusted and escaped by the template.
What the page says about the run is decided here, and it claims exactness only where it was checked.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from markupsafe import Markup

from baton.components.report import figures, judged
from baton.components.shared.core.state import PARTS
from baton.components.shared.pages import rendering, tree_figure
from baton.components.shared.pages.rendering import count, duration, number, size

MARKS = {"match": ("✓", "match"), "absent": ("–", "absent: this run has none")}
MAX_SAMPLES = 40
NUM_OPEN_SAMPLES = 4
MAX_SAMPLE_CHARS = 6000

Report = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class ProofRow:
    """One checkpoint's link in the chain of digests."""

    entry: Mapping[str, Any]
    marks: tuple[tuple[str, str, str], ...]
    """Part, symbol and word; empty where nothing was restored before this checkpoint."""
    problems: tuple[str, ...]
    changes: tuple[str, ...]
    """What the fingerprint has that the checkpoint before it had not."""

    @property
    def tone(self) -> str:
        if self.problems:
            return "bad"
        return "good" if self.entry["level"] == "bitwise" else "warn"


@dataclass(frozen=True, kw_only=True)
class Proof:
    """The resume proof as the page shows it."""

    rows: tuple[ProofRow, ...]
    parts: tuple[str, ...]
    tone: str
    word: str
    sentence: str


def render(report: dict[str, Any]) -> str:
    """Returns the report as one HTML document; the same report gives the same bytes."""
    environment = rendering.environment(Path(__file__).parent)
    environment.filters["clip"] = clip
    proof = read_proof(report)
    tone, sentence = verdict(report, proof)
    samples = report["samples"][:MAX_SAMPLES]
    return environment.get_template("template.html.j2").render(
        report=report,
        tone=tone,
        sentence=sentence,
        tiles=tiles(report),
        plots=figures.draw(report),
        proof=proof,
        family=family(report),
        time_note=time_note(report["chunks"]),
        cost_note=cost_note(report["cost"]),
        curve_note=curve_note(report["history"]),
        figures=judged.figures(report["evaluation"]) if report["evaluation"] else [],
        example_pages=judged.example_pages(report["evaluation"]["examples"]) if report["evaluation"] else [],
        samples=samples[:NUM_OPEN_SAMPLES],
        more_samples=samples[NUM_OPEN_SAMPLES:],
        num_hidden_samples=len(report["samples"]) - len(samples),
    )


def family(report: Report) -> Markup | None:
    """Returns the tree of the run's relatives, None where it has none."""
    members = report.get("family") or {}
    return tree_figure.draw(members, report["run"]) if len(members) > 1 else None


def verdict(report: Report, proof: Proof) -> tuple[str, str]:
    """Returns the page's tone (good, warn, bad) and the one sentence that sums the run up."""
    loss_tone, loss = loss_clause(report["headline"])
    num_steps, num_chunks = report["headline"]["steps"], report["headline"]["chunks"]
    if report["state"] == "failed":
        reached, planned = progress(report)
        where = f"at step {reached:,} of {planned:,}" if planned else "before the first step"
        told = proof.sentence if loss_tone == "none" else f"{loss}; {proof.sentence}"
        return "bad", f"The run failed {where}. {told[:1].upper()}{told[1:]}."
    if report["state"] == "rejected":
        lines = [line["words"] for line in report["evaluation"]["gate"]["lines"] if not line["held"]]
        return "bad", f"The gate rejects the model, and nothing was exported: {'; '.join(lines)}. {loss}."
    extent = f"in {count(num_steps, 'step')} over {count(num_chunks, 'chunk')}" if num_steps else "in an unknown span"
    if report["headline"].get("stopped_before"):
        extent += f", stopped before step {report['headline']['stopped_before']:,} as evaluation did not improve"
    tone = "warn" if loss_tone == "warn" and proof.tone == "good" else proof.tone
    return tone, f"{loss} {extent}; {proof.sentence}."


def loss_clause(headline: Mapping[str, Any]) -> tuple[str, str]:
    """Returns how what was evaluated moved: a tone (good, warn, none where not measured) and the words."""
    for key, label in (("reward", "Reward"), ("accuracy", "Accuracy on held-out pairs")):
        old, new = headline.get(f"{key}_before"), headline.get(f"{key}_after")
        if old is not None and new is not None:
            verb = "rose" if new > old else "fell" if new < old else "stayed"
            moved = f"from {old:.3g} to {new:.3g}" if new != old else f"at {new:.3g}"
            return "good" if new > old else "warn", f"{label} {verb} {moved}"
    before, after = headline.get("eval_loss_before"), headline.get("eval_loss_after")
    if after is not None and not math.isfinite(after):
        return "warn", "Eval loss is no longer a finite number"
    if before is None or after is None or not math.isfinite(before):
        known = before if after is None else after
        if known is None:
            return "none", "Trained, with no eval loss measured,"
        return "good", f"Eval loss was {known:.2f} {'before' if after is None else 'after'} training"
    old, new = headline.get("perplexity_before"), headline.get("perplexity_after")
    perplexity = (
        f" (perplexity {number(old)}\N{NO-BREAK SPACE}→\N{NO-BREAK SPACE}{number(new)})"
        if old is not None and new is not None
        else ""
    )
    if abs(after - before) < 0.005:
        return "warn", f"Eval loss stayed at {after:.2f}{perplexity}"
    verb = "fell" if after < before else "rose"
    tone = "good" if after < before else "warn"
    return tone, f"Eval loss {verb} from {before:.2f} to {after:.2f}{perplexity}"


def read_proof(report: Report) -> Proof:
    """Judges every checkpoint's entry: what was compared, whether it hangs on its parent, what changed."""
    entries = sorted(report["proof"], key=lambda entry: entry["step"])
    digests = {entry["step"]: entry["digest"] for entry in entries}
    rows: list[ProofRow] = []
    for position, entry in enumerate(entries):
        checked = entry["checked"] or {}
        marks = tuple((part, *MARKS.get(result, ("✗", result))) for part, result in checked.items())
        wrong = {part: result for part, result in checked.items() if result not in MARKS}
        problems = [f"{part} {'differs' if problem == 'mismatch' else problem}" for part, problem in wrong.items()]
        if digests.get(entry["parent_step"], entry["parent_digest"]) != entry["parent_digest"]:
            problems.append(f"parent is not the checkpoint of step {entry['parent_step']:,}")
        before = entries[position - 1]["fingerprint"] or {} if position else {}
        now = entry["fingerprint"] or {}
        changes = tuple(f"{key} {before[key]} → {now[key]}" for key in now if before.get(key, now[key]) != now[key])
        rows.append(ProofRow(entry=entry, marks=marks, problems=tuple(problems), changes=changes))
    problem = {part for row in rows for part, _, _ in row.marks}
    parts = tuple(part for part in PARTS if part in problem) + tuple(sorted(problem - set(PARTS)))
    tone, word, sentence = judge(rows, report)
    return Proof(rows=tuple(rows), parts=parts, tone=tone, word=word, sentence=sentence)


def judge(rows: Sequence[ProofRow], report: Report) -> tuple[str, str, str]:
    """Returns tone, one word and a clause for the whole proof; never more than the rows bear out."""
    if not rows:
        return "warn", "no proof", "no resume proof was recorded"
    broken = [row for row in rows if row.problems]
    if broken:
        others = f" and {count(len(broken) - 1, 'more checkpoint')}" if len(broken) > 1 else ""
        where = f"step {broken[0].entry['step']:,}: {broken[0].problems[0]}{others}"
        return "bad", "proof broken", f"the resume proof does not hold ({where})"
    restored = [row for row in rows if row.marks]
    changed = [row for row in rows if row.entry["level"] != "bitwise"]
    if changed:
        reasons = list(dict.fromkeys(change for row in changed for change in row.changes))
        reason = f" ({', '.join(reasons[:3])})" if reasons else ""
        what = f"{len(changed)} of {count(len(rows), 'checkpoint')} only consistent{reason}"
        return "warn", "consistent", f"not every hand-over was bit-exact: {what}"
    fork = report.get("fork") or {"warm": False}
    began = fork["step"] if fork["warm"] else 0
    ends = [chunk["target_step"] for chunk in report["chunks"] if not chunk["spare"] and chunk["target_step"] >= began]
    crossed = [
        (start, end)
        for start, end in pairwise(ends)
        if end <= rows[-1].entry["step"] and not ran_through(report, start)
    ]
    points = {row.entry["restored_step"] for row in restored}
    seen = sum(any(start <= point < end for point in points) for start, end in crossed)
    if seen < len(crossed):
        told = f"{seen} of {count(len(crossed), 'hand-over')} checked" + (", bit-exact each" if seen else "")
        return "warn", "partly checked" if seen else "not checked", told
    if not restored:
        why = "nothing had to be handed over" if len(ends) < 2 else "no checkpoint follows a hand-over"
        return "good", "no hand-over", why
    which = "the one hand-over" if len(points) == 1 else "every hand-over"
    unread = sum(not row.entry["verified"] for row in rows if row.entry["step"] in ends)
    if unread:
        told = f"{which} was bit-exact, with {count(unread, 'chunk end')} not yet read back from the store"
        return "warn", "not read back", told
    return "good", "bit-exact", f"{which} was bit-exact"


def ran_through(report: Report, step: int) -> bool:
    """Tells whether an attempt trained on past the end of a chunk before its own that had left it undone."""
    attempts = [attempt for chunk in report["chunks"] for attempt in chunk["attempts"]]
    return any(attempt["from_step"] < step < (attempt["to_step"] or 0) for attempt in attempts)


def progress(report: Report) -> tuple[int, int]:
    """Returns the last step that was reached and the last that was planned."""
    reached = [entry["step"] for entry in report["history"][-1:]] + [entry["step"] for entry in report["proof"]]
    planned = [chunk["target_step"] for chunk in report["chunks"]] + [report["headline"]["steps"] or 0]
    return max(reached, default=0), max(planned)


def tiles(report: Report) -> list[tuple[str, str, str]]:
    """Returns label, value and a remark for each key figure that is known."""
    head = report["headline"]
    shown: list[tuple[str, str, str]] = []
    for label, key in (
        ("Reward", "reward"),
        ("Accuracy", "accuracy"),
        ("Eval loss", "eval_loss"),
        ("Perplexity", "perplexity"),
    ):
        before, after = head.get(f"{key}_before"), head.get(f"{key}_after")
        if before is not None or after is not None:
            remark = "not measured before" if before is None else f"before: {number(before)}"
            value, remark = (before, "before training") if after is None else (after, remark)
            shown.append((label, number(value), remark))
    if head.get("reward_accuracy") is not None:
        remark = f"margin {number(head['reward_margin'])} nats"
        shown.append(("Preference accuracy", f"{head['reward_accuracy']:.0%}", remark))
    if head["steps"]:
        shown.append(("Steps", f"{head['steps']:,}", f"in {count(head['chunks'], 'chunk')}"))
    if head["trained_tokens"]:
        shown.append(("Tokens trained", number(head["trained_tokens"]), ""))
    if head["train_rows"] is not None:
        shown.append(("Training rows", number(head["train_rows"]), f"{number(head['eval_rows'])} for eval"))
    if head["parameters"]:
        trained = head["trainable_parameters"]
        remark = "" if trained is None else f"{number(trained)} trained"
        remark = "all trained" if trained == head["parameters"] else remark
        shown.append(("Parameters", number(head["parameters"]), remark))
    total, train = chunk_seconds(report["chunks"])
    if total:
        shown.append(("Time in chunks", duration(total), f"{train / total:.0%} of it training"))
    return shown


def chunk_seconds(chunks: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Returns all seconds spent in chunk attempts, and those spent training."""
    phases = [attempt["seconds"] or {} for chunk in chunks for attempt in chunk["attempts"]]
    total = sum(part.get(phase) or 0.0 for part in phases for phase in figures.PHASES)
    return total, sum(part.get("train") or 0.0 for part in phases)


def time_note(chunks: Sequence[Mapping[str, Any]]) -> str:
    total, train = chunk_seconds(chunks)
    if not total:
        return ""
    attempts = [attempt for chunk in chunks for attempt in chunk["attempts"]]
    cut = sum(attempt["outcome"] in ("partial", "failed") for attempt in attempts)
    note = f"{count(len(attempts), 'attempt')}, {duration(total)} in all, {train / total:.0%} training."
    return f"{note} {count(cut, 'attempt')} ended early." if cut else note


def cost_note(cost: Mapping[str, Any]) -> str:
    """Returns what chunks cost beside training, in one line; parts that are not known are left out."""
    sent, received, stall = cost["bytes_sent"], cost["bytes_received"], cost["save_stall"]
    told = [
        "" if cost["goodput"] is None else f"goodput {cost['goodput']:.0%} since the run began",
        "" if cost["lost_steps"] is None else f"{count(cost['lost_steps'], 'step')} lost to interruptions",
        f"{size(sent)} sent" + (f" and {size(received)} fetched" if received else "") if sent else "",
        "" if stall is None else f"a save holds training up for {duration(stall)} (median)",
    ]
    line = ", ".join(part for part in told if part)
    return f"{line[:1].upper()}{line[1:]}." if line else ""


def curve_note(history: Sequence[Mapping[str, Any]]) -> str:
    lost = sum(entry.get("loss") is not None and not math.isfinite(entry["loss"]) for entry in history)
    return f"{count(lost, 'logged loss', 'logged losses')} not finite and left out of the curve." if lost else ""


def clip(text: str | None) -> str:
    if text is None or len(text) <= MAX_SAMPLE_CHARS:
        return text or ""
    return f"{text[:MAX_SAMPLE_CHARS]}… ({count(len(text) - MAX_SAMPLE_CHARS, 'more character')})"
