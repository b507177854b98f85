"""Where the model goes at the end: a repository on Hugging Face's hub."""

from __future__ import annotations

import re

from baton.pipelines.importing.draft import Draft
from baton.pipelines.importing.kinds import read, text

REPO = re.compile(r"[\w.-]+/[\w.-]+")
"""What `export.hub.repo` takes."""

ONCE = "pushed once, at the end, when a gate held"


def push(draft: Draft, key: str) -> bool:
    """Sets `export.hub`, and tells whether the key's value is a repository that it takes.

    Args:
        draft: The recipe in the making.
        key: Key with the repository.
    """
    repo = read(draft, key, text, "")
    if not REPO.fullmatch(repo):
        draft.left(key, "without an organisation; give export.hub.repo as organisation/name")
        return False
    draft.put("export.hub.repo", repo, key)
    revision = read(draft, "hub_revision", text)
    if revision:
        draft.put("export.hub.revision", revision, "hub_revision")
    if draft.look("adapter") is not None:
        draft.changed(key, "the whole model is pushed, the adapter folded in; alone: export.formats: [adapter]")
    draft.changed(key, f"{ONCE}, with HF_TOKEN in the environment of the export stage")
    if draft.get("hub_strategy", "end") == "end":
        draft.carry("export.hub", "hub_strategy")
    else:
        draft.left("hub_strategy", ONCE)
    return True
