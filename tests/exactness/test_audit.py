"""A chunk trained again by a stranger: equal where the run is honest, and the right place where it is not."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from baton.checkpoint import retention
from baton.checkpoint.store import CheckpointStore
from baton.cli.app import app
from baton.kfp import processes
from baton.local import forkserver
from baton.recipe import load
from baton.recipe.run import Keep
from baton.runs.run import Run, state_identity
from baton.store.storage import Storage

SCRATCH = Path(__file__).parents[1] / "recipes/scratch.yaml"
SETTINGS = (
    *("training.epochs=null", "training.max_steps=9", "chunks.count=3", "chunks.keep.audit=true", "chunks.keep.last=1"),
    *("evaluation={every: null}", "training.log_every=1"),
)
TARGETS = (3, 6, 9)


def _chunk(run: Run, index: int) -> None:
    processes.run(processes.TRAIN_CHUNK, [run.uri, str(index)], print, forkserver.launcher())


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data, which a stranger has too."""
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    lines = [
        {"prompt": f"What is {n} and {n % 7}?", "completion": f"it is {n + n % 7}." * (n % 3 + 1)} for n in range(40)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def recipe_path(tmp_path_factory: pytest.TempPathFactory, rows: Path) -> Path:
    folder = tmp_path_factory.mktemp("recipe")
    text = SCRATCH.read_text().replace('"builtin:stdlib-docs"', json.dumps(str(rows)))
    (folder / "recipe.yaml").write_text(text.replace("max_samples: 45, ", ""))
    return folder / "recipe.yaml"


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory, recipe_path: Path) -> Run:
    store = tmp_path_factory.mktemp("honest") / "store"
    recipe = load.load(str(recipe_path), [*SETTINGS, f"store.uri={store}"])
    run = processes.prepare(recipe, "r", print, forkserver.launcher())
    for index in (1, 2, 3):
        _chunk(run, index)
        # As the checkpoint stage does: chunks.keep.audit holds what `last` does not.
        retention.prune(CheckpointStore(run), recipe.chunks.keep, targets=run.plan().targets)
    return run


@pytest.fixture
def copied(honest: Run, tmp_path: Path) -> Callable[[str], Run]:
    """Returns a copy of the run in a store of its own."""

    def copy(name: str) -> Run:
        shutil.copytree(honest.storage.key(""), tmp_path / name)
        return Run(Storage(str(tmp_path / name)), "r")

    return copy


def audit(run: Run, chunk: int, tmp_path: Path, *arguments: object) -> tuple[int, dict[str, Any], str]:
    page = tmp_path / "audit.html"
    fixed = ["--chunk", str(chunk), "--report", str(page), "--output", "json"]
    result = CliRunner().invoke(app, ["audit", run.uri, *map(str, arguments), *fixed])
    lines = [line for line in result.output.splitlines() if line.startswith("{")]
    return result.exit_code, json.loads(lines[-1]), page.read_text() if page.exists() else ""


def _set_args() -> list[str]:
    return [word for setting in SETTINGS for word in ("--set", setting)]


def _manifest(run: Run, step: int) -> tuple[Path, dict[str, Any]]:
    path = Path(run.storage.key(f"{CheckpointStore(run).prefix(step)}/manifest.json"))
    return path, json.loads(path.read_bytes())


def _rewrite(path: Path, document: dict[str, Any]) -> None:
    path.unlink()
    path.write_text(json.dumps(document))


def _content(run: Run) -> dict[str, str]:
    root = Path(run.storage.key(""))
    names = [Path(parent) / name for parent, _, files in os.walk(root) for name in files]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in names}


def _with_chunk_2_of(dishonest: Run, run: Run) -> None:
    """Puts what somebody trained otherwise in the place of chunk 2, under the identity that the run has."""
    path, document = _manifest(dishonest, TARGETS[1])
    document["meta"]["identity"] = _manifest(run, TARGETS[1])[1]["meta"]["identity"]
    _rewrite(path, document)
    target = _manifest(run, TARGETS[1])[0].parent
    shutil.rmtree(target)
    shutil.copytree(path.parent, target)


