"""Texts arrive at a stage as they were sent: from a recipe, a parameter or an override through the server to the stage.

The server here does to texts what Kubeflow 2.17 was seen to do: Argo expands `{{…}}` in a workflow's arguments and in
the patch of a pod, Kubernetes `$(…)` in its command, and a database keeps three bytes a character.
"""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from kfp import dsl

from baton import events
from baton.compiler import pipeline_file
from baton.compiler.pipeline_file import Pipeline, write_package
from baton.components.data_split.component import data_split
from baton.components.sweep.component import begin
from baton.errors import BatonError, UserError
from baton.kubeflow.submit import PipelineFile
from baton.recipe import load
from baton.recipe.recipe import Recipe
from baton.runs import ref
from baton.runs.run import Run
from baton.store.storage import Storage

SCRATCH = str(Path(__file__).parents[1] / "recipes/scratch.yaml")
RUN_ID = "0f9e8d7c-6b5a-4938-8271-605f4e3d2c1b"
ARGO = {"workflow.name": "braces-wfcnr", "workflow.namespace": "kubeflow", "item": "0", "pod.name": "braces-1"}
"""What Argo knows, seen or in its documentation."""
POD = {"KFP_POD_NAME": "braces-1", "KFP_RUN_ID": RUN_ID}
PIECES = [
    *("{{workflow.name}}", "{{inputs.parameters.x}}", "{{ m['role'] }}", "{{item}}", "{{", "}}", "{{$}}"),
    *("{{$.pipeline_job_uuid}}", "${HOME}", "$(KFP_POD_NAME)", "$$(KFP_RUN_ID)", "$("),
    *("'", '"', "\\", "\\u007b\\u007b"),
    *("\n", "\r\n", "\t", "\0", "\x1b[0m", "\x7f", "\u2028", "\ufeff", "ü", "語", "😀", "𝒳", ref.PACKED, "python3"),
    *("yes", "no", "null", "~", "1e3", "0755", "0o17", "1_000", "089", "2026-11-25", "- a: b", "# c", "!!str x", "%"),
]
TEXTS = st.lists(st.sampled_from(PIECES) | st.text(max_size=4), min_size=1, max_size=5).map("".join).filter(bool)
HARD = "You run in {{workflow.name}}{{inputs.parameters.x}} on $(KFP_POD_NAME), ${HOME} \0 😀 }}"


@pytest.fixture(autouse=True)
def _stages_run_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts back what a stage sets for its process."""
    monkeypatch.setenv("BATON_STORE_PATIENCE", "10")


class ServerError(Exception):
    """What the server answers with 500."""


def expanded(text: str) -> str:
    """Returns a text of a workflow as Argo's controller leaves it."""

    def replaced(match: re.Match[str]) -> str:
        name = match[1].strip()
        if name.startswith(("inputs.", "workflow.", "tasks.", "steps.", "outputs.")) and name not in ARGO:
            raise ServerError(name)
        return ARGO.get(name, match[0])

    return re.sub(r"\{\{([^{}$]*)\}\}", replaced, text)


def arrived(package: str, parameters: dict[str, Any], task: str = "data-split") -> dict[str, Any]:
    """Returns the inputs of a stage in the root of a compiled pipeline, as its process finds them."""
    with open(package, encoding="utf-8") as file:
        documents = list(yaml.load_all(file, pipeline_file.LOADER))
    documents = json.loads(json.dumps(documents))
    executors = documents[0]["deploymentSpec"]["executors"].values()
    for part in (documents[0]["root"], *documents[0]["components"].values(), *executors, *documents[1:]):
        text = json.dumps(part, ensure_ascii=False)
        assert expanded(text) == text, "the workflow's arguments"
    root = documents[0]["root"]
    declared = root["inputDefinitions"]["parameters"]
    defaults = {key: entry["defaultValue"] for key, entry in declared.items() if "defaultValue" in entry}
    values = json.loads(expanded(json.dumps({**defaults, **parameters}, ensure_ascii=False)))
    inputs = {}
    for key, source in root["dag"]["tasks"][task]["inputs"]["parameters"].items():
        constant = source.get("runtimeValue", {}).get("constant")
        inputs[key] = values[source["componentInputParameter"]] if constant is None else constant
        if constant == "{{$.pipeline_job_uuid}}":
            inputs[key] = RUN_ID
        elif isinstance(constant, float) and constant.is_integer():  # as Go writes it
            inputs[key] = int(constant)
    text = json.dumps({"inputs": {"parameterValues": inputs}}, ensure_ascii=False)
    patch = json.dumps({"containers": [{"command": ["--executor_input", text]}]}, ensure_ascii=False)
    text = json.loads(expanded(patch))["containers"][0]["command"][1]
    text = re.sub(r"(?<!\$)\$\(([A-Z_]+)\)", lambda match: POD.get(match[1], match[0]), text)
    text = re.sub(r"[\U00010000-\U0010ffff]", "?", text)
    return dict(json.loads(text)["inputs"]["parameterValues"])


