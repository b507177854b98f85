"""The first stage of a retraining: is there anything to do, is it our turn, and what is there to train."""

from __future__ import annotations

from dataclasses import dataclass

from baton.components.retrain import outcome
from baton.components.retrain.content import data_digest, digest_of, recipe_digest
from baton.components.shared.core import events
from baton.components.shared.recipe import Recipe, recipe_file
from baton.components.shared.runs import accepted
from baton.components.shared.runs.documents.outcome import RetrainNote
from baton.components.shared.runs.run import Run, now
from baton.components.shared.runs.turns import Holder, Turns
from baton.components.shared.store.storage import Storage


@dataclass(frozen=True)
class Decision:
    """The decision, its reason and, where there is something to train, the run and its recipe.

    Attributes:
        decision: `train`, `unchanged` or `busy`.
        words: Why, for people.
        run: Name of the run; that of the same retraining broken off before, if there was one.
        recipe: The recipe to train, as JSON.
    """

    decision: str
    words: str
    run: str = ""
    recipe: str = ""


def look(recipe: Recipe, owner: str) -> Decision:
    """Decides whether a model is trained again; where it is, nobody else retrains it until the turn is ended.

    What has not changed since the model in use was accepted, or what its gate rejected already, is not trained again.

    Args:
        recipe: The recipe.
        owner: The retraining, by a name that a second attempt at this stage has too.

    Raises:
        UserError: a source cannot be found or read.
    """
    storage = Storage(recipe.store.uri)
    result, _ = _examine(recipe, storage)
    turns = Turns(storage, recipe.name, owner)
    if result.decision == "train":
        wait = recipe.retrain.concurrency == "queue"
        if turns.take(wait=wait, expires_s=recipe.retrain.expires_seconds, on_wait=_tell_waiting):
            result, note = _examine(recipe, storage)  # the one before may have done it
            if note:
                runs = [f"{result.run}-{phase.name}" for phase in recipe.phases] or [result.run]
                Run(storage, runs[-1]).write(note.model_copy(update={"owner": owner}))
                turns.note(runs)
            else:
                turns.end()
        else:
            result = Decision("busy", f"another retraining of {recipe.name} is under way")
    if result.decision != "train":
        outcome.keep(storage, recipe.name, owner, events.Retraining(result.decision, result.words, now()))
    events.emit(events.Looked(decision=result.decision, words=result.words, run=result.run))
    return result


def _examine(recipe: Recipe, storage: Storage) -> tuple[Decision, RetrainNote | None]:
    """Compares data and recipe with those of the model in use.

    Returns:
        What there is to do, and what the run is to know of it.
    """
    in_use = accepted.newest(storage, recipe.name)
    digests = {"data": data_digest(recipe, storage), "recipe": recipe_digest(recipe)}
    before = in_use.model
    changed = [name for name in digests if before is None or getattr(before, name) != digests[name]]
    if before and not changed:
        return Decision("unchanged", f"data and recipe are those of {before.run}, accepted {before.at}"), None
    continues = recipe.retrain.start == "accepted" and changed == ["data"]
    start = [in_use.number, recipe.retrain.replay] if continues else []
    parts = recipe.phase_recipes() or [recipe]
    # Named by what it is made of: one that broke off is found again without anybody remembering its name.
    run = f"{recipe.name}-{digest_of(digests, start, [part.num_chunks for part in parts])[:12]}"
    # With the model that it is judged against: what was rejected beside one may be accepted beside the next.
    verdict = digest_of(digests, start, in_use.number, parts[-1].evaluation.model_dump(mode="json"))
    if known := outcome.rejected(storage, recipe.name, verdict):
        return Decision("unchanged", f"data and recipe are those of {known.run}, rejected {known.at}"), None
    if continues:
        assert in_use.model is not None
        document = recipe.model_dump(mode="json")
        document["model"] |= {"base": in_use.model_uri, "revision": None, "from_scratch": None, "tokenizer": None}
        document["retrain"]["learnt"] = in_use.model.learnt
        recipe = recipe_file.validate(document, origin="the accepted model")
    learnt = recipe.retrain.learnt if continues else []
    note = RetrainNote(model=recipe.name, number=in_use.number, verdict=verdict, learnt=learnt, **digests)
    words = f"{' and '.join(changed)} changed since {before.run}" if before else "no model was accepted yet"
    words += f"; continues from model {in_use.number}" if continues else ""
    return Decision("train", words, run, recipe_file.dumps(recipe)), note


def _tell_waiting(holder: Holder) -> None:
    events.emit(events.Queued(behind=holder.owner, since=holder.at))
