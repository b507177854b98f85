"""A chunk's part of the resume proof, as the Kubeflow page shows it."""

from __future__ import annotations

from collections.abc import Iterable

from baton.components.shared.core.state import PHASES_OF_A_CHUNK
from baton.components.shared.runs.documents.training import ProofPart


def as_markdown(part: ProofPart | None) -> str:
    """Returns a chunk's part of the proof in Markdown.

    Args:
        part: What `promote` returned.
    """
    if part is None:
        return (
            "# Resume proof\n\nThis chunk left no checkpoint: it was preempted before the first, and the "
            "next resumes, or the run is a fork that began after it.\n"
        )
    parent = f"step {part.parent_step}, `{part.parent_digest}`" if part.parent_digest else "the start model"
    if fork := part.forked_from:
        parent = f"`{fork.run_uri}` at step {fork.step}, whose fork this run is"
    work = part.work
    facts = [
        f"own digest: `{part.digest}`",
        f"continues: {parent}",
        f"chain: `{part.chain}`",
        f"level: **{part.level}**",
        f"read back and verified: {part.bytes:,} bytes in {part.verify_seconds or 0.0:.1f} s, at `{part.uri}`",
        f"goodput since the run began: {work.goodput:.0%} of the time went into steps that are kept",
        f"work lost to preemption so far: {work.lost_steps} steps, about {work.lost_seconds:.0f} s",
        f"processes that were lost and started again in their pod so far: {work.restarts}",
    ]
    if part.hooks:
        facts += [f"state of `{name}` is carried, `{digest}`" for name, digest in part.hooks.carried.items()]
        facts += [f"**state of `{name}` is not carried**: {why}" for name, why in part.hooks.lost.items()]
    phases = [phase for phase in PHASES_OF_A_CHUNK if any(phase in attempt.seconds for attempt in part.attempts)]
    rows = [
        (
            f"{attempt.from_step} → {attempt.to_step}",
            attempt.outcome,
            *(f"{attempt.seconds.get(phase, 0.0):.1f}" for phase in phases),
            f"{attempt.bytes_received / 1e6:.1f}",
            f"{attempt.bytes_sent / 1e6:.1f}",
            f"{(attempt.peak_bytes or 0) / 1e6:.0f}",
        )
        for attempt in part.attempts
    ]
    sections = [
        f"# Resume proof, chunk {part.chunk}: step {part.step}",
        "\n".join(f"- {fact}" for fact in facts),
        *(f"> **Passed over:** {reason}" for reason in part.skipped),
        _table(["restored in this chunk", "compared before the first step"], (part.checked or {}).items()),
        _table(["steps", "outcome", *(f"{phase}, s" for phase in phases), "MB in", "MB out", "peak MB"], rows),
        _table(["fingerprint", ""], part.fingerprint.to_json().items()),
        _table(
            ["step removed by retention", "because", "bytes"],
            [(entry.step, entry.reason, f"{entry.bytes:,}") for entry in part.removed],
        ),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _table(head: list[str], rows: Iterable[Iterable[object]]) -> str:
    lines = ["| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in rows]
    if not lines:
        return ""
    return "\n".join(["| " + " | ".join(head) + " |", "|" + "---|" * len(head), *lines])