def compiled(folder: Path, recipe: Recipe, kind: Pipeline = Pipeline.finetune) -> str:
    package = str(folder / "pipeline.yaml")
    write_package(recipe, package, kind)
    return package


def changes(folder: Path, **values: object) -> Recipe:
    paths = {
        "store.uri": str(folder / "store"),
        "data.max_samples": 12,
        "training.max_steps": 2,
        "training.epochs": None,
    }
    document = load.read(SCRATCH)
    for path, value in (paths | {"data.source": str(rows(folder)), "data.split.eval": 0.4} | values).items():
        load.set_path(document, path, value)
    return load.validate(document, origin="here")


def rows(folder: Path) -> Path:
    path = folder / "rows.jsonl"
    if not path.exists():
        path.write_text("".join(json.dumps({"prompt": f"{n}?", "completion": f"{n}!"}) + "\n" for n in range(12)))
    return path


def split(folder: Path, inputs: dict[str, Any], name: str = "mine") -> Recipe:
    """Runs the first stage, and returns the recipe of the run that it has begun."""
    artifacts = {kind: dsl.Dataset(uri=str(folder / kind)) for kind in ("rows", "quality")}
    data_split.python_func(**{**inputs, "run_name": name}, **artifacts)
    return Run(Storage(str(folder / "store")), name).recipe()


