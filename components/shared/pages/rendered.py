"""What a run's pages say of rows that became turns of a conversation, and one of them."""

from __future__ import annotations

from typing import TypedDict

from baton.components.shared.runs.documents.data import Tokens, TokensMeta
from baton.components.shared.runs.run import Run
from baton.components.shared.store import bundles


class Rendered(TypedDict):
    """In which template rows are rendered."""

    told: str
    row: str
    """The first training sequence in words, what is trained in marks; empty where it is not shown."""


def of(run: Run) -> Rendered | None:
    """Returns what tokenize has noted, None where rows are rendered as they came."""
    tokens = run.get(Tokens.NAME) or {}
    if not tokens.get("rendered"):
        return None
    prefix = tokens["prefix"]
    manifest = bundles.read_manifest(run.storage, prefix)
    meta = manifest and TokensMeta.read(manifest.meta, run.storage.uri(prefix))
    return {"told": tokens["rendered"], "row": next(iter(meta.first.get("train", ())), "") if meta else ""}


def told(rendered: Rendered | None) -> Rendered | None:
    """Returns the same without the row."""
    return rendered and {**rendered, "row": ""}
