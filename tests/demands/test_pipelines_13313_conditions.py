"""A pipeline run on one machine ignores its conditions: no branch is taken, and it ends as a success.

Issue: https://github.com/kubeflow/pipelines/pull/13313
Upstream: reproduced. kfp 2.17 takes the right branch for a plain word, since a fix. A value with a quote breaks the
    expression, which counts as false, and so does its negation.
Baton: conditions compare a verdict with a word, both Baton's own. A run with quotes in paths and settings is rejected
    by its gate and ends with 3.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import kfp.local
import pytest
import yaml
from kfp import dsl
from kfp.local import io
from kfp.local.orchestrator.enhanced_dag_orchestrator import ConditionEvaluator

TESTS = Path(__file__).parents[1]
BATON = str(Path(sys.executable).parent / "baton")
WORDS = {"gate-verdict": ("accepted", "rejected"), "look-Output": ("train", "unchanged")}


@dsl.component(base_image="python:3.11", install_kfp_package=False)
def say(text: str) -> str:
    return text


@dsl.component(base_image="python:3.11", install_kfp_package=False)
def note(text: str, path: str):
    with open(path, "a", encoding="utf-8") as file:
        file.write(text)


@dsl.pipeline(name="branches")
def branches(word: str, wanted: str, path: str):
    said = say(text=word)
    with dsl.If(said.output == wanted):
        note(text="as wanted", path=path)
    with dsl.Else():
        note(text="other", path=path)


@pytest.mark.parametrize(
    ("word", "wanted", "taken"),
    [("heads", "heads", "as wanted"), ("tails", "heads", "other"), ("it's", "it's", ""), ("it's", "heads", "")],
)
def test_upstream_takes_no_branch_for_a_value_with_a_quote(
    word: str, wanted: str, taken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "taken"
    path.touch()
    runner = kfp.local.SubprocessRunner(use_venv=False)
    kfp.local.init(runner, pipeline_root=str(tmp_path / "root"), raise_on_error=True)
    branches(word=word, wanted=wanted, path=str(path))
    assert path.read_text(encoding="utf-8") == taken


def conditions(node: Any) -> set[str]:
    """All conditions in a compiled file."""
    if isinstance(node, list):
        return {found for child in node for found in conditions(child)}
    if not isinstance(node, dict):
        return set()
    own = {node["condition"]} if isinstance(node.get("condition"), str) else set()
    return own | {found for child in node.values() for found in conditions(child)}


def test_baton_compares_its_own_words() -> None:
    files = sorted((TESTS / "goldens/pipelines").glob("*.yaml"))
    found = {each for file in files for each in conditions(list(yaml.safe_load_all(file.read_text(encoding="utf-8"))))}
    accepted, train = (
        f"inputs.parameter_values['pipelinechannel--{name}'] == '{words[0]}'" for name, words in WORDS.items()
    )
    assert found == {accepted, f"!({accepted})", train}
    for name, words in WORDS.items():
        for word in words:
            values = io.IOStore()
            values.put_parent_input(f"pipelinechannel--{name}", word)
            values.put_task_output(*name.split("-"), word)
            own = [each for each in (accepted, train) if name in each]
            assert [ConditionEvaluator.evaluate_condition(each, values) for each in own] == [word == words[0]]
            if name == "gate-verdict":
                assert ConditionEvaluator.evaluate_condition(f"!({accepted})", values) == (word != words[0])


@pytest.mark.slow
def test_baton_is_rejected_by_its_gate_whatever_paths_are_called(tmp_path: Path) -> None:
    folder = tmp_path / "it's mine"
    folder.mkdir()
    recipe = folder / "reci'pe.yaml"
    shutil.copy(TESTS / "recipes/scratch.yaml", recipe)
    rows = folder / "ro'ws.jsonl"
    rows.write_text("".join(json.dumps({"text": f"it's row {n}, isn't it?"}) + "\n" for n in range(60)))
    command = [BATON, "run", str(recipe), "--run", "gated", "--store", str(folder / "store"), "--output", "json"]
    gate = 'evaluation.gate={perplexity: "<= baseline * 0.01"}'
    for setting in (gate, "training.epochs=null", "training.max_steps=2", f'data.source="{rows}"'):
        command += ["--set", setting]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr
    found = json.loads(done.stdout)
    assert (done.returncode, found["state"], found["model_uri"]) == (3, "rejected", None)
    assert Path(found["report_uri"]).is_file()