@settings(
    max_examples=8,
    deadline=None,
    database=None,
    phases=(Phase.explicit, Phase.generate),  # to shrink a failure would compile for minutes
    suppress_health_check=list(HealthCheck),
)
@given(sent=st.tuples(TEXTS, TEXTS))
@example(sent=(HARD, HARD))
@example(sent=("yes", f"{ref.PACKED}x"))
def test_any_text_arrives_as_it_was_sent(sent: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> None:
    """From the recipe, and from overrides that a program packs."""
    folder = tmp_path_factory.mktemp("sent")
    in_recipe, in_overrides = sent
    package = compiled(folder, changes(folder, **{"data.system": in_recipe}))
    inputs = arrived(package, PipelineFile.read(package).defaults)
    assert split(folder, inputs, "first").data.system == in_recipe
    overrides = {"data.system": ref.encode_text(in_overrides)}
    inputs = arrived(package, {**PipelineFile.read(package).defaults, "overrides": overrides})
    assert split(folder, inputs, "second").data.system == in_overrides


@given(text=TEXTS | st.text())
def test_the_server_leaves_what_was_sent(text: str) -> None:
    sent = ref.encode_text(text)
    assert expanded(json.dumps(sent, ensure_ascii=False)) == json.dumps(sent, ensure_ascii=False)
    assert not re.search(r"\$[({]|[\U00010000-\U0010ffff\0-\x1f]", sent)
    assert ref.decode_texts(sent) == text


@pytest.mark.parametrize(
    "text", ["You run in {{workflow.name}}.", "on $(KFP_POD_NAME)", "😀", "{{inputs.parameters.x}}"]
)
def test_the_server_changes_such_texts_where_they_travel_as_they_are(text: str, tmp_path: Path) -> None:
    """Or refuses them: what the tests here look at is there."""
    package = compiled(tmp_path, changes(tmp_path))
    try:
        inputs = arrived(package, {"overrides": {"data.system": text}})
    except ServerError:
        return
    assert split(tmp_path, inputs).data.system != text


@pytest.mark.parametrize("text", ["plain", "two words, ü and 語", "{a: [1]}", "'\"\\", "yes", "0755"])
def test_a_text_that_a_person_types_in_the_form_counts_as_it_is(text: str, tmp_path: Path) -> None:
    package = compiled(tmp_path, changes(tmp_path))
    assert ref.encode_text(text) == text
    assert split(tmp_path, arrived(package, {"overrides": {"data.system": text}})).data.system == text


@pytest.mark.parametrize("where", ["data.source", "model.base"])
def test_a_default_of_a_parameter_arrives_too(where: str, tmp_path: Path) -> None:
    """As `kfp run create` starts it, without a parameter, and as recurring runs, with all of them."""
    folder = tmp_path / "{{workflow.name}} 😀"
    folder.mkdir()
    recipe = changes(tmp_path, **{"data.source": str(rows(folder))})
    package = compiled(tmp_path, recipe)
    for parameters in ({}, PipelineFile.read(package).defaults):
        inputs = arrived(package, parameters)
        assert ref.decode_texts(inputs)["source"] == str(folder / "rows.jsonl")
    assert [source.uri for source in split(tmp_path, inputs).data.sources] == [str(folder / "rows.jsonl")]


def test_what_trials_and_retrainings_are_given_is_packed(tmp_path: Path) -> None:
    path = str(Path(SCRATCH).parents[2] / "pipelines/recipes/sweep.yaml")
    document = load.read(path, [f"store={tmp_path}/store"])
    document["data"]["system"] = HARD
    recipe = load.validate(document, origin="here")
    package = compiled(tmp_path, recipe, Pipeline.sweep)
    inputs = arrived(package, {}, "begin")
    given = begin.python_func(**{**inputs, "sweep_name": "mine"}, sweep_uri=str(tmp_path / "uri"))
    assert given
    for each in given:
        assert each["recipe"].startswith(ref.PACKED)
        assert load.loads(ref.decode_texts(each)["recipe"]).data.system == HARD


def test_a_file_that_an_older_baton_has_compiled_is_read(tmp_path: Path) -> None:
    recipe = changes(tmp_path, **{"data.system": "Be brief."})
    inputs = arrived(compiled(tmp_path, recipe), {})
    assert split(tmp_path, {**inputs, "recipe": load.dumps(recipe)}).data.system == "Be brief."


DAMAGES = {
    "a letter": lambda text: text[:60] + ("A" if text[60] != "A" else "B") + text[61:],
    "the last letter's spare bits": lambda text: re.sub(
        r"(.)(=+)$", lambda match: chr(ord(match[1]) + 1) + match[2], text
    ),
    "the end": lambda text: text[:-8],
    "braces that Argo has replaced": lambda text: text[:50] + "{{braces-wfcnr}}" + text[50:],
    "another recipe under the digest": lambda text: (
        text[: len(ref.PACKED) + 17] + ref.pack_text('{"seed": 2}')[len(ref.PACKED) + 17 :]
    ),
    "the digest": lambda text: text.replace(ref.PACKED, f"{ref.PACKED}0", 1),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_recipe_that_was_changed_on_its_way_ends_the_run_at_once(
    damage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "TERMINATION_LOG", str(tmp_path / "word"), raising=False)
    padded = next(
        text for note in range(9) if (text := ref.pack_text(load.dumps(changes(tmp_path, seed=note)))).endswith("=")
    )
    inputs = {**arrived(compiled(tmp_path, changes(tmp_path)), {}), "recipe": padded}
    changed = damage(padded)
    assert changed != padded
    with pytest.raises(SystemExit) as ended:
        split(tmp_path, {**inputs, "recipe": changed})
    assert "was changed between the compiled pipeline and this stage" in str(ended.value.__cause__)
    assert not (tmp_path / "store/runs").exists()


def test_braces_in_what_kubernetes_reads_are_refused_where_the_recipe_is_compiled(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"resources\.env\.TEAM is '\{\{workflow\.name\}\}': Argo"):
        compiled(tmp_path, changes(tmp_path, **{"resources.env": {"TEAM": "{{workflow.name}}"}}))
    assert not (tmp_path / "pipeline.yaml").exists()
    with pytest.raises(UserError, match="goes from stage to stage as it is"):
        pipeline_file.for_cluster(changes(tmp_path, **{"store.uri": "s3://bucket/{{workflow.name}}"}))


WORDS = ("1e3", "089", "0o17", "0b11", "1_000", "y", "N", "+.5", "12.", "0755", "yes", "1:30", "2026-11-25", "~")


@pytest.mark.parametrize("word", WORDS)
def test_words_that_other_readers_of_yaml_take_for_numbers_are_in_quotes(word: str, tmp_path: Path) -> None:
    package = compiled(tmp_path, changes(tmp_path, **{"resources.env": {"WORD": word}}))
    assert re.search(rf"name: WORD\n\s+value: (['\"]){re.escape(word)}\1\n", Path(package).read_text(encoding="utf-8"))


@given(text=st.text(max_size=200))
def test_packing_and_sending_lose_nothing(text: str) -> None:
    assert ref.decode_texts(ref.pack_text(text)) == ref.decode_texts(ref.encode_text(text)) == text
    packed = ref.pack_text(text)
    assert re.fullmatch(rf"{ref.PACKED}[0-9a-f]{{16}}:[A-Za-z0-9+/]*=*", packed)
    assert ref.decode_texts({"a": [packed, 1, None]}) == {"a": [text, 1, None]}


def test_an_error_says_what_was_expected() -> None:
    digest = ref.pack_text("one").split(":")[2]
    other = base64.b64encode(b"not compressed").decode()
    with pytest.raises(BatonError, match=rf"cannot be unpacked.*expected '{digest}'.*Submit the recipe again"):
        ref.decode_texts(f"{ref.PACKED}{digest}:{other}")