def _begin_chunk_2(run: Run) -> None:
    """Puts a run back to where chunk 2 began, by what its documents say now."""
    for step in TARGETS[1:]:
        shutil.rmtree(_manifest(run, step)[0].parent)
    path, document = _manifest(run, TARGETS[0])
    document["meta"]["identity"] = state_identity(run, run.resolved_recipe(), run.plan())
    _rewrite(path, document)


def _logged(run: Run, name: str = "loss") -> dict[int, float]:
    store = CheckpointStore(run)
    checkpoint = store.read(TARGETS[1])
    assert checkpoint
    return {int(entry["step"]): entry[name] for entry in store.history(checkpoint) if name in entry}


def test_each_chunks_end_is_kept(honest: Run) -> None:
    assert CheckpointStore(honest).steps() == list(TARGETS)
    store = CheckpointStore(honest)
    assert [
        entry.step for entry in retention.removals(store, Keep(last=1), targets=TARGETS)
    ] == []  # none is proven yet
    for chunk in (1, 2, 3):
        honest.put(f"proof/chunk-{chunk:03d}.json", {"step": TARGETS[chunk - 1], "digest": ""})
    try:
        kept, gone = (
            retention.removals(store, Keep(last=1, audit=audits), targets=TARGETS) for audits in (True, False)
        )
        assert ([entry.step for entry in kept], [entry.step for entry in gone]) == ([], [3, 6])
    finally:
        shutil.rmtree(honest.storage.key(honest.path("proof")))


def test_an_honest_chunk_is_equal_with_recipe_and_data_of_the_strangers_own(
    honest: Run, recipe_path: Path, tmp_path: Path
) -> None:
    before = _content(honest)
    code, found, page = audit(honest, 2, tmp_path, recipe_path, *_set_args())
    assert (code, found["equal"], found["verdict"][:6]) == (0, True, "equal:")
    assert (found["start"], found["end"], found["rows"]) == (3, 6, "recipe")
    assert found["losses"] > 0
    assert found["tensors"] > 20
    assert found["expected"] == found["found"]
    assert "equal: chunk 2, steps 4 to 6," in page
    assert _content(honest) == before


def test_the_first_chunk_begins_with_the_base(honest: Run, tmp_path: Path) -> None:
    code, found, page = audit(honest, 1, tmp_path)
    assert (code, found["start"], found["rows"]) == (0, 0, "run")
    assert "at the run&#39;s start" in page


def test_another_learning_rate_shows_where_it_is_used_first(
    copied: Callable[[str], Run], legs: Any, tmp_path: Path
) -> None:
    dishonest, run = copied("dishonest"), copied("run")
    # The schedule begins anew in the middle of the run: steps of the chunk have other rates than the recipe's.
    _begin_chunk_2(dishonest)
    code, printed = legs.leg(legs.chunk, dishonest.uri, 2, ("scheduler",))
    assert code == 0, printed
    ours, theirs = _logged(run), _logged(dishonest)
    unlike = [step for step in ours if ours[step] != theirs[step]]
    assert unlike
    rates = _logged(run, "learning_rate"), _logged(dishonest, "learning_rate")
    first = next(step for step in rates[0] if rates[0][step] != rates[1][step])
    assert TARGETS[0] < first <= unlike[0]
    _with_chunk_2_of(dishonest, run)
    code, found, page = audit(run, 2, tmp_path)
    assert code == 1
    # Told at the first step that has it; what a rate does to the loss shows after it was used.
    assert (found["first_difference"]["step"], found["first_difference"]["name"]) == (first, "learning_rate")
    assert (found["first_loss"]["step"], found["first_loss"]["name"]) == (unlike[0], "loss")
    assert (found["first_loss"]["expected"], found["first_loss"]["found"]) == (theirs[unlike[0]], ours[unlike[0]])
    weights = [value for value in found["differing"] if value["file"] == "model.safetensors"]
    assert weights
    assert all(0 < value["count"] <= value["of"] and value["max_abs"] > 0 for value in weights)
    assert f"another loss from step {unlike[0]} on" in page
    assert "Likely causes" in page


