from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from kfp import compiler, dsl

from tests.support.conformance import check_documents, is_credential_name

Damage = Callable[[dict[str, Any], dict[str, Any]], object]
LOOP = "comp-condition-1"


def tasks_of(spec: dict[str, Any], component: str | None = None) -> dict[str, Any]:
    owner = spec["components"][component] if component else spec["root"]
    return owner["dag"]["tasks"]


def executor(spec: dict[str, Any], label: str = "exec-measure") -> dict[str, Any]:
    return spec["deploymentSpec"]["executors"][label]["container"]


def settings(platform: dict[str, Any]) -> dict[str, Any]:
    return platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]


def nested_input(spec: dict[str, Any], kind: str, name: str) -> dict[str, Any]:
    return tasks_of(spec, LOOP)["report"]["inputs"][kind][name]


def make_cycle(spec: dict[str, Any], platform: dict[str, Any]) -> None:
    tasks_of(spec)["measure"]["dependentTasks"] = ["condition-1"]


def make_nesting_cycle(spec: dict[str, Any], platform: dict[str, Any]) -> None:
    tasks_of(spec, LOOP)["again"] = {**tasks_of(spec)["condition-1"], "dependentTasks": []}


DAMAGES: dict[str, tuple[Damage, list[str]]] = {
    "unknown field in the pipeline spec": (
        lambda s, p: tasks_of(s)["measure"].update(retries=3),
        ["pipeline spec", "retries"],
    ),
    "unknown field in the deployment spec": (
        lambda s, p: executor(s).update(imagePolicy="Always"),
        ["deploymentSpec", "imagePolicy"],
    ),
    "unknown field in the platform spec": (
        lambda s, p: p["platforms"]["kubernetes"].update(deployment={}),
        ["platform spec", "deployment"],
    ),
    "unknown field in an executor's settings": (
        lambda s, p: settings(p)["exec-measure"].update(secretsAsEnv=[]),
        ["platforms.kubernetes", "exec-measure", "secretsAsEnv"],
    ),
    "bad enum": (
        lambda s, p: s["root"]["inputDefinitions"]["parameters"]["ratio"].update(parameterType="FLOAT"),
        ["pipeline spec", "FLOAT"],
    ),
    "missing executor": (
        lambda s, p: s["deploymentSpec"]["executors"].pop("exec-report"),
        ["components.comp-report", "exec-report", "exec-measure"],
    ),
    "no image": (lambda s, p: executor(s).pop("image"), ["exec-measure", "image"]),
    "no command": (lambda s, p: executor(s).pop("command"), ["exec-measure", "command"]),
    "empty executor": (
        lambda s, p: s["deploymentSpec"]["executors"].update({"exec-report": {}}),
        ["exec-report", "container"],
    ),
    "missing component": (
        lambda s, p: s["components"].pop("comp-report"),
        ["components.comp-condition-1.dag.tasks.report", "comp-report"],
    ),
    "component that does nothing": (
        lambda s, p: s["components"]["comp-report"].pop("executorLabel"),
        ["components.comp-report", "neither"],
    ),
    "unknown producer": (
        lambda s, p: tasks_of(s)["condition-1"]["inputs"]["parameters"]["pipelinechannel--measure-Output"][
            "taskOutputParameter"
        ].update(producerTask="gone"),
        ["root.dag.tasks.condition-1", "producer task 'gone'", "measure"],
    ),
    "unknown output parameter": (
        lambda s, p: s["components"]["comp-measure"]["outputDefinitions"].pop("parameters"),
        ["condition-1", "output parameter 'Output' of 'measure'"],
    ),
    "unknown output artifact": (
        lambda s, p: s["components"]["comp-measure"]["outputDefinitions"].pop("artifacts"),
        ["condition-1", "output artifact 'metrics' of 'measure'"],
    ),
    "unknown input of the DAG": (
        lambda s, p: s["root"]["inputDefinitions"]["parameters"].pop("num_rows"),
        ["root.dag.tasks.measure", "num_rows", "is_final"],
    ),
    "unknown artifact of a nested DAG": (
        lambda s, p: nested_input(s, "artifacts", "metrics").update(componentInputArtifact="gone"),
        [LOOP, "artifact 'gone'"],
    ),
    "input without a source": (
        lambda s, p: nested_input(s, "parameters", "label").clear(),
        [LOOP, "inputs.label", "source"],
    ),
    "placeholder inside a text": (
        lambda s, p: tasks_of(s)["measure"]["inputs"]["parameters"].update(
            label={"runtimeValue": {"constant": "run-{{$.pipeline_job_uuid}}"}}
        ),
        ["root.dag.tasks.measure", "inputs.label", "{{$.pipeline_job_uuid}}", "alone"],
    ),
    "undeclared input": (
        lambda s, p: tasks_of(s)["measure"]["inputs"]["parameters"].update(typo={"runtimeValue": {"constant": 1}}),
        ["root.dag.tasks.measure", "parameter 'typo' of 'comp-measure'"],
    ),
    "required parameter not supplied": (
        lambda s, p: tasks_of(s)["measure"]["inputs"]["parameters"].pop("label"),
        ["root.dag.tasks.measure", "parameter 'label'", "requires"],
    ),
    "required artifact not supplied": (
        lambda s, p: tasks_of(s, LOOP)["report"]["inputs"].pop("artifacts"),
        [LOOP, "artifact 'metrics'", "requires"],
    ),
    "unknown dependency": (
        lambda s, p: tasks_of(s)["condition-1"].update(dependentTasks=["gone"]),
        ["root.dag.tasks.condition-1.dependentTasks", "gone"],
    ),
    "cycle of tasks": (make_cycle, ["root.dag", "cycle", "condition-1 -> measure"]),
    "component inside itself": (make_nesting_cycle, ["components", f"{LOOP} -> components.{LOOP}"]),
    "id of two graphs": (
        lambda s, p: tasks_of(s, LOOP).update(measure=tasks_of(s, LOOP).pop("report")),
        ["root", "'measure'", "root and in root.condition-1"],
    ),
    "text that Argo replaces": (
        lambda s, p: tasks_of(s)["measure"]["inputs"]["parameters"].update(
            label={"runtimeValue": {"constant": "in {{workflow.name}}"}}
        ),
        ["pipeline spec.root.dag.tasks.measure.inputs.parameters.label", "{{workflow.name}}"],
    ),
    "text that Argo replaces, beside kfp's own": (
        lambda s, p: executor(s)["args"].append("{{$}}{{item}}"),
        ["exec-measure.container.args[", "{{item}}"],
    ),
    "text that Argo replaces in the platform spec": (
        lambda s, p: settings(p)["exec-measure"].update(nodeSelector={"labels": {"pool": "{{inputs.x}}"}}),
        ["platform spec.platforms.kubernetes", "{{inputs.x}}"],
    ),
    "no tasks": (lambda s, p: s["root"]["dag"]["tasks"].clear(), ["root", "at least one task"]),
    "settings of an unknown executor": (
        lambda s, p: settings(p).update({"exec-gone": {}}),
        ["platforms.kubernetes", "exec-gone"],
    ),
    "unknown platform": (
        lambda s, p: p["platforms"].update(kubernets=p["platforms"].pop("kubernetes")),
        ["kubernets", "kubernetes"],
    ),
    "credential in an env value": (
        lambda s, p: executor(s)["env"].append({"name": "HF_TOKEN", "value": "hf_cafe"}),
        ["exec-measure.container.env.HF_TOKEN", "secret"],
    ),
    "credential in the platform spec": (
        lambda s, p: settings(p)["exec-measure"].update(podMetadata={"annotations": {"wandb-api-key": "hf_cafe"}}),
        ["podMetadata.annotations.wandb-api-key", "secret"],
    ),
}


