"""A run that was trained for three steps and has come to its end: what the export stage finds in the store."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from baton.checkpoint.store import CheckpointMeta, CheckpointStore
from baton.models import loading
from baton.runs.plan import make_plan
from baton.runs.run import Run
from baton.store import bundle
from baton.store.storage import Storage
from tests.support import tiny

ROWS = [{"prompt": pair["prompt"], "completion": pair["chosen"]} for pair in tiny.PAIRS]
DIGEST, CHAIN = "5" * 64, "c" * 64


def ended(folder: Path, base: str, name: str = "r", **sections: Any) -> Run:
    """Trains a tiny model as a chunk does and commits its checkpoint.

    Args:
        folder: Where store and files go.
        base: The base model.
        name: Name of the run.
        sections: Of the recipe.
    """
    recipe = tiny.recipe(base, **sections)
    rows = tiny.PAIRS if recipe.training.method == "reward" else ROWS
    storage, local = Storage(str(folder / "store")), folder / f"local-{name}"
    run = Run(storage, name)
    run.create(recipe)
    (local / "split").mkdir(parents=True)
    (local / "split/eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:4]), encoding="utf-8")
    bundle.publish(storage, f"data/{name}/split", str(local / "split"), kind="split", meta={})
    run.put("data.json", {"digest": name})
    run.put("split.json", {"train": 20, "eval": 4})
    plan = make_plan(recipe, len(rows))
    run.put("plan.json", plan.to_json())
    trainer = tiny.trainer(recipe, tiny.tokens(recipe, rows), local)
    trainer.train()
    trainer.model.save_pretrained(local / "checkpoint")
    loading.build_tokenizer(recipe, base).save_pretrained(local / "checkpoint")
    (local / "checkpoint/optimizer.pt").write_bytes(b"not for anyone else")
    writer = CheckpointStore(run).open_writer(plan.num_steps)
    writer.send(str(local / "checkpoint"))
    CheckpointStore(run).commit(plan.num_steps, writer, CheckpointMeta(digest=DIGEST, chain=CHAIN))
    return run
