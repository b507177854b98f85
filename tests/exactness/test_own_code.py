"""The example with code of one's own: it travels with the run, in any number of chunks, and cannot change under it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from baton.checkpoint.proof import promote, proof_as_markdown
from baton.checkpoint.store import CheckpointStore
from baton.local.results import list_checkpoints
from baton.pages.collect import collect
from baton.pages.run_page import render
from baton.prove import prove
from baton.recipe import load
from baton.recipe.recipe import Recipe

EXAMPLE = Path(__file__).parents[2] / "examples/hooks"


@pytest.fixture
def own(tmp_path: Path) -> Recipe:
    """The example's recipe, its code in a folder that the test may change."""
    shutil.copytree(EXAMPLE, tmp_path / "code")
    settings = [f"store={tmp_path / 'store'}", f"hooks.source={tmp_path / 'code'}", "training.threads=1"]
    return load.load(str(EXAMPLE / "recipe.yaml"), settings)


def test_chunks_of_the_example_end_on_the_bits_of_one_run(own: Recipe, legs: Any) -> None:
    whole, parts = legs.prepare(legs.changed(own, chunks__count=1), "whole"), legs.prepare(own, "parts")
    legs.train(whole)
    assert own.hooks.source
    shutil.rmtree(own.hooks.source)  # chunks have it from the store
    legs.train(parts)
    assert legs.losses(parts) == legs.losses(whole)
    assert legs.final(parts).meta.state == legs.final(whole).meta.state
    assert legs.final(parts).meta.restored.checked["callbacks"] == "match"


COUNTING = """
import torch

calls, seen = 0, {}

def loss(outputs, labels, num_items_in_batch=None):
    global calls
    calls += 1
    seen[calls % 3] = seen.get(calls % 3, 0.0) + calls / 100
    logits = outputs.logits[:, :-1].flatten(0, 1).float()
    mean = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), ignore_index=-100)
    return mean * (1 + seen[calls % 3])

rounds = iter(range(99))

def lost(*arguments, **options):
    return loss(*arguments, **options) * (1 + next(rounds))

def reward(completions, **_):
    global calls
    calls += 1
    return [len(text) * calls + index for index, text in enumerate(completions)]
"""


@pytest.fixture
def counting(own: Recipe, tmp_path: Path, legs: Any) -> Recipe:
    """A recipe whose loss keeps a state of its own in its module."""
    (tmp_path / "code" / "counting.py").write_text(COUNTING)
    chunks = {**own.chunks.model_dump(mode="json"), "count": 2, "checkpoint_every": 2, "wait_for_commit": True}
    recipe = legs.changed(own, hooks__loss={"use": "counting:loss"}, hooks__callbacks=[], hooks__collator=None)
    return legs.changed(recipe, chunks=chunks, evaluation__every=None, training__log_every=1)


@pytest.mark.slow
def test_code_that_keeps_a_state_goes_on_with_it_in_other_processes(counting: Recipe, legs: Any) -> None:
    whole = legs.prepare(legs.changed(counting, chunks__count=1, chunks__checkpoint_every=None), "whole")
    parts, control = legs.prepare(counting, "parts"), legs.prepare(counting, "control")
    legs.train(whole)
    code, _ = legs.leg(legs.chunk, parts.uri, 1, (), "step:5")
    assert code < 0, "killed, a step after its newest checkpoint"
    legs.train(parts)
    assert legs.final(parts).meta.state == legs.final(whole).meta.state
    meta = legs.final(parts).meta
    assert meta.hooks.carried.keys() == {"counting.py:calls", "counting.py:seen"}
    assert (meta.restored.level, meta.restored.checked["hooks"]) == ("bitwise", "match")
    legs.train(control, leave_out=("hooks",))
    assert legs.final(control).meta.state["weights"] != legs.final(whole).meta.state["weights"]