@pytest.fixture
def documents(two_step_package: Path) -> list[dict[str, Any]]:
    loaded = list(yaml.safe_load_all(two_step_package.read_text()))
    assert len(loaded) == 2
    return loaded


def test_a_compiled_pipeline_has_no_problems(documents: list[dict[str, Any]]):
    assert check_documents(documents) == []


@pytest.mark.parametrize(("damage", "named"), DAMAGES.values(), ids=DAMAGES.keys())
def test_damage_is_found_and_named(documents: list[dict[str, Any]], damage: Damage, named: list[str]):
    damage(*documents)

    problems = check_documents(documents)

    assert any(all(word in problem for word in named) for problem in problems), problems
    assert "hf_cafe" not in " ".join(problems)


def test_one_problem_does_not_hide_another(documents: list[dict[str, Any]]):
    DAMAGES["unknown field in the pipeline spec"][0](*documents)
    DAMAGES["missing executor"][0](*documents)
    DAMAGES["cycle of tasks"][0](*documents)

    problems = " ".join(check_documents(documents))

    assert all(word in problems for word in ("retries", "exec-report", "cycle"))


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("", "found nothing"),
        ("- a\n", "found list"),
        ("{}\n---\n{}\n---\n{}\n", "found dict, dict, dict"),
        ("root: 3\n", "PipelineSpec"),
    ],
    ids=["empty", "a list", "three documents", "not a DAG"],
)
def test_what_is_no_pipeline_is_a_problem(content: str, named: str):
    problems = check_documents(list(yaml.safe_load_all(content)))

    assert any(named in problem for problem in problems), problems


@dsl.component(base_image="registry.test/baton:1", install_kfp_package=False)
def double(value: int) -> int:
    return 2 * value


@dsl.component(base_image="registry.test/baton:1", install_kfp_package=False)
def collect(values: list, status: str = ""):
    print(values, status)


@dsl.component(base_image="registry.test/baton:1", install_kfp_package=False)
def clean_up(status: dsl.PipelineTaskFinalStatus):
    print(status.state)


@dsl.pipeline(name="every-shape")
def every_shape(items: list, name: str):
    with dsl.ExitHandler(clean_up()):
        with dsl.ParallelFor(items) as item:
            doubled = double(value=item)
        collect(values=dsl.Collected(doubled.output))
        with dsl.ParallelFor([1, 2, 3]) as number:
            double(value=number)
        with dsl.If(name == "a"):
            left = double(value=1)
        with dsl.Else():
            right = double(value=2)
        double(value=dsl.OneOf(left.output, right.output))


def test_loops_branches_and_exit_handlers_conform(tmp_path: Path):
    path = tmp_path / "every-shape.yaml"
    compiler.Compiler().compile(every_shape, str(path))

    assert check_documents(list(yaml.safe_load_all(path.read_text()))) == []


@pytest.mark.parametrize("name", ["HF_TOKEN", "secretKey", "PGPASSWORD", "wandb-api-key", "AWS_ACCESS_KEY_ID"])
def test_credentials_are_known_by_name(name: str):
    assert is_credential_name(name)


@pytest.mark.parametrize("name", ["TOKENIZERS_PARALLELISM", "MAX_TOKENS", "secretName", "HF_TOKEN_PATH", ""])
def test_what_only_sounds_like_a_credential_is_none(name: str):
    assert not is_credential_name(name)
