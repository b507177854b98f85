"""Gathers what the report shows from a run's objects in the store."""

from __future__ import annotations

import logging
import statistics
import time
from typing import Any

from components.report import judged
from components.shared import forking, lineage, recipe_file
from components.shared.checkpoint_store import CheckpointStore
from components.shared.errors import DamagedError, StoreError
from components.shared.proof import proof_part
from components.shared.runs import Run
from components.shared.store.bundles import Manifest

logger = logging.getLogger("baton")


def collect(run: Run) -> dict[str, Any]:
    """Returns the report's content; parts that a run does not have yet are None or empty."""
    recipe, records = run.recipe(), run.records()
    evaluation = run.get("evaluation.json")
    store = CheckpointStore(run)
    found = dict(store.committed())
    committed = {step: manifest for step, manifest in found.items() if isinstance(manifest, Manifest)}
    newest = max(committed, default=0)
    history = store.history(newest, committed[newest]) if committed else []
    tracking = run.get("tracking.json") or {}
    export = run.get("export.json") or {}
    plan = run.get("plan.json")
    finished = newest in committed and committed[newest].meta.get("finished", False)
    return {
        "run": run.name,
        "recipe_name": recipe.name,
        "state": _state(bool(plan and (finished or newest >= plan["num_steps"])), evaluation),
        "created": run.require("recipe.json")["created"],
        "run_uri": run.uri,
        "fork": run.get(forking.NAME),
        "family": _family(run),
        "model_uri": export.get("model_uri"),
        "headline": _headline(run, evaluation, newest, committed.get(newest)),
        "history": [entry for entry in history if "loss" in entry],
        "evals": [entry for entry in history if "eval_loss" in entry],
        "chunks": _chunks(plan, records),
        "cost": _cost(records, committed.get(newest)),
        "stages": _stages(records),
        "proof": _proof(store, found),
        "samples": evaluation["samples"] if evaluation else [],
        "exports": export.get("exports", []),
        "registry": export.get("registry"),
        "evaluation": judged.collected(run, evaluation),
        "data": {**(run.get("split.json") or {}), **_tokens(run)},
        "recipe_yaml": recipe_file.to_yaml(recipe),
        "versions": _versions(committed.get(newest)),
        "tracking": {"mlflow": tracking.get("mlflow"), "run_id": tracking.get("run_id")},
    }


def _family(run: Run) -> lineage.Family:
    """Returns the run's relatives, none where the store lets a run see nothing but itself."""
    try:
        return lineage.around(run)
    except StoreError as error:
        logger.warning("the report has no family tree: %s", error.message)
        return {}


def _state(done: bool, evaluation: dict[str, Any] | None) -> str:
    if not done:
        return "failed"
    gate = (evaluation or {}).get("gate")
    return "rejected" if gate and not gate["passed"] else "succeeded"


def _headline(run: Run, evaluation: dict[str, Any] | None, steps: int, manifest: Manifest | None) -> dict[str, Any]:
    tokens, split = run.get("tokens.json") or {}, run.get("split.json") or {}
    plan = run.get("plan.json")
    epochs = steps / plan["steps_per_epoch"] if plan else 0
    values: dict[str, Any] = {
        "steps": steps,
        "stopped_before": plan["num_steps"] if plan and manifest and manifest.meta.get("finished") else None,
        "chunks": len(plan["targets"]) if plan else None,
        "train_rows": split.get("train"),
        "eval_rows": split.get("eval"),
        "trained_tokens": round(tokens.get("tokens", 0) * epochs),
        "parameters": evaluation and evaluation["parameters"],
        "trainable_parameters": manifest and manifest.meta["trainable_parameters"],
    }
    for when in ("before", "after"):
        found = evaluation[when] if evaluation else {}
        values |= {f"eval_loss_{when}": found.get("loss")}
        values |= {f"{name}_{when}": found.get(name) for name in ("perplexity", "reward", "accuracy")}
    judged = evaluation["after"] if evaluation else {}
    return values | {name: judged.get(name) for name in ("reward_accuracy", "reward_margin")}


def _tokens(run: Run) -> dict[str, Any]:
    tokens = run.get("tokens.json") or {}
    return {name: tokens.get(name) for name in ("tokens", "truncated", "dropped")}


