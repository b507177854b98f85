"""The last stages of a retraining: the new model takes its place or not, and the turn is ended."""

from __future__ import annotations

from typing import Any

from components.retrain import outcome
from components.retrain.look import DOCUMENT
from components.shared import accepted
from components.shared.errors import BatonError
from components.shared.runs import Run, now
from components.shared.store import bundles
from components.shared.store.storage import Storage
from components.shared.turns import Turns


def settle(store: str, run_name: str) -> str:
    """Puts a run's model in the place of the one in use where the gate held, and leaves that where it did not.

    Args:
        store: Folder or bucket.
        run_name: The run, judged and exported.

    Returns:
        `promoted` or `rejected`.

    Raises:
        BatonError: the export is not what was committed, or another model was accepted meanwhile.
    """
    run = Run(Storage(store), run_name)
    about, evaluation = run.require(DOCUMENT), run.require("evaluation.json")
    gate = evaluation["gate"]
    known = {
        "run": run.name,
        "run_uri": run.uri,
        "report_uri": run.storage.uri(run.path("report.html")),
        "summary": evaluation["summary"],
        "gate": [{name: line[name] for name in ("words", "held")} for line in gate["lines"]],
    }
    if not gate["passed"]:
        words = "; ".join(line["words"] for line in gate["lines"] if not line["held"])
        outcome.reject(run.storage, about["model"], about["verdict"], {"run": run.name})
        outcome.keep(run.storage, about["model"], about["owner"], "rejected", words, **known)
        return "rejected"
    document = {**_document(run, about), **{name: known[name] for name in ("run", "run_uri", "summary")}}
    standing = accepted.add(run.storage, about["model"], about["number"], document)
    words = f"model {standing.number} of {about['model']}"
    known |= {"model_uri": standing.model_uri}
    outcome.keep(run.storage, about["model"], about["owner"], "promoted", words, **known)
    return "promoted"


def release(model: str, store: str, owner: str, error: str | None) -> None:
    """Ends the turn of a retraining, however it went; where that is not known yet, it has failed."""
    storage = Storage(store)
    if not outcome.is_kept(storage, model, owner):
        outcome.keep(storage, model, owner, "failed", error or "It ended without saying why.")
    Turns(storage, model, owner).end()


def _document(run: Run, about: dict[str, Any]) -> dict[str, Any]:
    """Returns what is kept of a model that is accepted, every byte of it read back."""
    exported = run.require("export.json")
    folder = str(exported["model_uri"]).removeprefix(f"{run.storage.uri()}/")
    prefix, _, attempt = folder.rpartition("/")
    manifest = bundles.usable_manifest(run.storage, prefix)
    if manifest is None or manifest.folder != attempt:
        raise BatonError(f"{exported['model_uri']} is not what is committed there.", remedy="Run the export again.")
    bundles.require_whole(run.storage, prefix, manifest, bundles.verify(run.storage, prefix, manifest))
    return {
        "model_uri": exported["model_uri"],
        "digest": manifest.meta["digest"],
        "data": about["data"],
        "recipe": about["recipe"],
        "learnt": [*about["learnt"], run.require("data.json")["digest"]],
        "registry": exported.get("registry"),
        "at": now(),
    }
