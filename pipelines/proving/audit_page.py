"""The page of `baton audit`: what was proven of a chunk, where, and what a difference can mean."""

from __future__ import annotations

from pathlib import Path

from baton.components.shared.pages import rendering
from baton.components.shared.pages.rendering import count
from baton.pipelines.proving.audit import Audit


def write(audit: Audit, path: str) -> None:
    """Writes what `audit` returned as one HTML file."""
    Path(path).write_text(render(audit), encoding="utf-8")


def render(audit: Audit) -> str:
    """Returns the page as one HTML document, which loads nothing."""
    return (
        rendering.environment(Path(__file__).parent)
        .get_template("audit.html.j2")
        .render(
            audit=audit,
            tone="good" if audit["equal"] else "bad",
            proven=proven(audit),
            meaning=meaning(audit),
            first=first(audit),
            parts=[(name, audit["found"].get(name), digest) for name, digest in sorted(audit["expected"].items())],
            took=rendering.duration(audit["seconds"]),
        )
    )


def proven(audit: Audit) -> list[str]:
    """Returns what the audit has shown, and what it has not."""
    if audit["data"]:
        return ["The chunk was not trained again: what it would have been trained on is not what the run has."]
    rows = (
        "The rows were read and tokenized anew from the recipe and data of whoever audits, and are the run's."
        if audit["rows"] == "recipe"
        else "The rows are the tokens in the run's own store; that they are those of the recipe was not looked at."
    )
    begin = (
        f"It began with the run's checkpoint of step {audit['start']:,}, whose own making is not part of this audit."
        if audit["start"]
        else "It began at the run's start, with the base model that the recipe names."
    )
    compared = (
        f"Compared bit for bit: {count(audit['losses'], 'logged value')}, {count(audit['tensors'], 'tensor')} with "
        f"{count(audit['numbers'], 'number')} in {count(audit['files'], 'file')}, weights and optimizer among them."
    )
    signed = (
        f"What it began with and what it ended on are signed by the key {audit['signed_by']}."
        if audit["signed_by"]
        else "Whether anybody has signed the checkpoints was not asked (--key)."
    )
    return [begin, rows, compared, signed]


def meaning(audit: Audit) -> list[str]:
    """Returns what a difference can mean here."""
    if audit["equal"]:
        return []
    if audit["data"]:
        lines = ["The data at hand, or a library that turns rows into tokens, is another than when the run was begun."]
        return [*lines, "Or the run was not trained on what its recipe says."]
    if audit["differences"]:
        return [
            "This machine is not the run's in what bits depend on (below). Sums that are rounded otherwise give other "
            "last digits, which grow from step to step: such a difference alone proves nothing against the run.",
            "Audit it on the machine and image that its fingerprint names to tell the two apart.",
        ]
    return [
        "This machine has the run's fingerprint, so the same chunk gives the same bits here. Then the chunk was "
        "trained with other rows, another setting or other code than the run says, or what it saved was changed.",
        "A setting that is wrong from the start shows in the loss after the first step that it changes; a row, in the "
        "step that it is part of; a checkpoint that was changed, in its tensors and in no loss.",
        "A device that computes wrongly gives the same picture: audit once more, on another one.",
    ]


def first(audit: Audit) -> list[list[tuple[str, str]]]:
    """Returns the first logged value that differs, and the first loss, as lines with a name and a value."""
    entries = [audit["first_difference"], audit["first_loss"]]
    return [
        [
            ("Step", f"{entry['step']:,}"),
            ("Value", entry["name"]),
            ("In the run", repr(entry["expected"])),
            ("Trained again", repr(entry["found"])),
        ]
        for number, entry in enumerate(entries)
        if entry is not None and entry not in entries[:number]
    ]