def _chunks(plan: dict[str, Any] | None, records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if plan is None:
        return []
    per_epoch, targets = plan["steps_per_epoch"], plan["targets"]
    attempts = _attempts(records)
    worked = {record["chunk"] for record in attempts if record["outcome"] != "already_done"}
    spare = sorted(chunk for chunk in worked if chunk > len(targets))
    return [
        {
            "index": index,
            "target_step": targets[min(index, len(targets)) - 1],
            "spare": index > len(targets),
            "attempts": [_attempt(record, per_epoch) for record in attempts if record["chunk"] == index],
        }
        for index in (*range(1, len(targets) + 1), *spare)
    ]


def _attempts(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [record for record in records if "chunk" in record and "outcome" in record]


def _attempt(record: dict[str, Any], steps_per_epoch: int) -> dict[str, Any]:
    steps, trained = record["to_step"] - record["from_step"], record["seconds"].get("train", 0.0)
    rate = steps / trained if trained > 0 and steps else None
    return {
        "from_step": record["from_step"],
        "to_step": record["to_step"],
        "outcome": record["outcome"],
        "seconds": record["seconds"],
        "steps_per_second": rate,
        "tokens_per_second": rate and rate * record["tokens"] / steps_per_epoch,
    }


def _cost(records: list[dict[str, Any]], newest: Manifest | None) -> dict[str, Any]:
    """Returns what training in chunks cost: time, steps trained in vain, bytes, and how long saving held it up."""
    attempts, work = _attempts(records), newest.meta["work"] if newest else {}
    stalls = [seconds for attempt in attempts for seconds in attempt.get("save_stalls", ())]
    return {
        "goodput": work.get("goodput"),
        "lost_steps": work.get("lost_steps"),
        "bytes_sent": sum(attempt.get("bytes_sent", 0) for attempt in attempts),
        "bytes_received": sum(attempt.get("bytes_received", 0) for attempt in attempts),
        "save_stall": statistics.median(stalls) if stalls else None,
    }


def _stages(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns seconds per stage in the order of the pipeline, attempts added up."""
    seconds: dict[str, float] = {}
    for record in sorted(records, key=_place):
        kind = record["stage"].rpartition("-")[0] if "chunk" in record else record["stage"]
        name = kind.replace("-", " ") + (f" {record['chunk']}" if "chunk" in record else "")
        seconds[name] = seconds.get(name, 0.0) + record.get("total_seconds", record.get("seconds", 0.0))
    return [{"name": name, "seconds": value} for name, value in seconds.items()]


def _place(record: dict[str, Any]) -> tuple[int, int, bool]:
    """Orders stages as the pipeline has them: each chunk's checkpoint behind it."""
    order = ("data-split", "tokenize", "lr-find", "train-chunk", "evaluate", "gate", "export")
    name = record["stage"].rpartition("-")[0] if "chunk" in record else record["stage"]
    return (order.index("train-chunk" if "chunk" in record else name), record.get("chunk", 0), name != "train-chunk")


def _proof(store: CheckpointStore, found: dict[int, Manifest | DamagedError]) -> list[dict[str, Any]]:
    """Returns a row for each checkpoint that is there, and for each that was read back before it went."""
    parts = [store.run.require(f"proof/chunk-{chunk:03d}.json") for chunk in sorted(store.proven_chunks())]
    read_back = {(part["step"], part["digest"]) for part in parts}
    rows = {part["step"]: {**part, "gone": "damaged" if part["step"] in found else "removed"} for part in parts}
    for step, manifest in found.items():
        if isinstance(manifest, Manifest):
            row = proof_part(store, step, manifest)
            rows[step] = {**row, "verified": (step, row["digest"]) in read_back, "gone": None}
    return [rows[step] for step in sorted(rows)]


def _versions(manifest: Manifest | None) -> dict[str, str]:
    if manifest is None:
        return {}
    from components.shared.fingerprint import LIBRARIES

    return {name: manifest.meta["fingerprint"][name] for name in ("python", *LIBRARIES)}


def write_report(run_uri: str) -> dict[str, Any]:
    """Renders the run's report into the store and hands it to the tracking run.

    Returns:
        `report_uri` and the `html`.
    """
    import tempfile

    from components.report.page import render
    from components.shared import events, tracking

    started = time.time()
    run = Run.open(run_uri)
    html = render(collect(run))
    run.storage.write(run.path("report.html"), html.encode())
    with tempfile.TemporaryDirectory(prefix="baton-report-") as folder:
        path = f"{folder}/report.html"
        with open(path, "w", encoding="utf-8") as file:
            file.write(html)
        tracking.finish(run, path)
    uri = run.storage.uri(run.path("report.html"))
    run.put("report.json", {"report_uri": uri, "seconds": time.time() - started})
    events.emit("report", uri=uri)
    return {"report_uri": uri, "html": html}
