"""The run of a script in the store: begun by the first of its processes, joined by the others."""

from __future__ import annotations

import logging

from baton.components.shared.core.document import Json
from baton.components.shared.core.errors import OtherRunError, UserError
from baton.components.shared.recipe import recipe_file
from baton.components.shared.runs.documents.attached import Attached
from baton.components.shared.runs.documents.data import RunHead
from baton.components.shared.runs.formats import OF_RUN, Made
from baton.components.shared.runs.run import Run, check_name, now
from baton.components.train_chunk.attached import facts

logger = logging.getLogger("baton")


def opened(run_uri: str) -> Run:
    """Returns a run that is one of a script, or new, and whose store can be written.

    Raises:
        UserError: it is that of a recipe.
    """
    run = Run.open(run_uri)
    check_name(run.name)
    run.storage.check()
    if run.read(RunHead):
        raise UserError(
            f"run {run.name!r} is that of a recipe.", remedy="Attach to a run of another name, or `baton run` goes on."
        )
    return run


def begin_or_join(run: Run, found: Json, section: Json) -> None:
    """Starts a run, or joins one that was begun with the same.

    Raises:
        OtherRunError: it was begun with something else, which is named, or by a Baton that this one does not continue.
    """
    ours = Attached(
        name=run.name, created=now(), facts=found, chunks=section, script=facts.script(), made=Made.here(OF_RUN)
    )
    if run.put_new(Attached.NAME, ours.to_json()):
        return
    before = run.need(Attached)
    before.made.require_continued(f"run {run.name!r}", OF_RUN)
    if changed := recipe_file.changed_paths(before.facts, ours.facts):
        hint = " Seed the generators before the model is built." if _only_weights(changed) else ""
        raise OtherRunError(
            f"run {run.name!r} was begun with something else: {'; '.join(changed)}.",
            remedy=f"Set these back, or attach to a run of another name.{hint}",
        )
    if before.script.sha256 and before.script.sha256 != ours.script.sha256:
        logger.warning("the script has changed since run %s was begun; what is compared is the same", run.name)


def _only_weights(changed: list[str]) -> bool:
    return all(line.startswith("model.begins_with") for line in changed)


def number(run: Run, step: int) -> int:
    """Returns the number of a chunk that was named by its step: one more than those done before it."""
    done = [record.chunk for record in run.attempts() if record.outcome == "done" and record.to_step < step]
    return max(done, default=0) + 1
