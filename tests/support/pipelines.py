"""A compiled two-step pipeline, and a Kubeflow Pipelines API to submit it to."""

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from kfp import compiler, dsl, kubernetes
from kfp.dsl import pipeline_task

from baton.kubeflow.submit import Submission, submit


@pytest.fixture(scope="session")
def kfp_api_module() -> ModuleType:
    """Load `kfp_api.py`, which importlib mode leaves off the path."""
    spec = importlib.util.spec_from_file_location("kfp_api", Path(__file__).with_name("kfp_api.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["kfp_api"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session", autouse=True)
def _kfp_names_its_caller_quickly() -> Iterator[None]:
    """kfp reads the source of the whole stack to name a method in a message: seconds a pipeline, below pytest."""

    def stack() -> list[tuple[Any, ...]]:
        return [(frame, "", 0, frame.f_code.co_name) for frame in (sys._getframe(1), sys._getframe(2))]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline_task, "inspect", SimpleNamespace(stack=stack))
        yield


@pytest.fixture
def kfp_api(kfp_api_module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A running `KfpApi`, with none of kfp's own settings in the way."""
    for name in ("KF_PIPELINES_ENDPOINT", "KF_PIPELINES_UI_ENDPOINT", "KF_PIPELINES_IAP_OAUTH2_CLIENT_ID"):
        monkeypatch.delenv(name, raising=False)
    with kfp_api_module.KfpApi() as api:
        yield api


@dsl.component(base_image="registry.test/baton:1", install_kfp_package=False)
def measure(num_rows: int, label: str, metrics: dsl.Output[dsl.Metrics]) -> str:
    metrics.log_metric("rows", num_rows)
    return label


@dsl.component(base_image="registry.test/baton:1", install_kfp_package=False)
def report(label: str, metrics: dsl.Input[dsl.Metrics], is_final: bool = True):
    print(label, metrics.metadata, is_final)


@dsl.pipeline(name="two-steps")
def two_steps(num_rows: int, label: str = "plain", ratio: float = 0.5, is_final: bool = True):
    measured = measure(num_rows=num_rows, label=label)
    measured.set_env_variable("TOKENIZERS_PARALLELISM", "false")
    kubernetes.use_secret_as_env(measured, "store-credentials", {"secret_key": "AWS_SECRET_ACCESS_KEY"})
    with dsl.If(ratio > 0.1, name="worth-it"):
        report(label=measured.outputs["Output"], metrics=measured.outputs["metrics"], is_final=is_final)


@pytest.fixture(scope="session")
def two_step_package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The two-step pipeline as kfp compiles it: a pipeline spec and a platform spec."""
    path = tmp_path_factory.mktemp("compiled") / "two-steps.yaml"
    compiler.Compiler().compile(two_steps, str(path))
    return path


@pytest.fixture
def submit_to() -> Callable[..., Submission]:
    """`submit` for an endpoint and a package, with the rest chosen unless given."""

    def submit_with_defaults(endpoint: str, package: Path, **options: Any) -> Submission:
        options = {"experiment": "trials", "run_name": "first", "arguments": {"num_rows": 3}, **options}
        return submit(str(package), endpoint, **options)

    return submit_with_defaults