def test_a_tensor_that_was_changed_shows_in_no_loss(copied: Callable[[str], Run], tmp_path: Path) -> None:
    run = copied("run")
    path, document = _manifest(run, TARGETS[1])
    weights = path.parent / document["folder"] / "model.safetensors"
    tensors = load_file(weights)
    name = sorted(tensors)[3]
    tensors[name].view(-1)[5] += 0.25
    weights.unlink()
    save_file(tensors, weights, metadata={"format": "pt"})
    data = weights.read_bytes()
    document["files"]["model.safetensors"] |= {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    _rewrite(path, document)
    code, found, page = audit(run, 2, tmp_path)
    assert code == 1
    assert found["first_difference"] is None
    (value,) = found["differing"]
    assert (value["file"], value["name"], value["count"]) == ("model.safetensors", name, 1)
    assert value["max_abs"] == pytest.approx(0.25, rel=1e-5)
    assert name in page
    assert "logs the same, and 1 value differs" in found["verdict"]


@pytest.mark.slow
def test_a_row_that_was_changed_shows_in_the_step_it_is_part_of(copied: Callable[[str], Run], tmp_path: Path) -> None:
    import pyarrow as pa

    dishonest, run = copied("dishonest"), copied("run")
    prefix = Path(dishonest.storage.key(dishonest.require("tokens.json")["prefix"]))
    path = prefix / "manifest.json"
    document = json.loads(path.read_bytes())
    name = document["meta"]["files"]["train"][0][0]
    file = prefix / document["folder"] / name
    with pa.OSFile(str(file)) as source, pa.ipc.open_stream(source) as reader:
        table = reader.read_all()
    column = table.column("input_ids").to_pylist()
    column[4] = [column[4][0], *column[4][:0:-1]]  # its tokens the other way around
    table = table.set_column(
        table.column_names.index("input_ids"),
        table.schema.field("input_ids"),
        pa.array(column, table.schema.field("input_ids").type),
    )
    file.unlink()
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    data = file.read_bytes()
    document["files"][name] |= {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    _rewrite(path, document)
    _begin_chunk_2(dishonest)
    _chunk(dishonest, 2)
    ours, theirs = _logged(run), _logged(dishonest)
    unlike = [step for step in ours if ours[step] != theirs[step]]
    assert unlike  # the row is part of the chunk
    _with_chunk_2_of(dishonest, run)
    code, found, _ = audit(run, 2, tmp_path)
    assert (code, found["first_loss"]["step"]) == (1, unlike[0])
    assert found["first_loss"]["expected"] == theirs[unlike[0]]
    assert found["first_loss"]["found"] == ours[unlike[0]]


def test_a_parent_that_is_gone_is_told(copied: Callable[[str], Run], tmp_path: Path) -> None:
    run = copied("run")
    shutil.rmtree(_manifest(run, TARGETS[0])[0].parent)
    code, told, _ = audit(run, 2, tmp_path)
    assert code == 2
    assert "the checkpoint that it began with, of step 3, is gone; steps 6, 9 are here" in told["error"]
    assert "Chunks with both checkpoints: 3. Retention removes them unless the recipe sets" in told["error"]
    assert "Add --chunk 3, or train the run again with that setting." in told["error"]
    code, told, _ = audit(run, 1, tmp_path)
    assert code == 2
    assert "that it ended on, of step 3" in told["error"]
    shutil.rmtree(_manifest(run, TARGETS[1])[0].parent)
    code, told, _ = audit(run, 3, tmp_path)
    assert code == 2
    assert "No chunk has both of its checkpoints. Retention removes them unless" in told["error"]
    assert told["error"].endswith("Train the run again with that setting.")


def test_mistakes(honest: Run, recipe_path: Path, tmp_path: Path) -> None:
    code, told, _ = audit(honest, 4, tmp_path)
    assert (code, "chunk 4 does not exist" in told["error"]) == (2, True)
    code, told, _ = audit(honest, 2, tmp_path, recipe_path, *_set_args(), "--set", "seed=12")
    assert (code, "another recipe: seed: 11 → 12" in told["error"]) == (2, True)


@pytest.mark.slow
def test_other_data_is_told_before_anything_is_trained(
    honest: Run, recipe_path: Path, rows: Path, tmp_path: Path
) -> None:
    other = tmp_path / "rows.jsonl"
    other.write_text(rows.read_text().replace("What is 3 ", "What is 33 "))
    source = f'data.source="{other}"'
    code, found, page = audit(honest, 2, tmp_path, recipe_path, *_set_args(), "--set", source)
    assert code == 1
    assert found["data"][:2] == ["rows", "tokens"]
    assert "was not trained again" in page
