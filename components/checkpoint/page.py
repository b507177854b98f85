"""A chunk's part of the resume proof, as the Kubeflow page shows it."""

from __future__ import annotations

from typing import Any

PHASES = ("start", "import", "fetch", "build", "restore", "train", "save", "upload")
"""In the order in which a chunk goes through them."""


def as_markdown(part: dict[str, Any] | None) -> str:
    """Returns a chunk's part of the proof in Markdown.

    Args:
        part: What `promote` returned.
    """
    if part is None:
        return (
            "# Resume proof\n\nThis chunk left no checkpoint: its machine was taken away before the first, and the "
            "next goes on, or the run is a fork that began behind it.\n"
        )
    parent = f"step {part['parent_step']}, `{part['parent_digest']}`" if part["parent_digest"] else "the start model"
    if fork := part.get("forked_from"):
        parent = f"`{fork['run_uri']}` at step {fork['step']}, whose fork this run is"
    work = part["work"]
    facts = [
        f"own digest: `{part['digest']}`",
        f"continues: {parent}",
        f"chain: `{part['chain']}`",
        f"level: **{part['level']}**",
        f"read back and verified: {part['bytes']:,} bytes in {part['verify_seconds']:.1f} s, at `{part['uri']}`",
        f"goodput since the run began: {work['goodput']:.0%} of the time went into steps that are kept",
        f"work lost to preemption so far: {work['lost_steps']} steps, about {work['lost_seconds']:.0f} s",
    ]
    sections = [
        f"# Resume proof, chunk {part['chunk']}: step {part['step']}",
        "\n".join(f"- {fact}" for fact in facts),
        *(f"> **Passed over:** {reason}" for reason in part["skipped"]),
        _table(["restored in this chunk", "compared before the first step"], (part["checked"] or {}).items()),
        _attempts(part["attempts"]),
        _table(["fingerprint", ""], part["fingerprint"].items()),
        _table(["step taken away by retention", "because", "bytes"], _removed(part["removed"])),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _attempts(attempts: list[dict[str, Any]]) -> str:
    """Returns a table with a line per attempt: where its seconds went and what it moved."""
    phases = [phase for phase in PHASES if any(phase in attempt["seconds"] for attempt in attempts)]
    rows = [
        (
            f"{attempt['from_step']} → {attempt['to_step']}",
            attempt["outcome"],
            *(f"{attempt['seconds'].get(phase, 0.0):.1f}" for phase in phases),
            f"{attempt.get('bytes_received', 0) / 1e6:.1f}",
            f"{attempt.get('bytes_sent', 0) / 1e6:.1f}",
            f"{attempt.get('peak_bytes', 0) / 1e6:.0f}",
        )
        for attempt in attempts
    ]
    return _table(["steps", "outcome", *(f"{phase}, s" for phase in phases), "MB in", "MB out", "peak MB"], rows)


def _removed(removed: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [(entry["step"], entry["reason"], f"{entry['bytes']:,}") for entry in removed]


def _table(head: list[str], rows: Any) -> str:
    lines = ["| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in rows]
    if not lines:
        return ""
    return "\n".join(["| " + " | ".join(head) + " |", "|" + "---|" * len(head), *lines])