TWO: dict[str, dict[str, Any]] = {
    "two processes": {"processes": 2, "hang_after": "60s"},
    "virtual workers in one": {"virtual_workers": 2},
    "virtual workers in two": {"virtual_workers": 2, "processes": 2, "hang_after": "60s"},
}


@pytest.mark.slow
@pytest.mark.parametrize("parallel", TWO)
def test_each_process_has_its_own_state(parallel: str, counting: Recipe, legs: Any) -> None:
    counting = legs.changed(counting, training__parallel=TWO[parallel])
    whole = legs.prepare(legs.changed(counting, chunks__count=1, chunks__checkpoint_every=None), "whole")
    parts = legs.prepare(counting, "parts")
    for run in (whole, parts):
        legs.train(run)
    assert legs.final(parts).meta.state == legs.final(whole).meta.state
    assert legs.final(parts).meta.hooks == legs.final(whole).meta.hooks
    meta = legs.final(parts).meta
    assert (meta.restored.level, meta.restored.checked["hooks"]) == ("bitwise", "match")
    files = {name for name in legs.final(parts).manifest.files if "hooks" in name}
    assert files == {"baton_state_hooks.json"} | (
        {"baton_state_hooks_1.json"} if parallel == "two processes" else set()
    )


def test_a_state_that_cannot_be_carried_is_told_wherever_the_run_is(counting: Recipe, legs: Any) -> None:
    run = legs.prepare(legs.changed(counting, hooks__loss={"use": "counting:lost"}), "lost")
    legs.train(run)
    store, manifest = CheckpointStore(run), legs.final(run).meta
    assert (manifest.restored.level, manifest.hooks.lost.keys()) == ("consistent", {"counting.py:rounds"})
    for index in (1, 2):
        part = promote(run, index)
        assert part
        assert part.hooks == store.read(part.step).meta.hooks
        assert "**state of `counting.py:rounds` is not carried**" in proof_as_markdown(part)
    page = render(collect(run))
    assert "state of counting.py:rounds is not carried" in page
    assert "not every resume was bit-identical" in page
    assert list_checkpoints(run)[0]["not_carried"].keys() == {"counting.py:rounds"}


@pytest.mark.slow
def test_a_proof_names_the_state_that_makes_bits_differ(counting: Recipe, legs: Any) -> None:
    lost = legs.changed(counting, hooks__loss={"use": "counting:lost"})
    cases = (("kept", counting, ()), ("left", counting, ("hooks",)), ("lost", lost, ()))
    found = [prove.prove(recipe, (1, 2), name=name, leave_out=left_out) for name, recipe, left_out in cases]
    assert [proof["exact"] for proof in found] == [True, False, False]
    assert found[1]["first_difference"]["hooks"] == [
        "state of `counting.py:calls` differs",
        "state of `counting.py:seen` differs",
    ]
    assert found[2]["first_difference"]["what"] == "loss"
    assert any(
        line.startswith("state of `counting.py:rounds` is not carried")
        for line in found[2]["first_difference"]["hooks"]
    )
    assert "State of `counting.py:calls` differs" in prove.render(found[1])


def test_changed_code_is_another_run(own: Recipe, legs: Any) -> None:
    legs.prepare(own, "mine")
    with (Path(str(own.hooks.source)) / "own.py").open("a", encoding="utf-8") as file:
        file.write("\n# changed\n")
    code, printed = legs.leg(legs.split_and_tokenize, load.dumps(own), "mine")
    assert code == 2
    assert "run 'mine' has another code.json" in printed


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("nowhere:thing", "cannot be imported: No module named 'nowhere'"),
        ("own:Missing", "does not exist"),
    ],
    ids=["module", "object"],
)
def test_a_hook_that_is_not_there_is_one_message(path: str, said: str, own: Recipe, legs: Any) -> None:
    run = legs.prepare(legs.changed(own, hooks__callbacks=[{"use": path}]), "wrong")
    code, printed = legs.leg(legs.chunk, run.uri, 1)
    assert code == 2
    assert said in printed
    assert "Traceback" not in printed
