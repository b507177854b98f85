"""MLflow: a model is logged and registered once, and an alias moves only when a gate held."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import mlflow
import pytest

from baton.errors import BatonError, UserError
from baton.export import export, exportable
from baton.recipe import load
from baton.recipe.recipe import Recipe
from baton.runs.outcomes import RegistryEntry
from baton.runs.run import Run
from baton.store.manifest import Manifest, read_manifest
from baton.store.storage import Storage
from baton.tracking import servers, tracking_run
from baton.tracking.tracker import Tracker
from tests.support.kubeflows_mlflow import KubeflowsMLflow


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty database of MLflow, whose tables take it seconds to make."""
    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    mlflow.MlflowClient(f"sqlite:///{path}").search_experiments()
    return path


class Exported:
    """A run with an export that MLflow takes for a model."""

    def __init__(self, database: Path, folder: Path, scratch_recipe: dict[str, Any], **export: Any) -> None:
        shutil.copyfile(database, folder / "mlflow.db")
        self.uri = f"sqlite:///{folder / 'mlflow.db'}"
        document = {
            **scratch_recipe,
            "tracking": {"mlflow": self.uri},
            "evaluation": {"gate": {"loss": "<= 3"}},
            "export": {"formats": ["safetensors", "mlflow"], "registered_model": "docs", **export},
        }
        self.recipe: Recipe = load.validate(document, origin="test")
        self.run = Run(Storage(str(folder / "store")), "r")
        self.run.create(self.recipe)
        tracking_run.start(self.run, self.recipe)
        self.client = mlflow.MlflowClient(self.uri)
        self.folder = folder / "model"
        mlflow.models.Model(flavors={"transformers": {}}).save(str(self._made(self.folder) / "MLmodel"))
        (self.folder / "weights").write_bytes(b"weights")

    def _made(self, folder: Path) -> Path:
        folder.mkdir()
        return folder

    def log(self, attempt: str = "one") -> RegistryEntry:
        manifest = Manifest(kind="model", folder=attempt, files={})
        logged = export.log_to_mlflow(self.run, self.recipe, manifest, str(self.folder), "5" * 64)
        assert logged is not None
        return logged


def test_a_version_is_made_once(database: Path, tmp_path: Path, scratch_recipe: dict[str, Any]) -> None:
    exported = Exported(database, tmp_path, scratch_recipe)
    first = exported.log()
    assert (first.name, first.version) == ("docs", "1")
    assert exported.log() == first
    exported.run.storage.write(exported.run.path("registry.json"), b'{"export": "elsewhere"}')  # what was lost
    assert exported.log().version == "1"
    assert exported.log("two").version == "2"
    assert len(exported.client.search_model_versions("name='docs'")) == 2
    version = exported.client.get_model_version("docs", "1")
    tracked = exported.run.require("tracking.json")["run_id"]
    assert version.run_id == tracked
    assert version.tags["baton.run"] == "r"
    assert version.tags["baton.digest"] == "5" * 64


def test_the_files_are_those_that_were_checked(database: Path, tmp_path: Path, scratch_recipe: dict[str, Any]) -> None:
    exported = Exported(database, tmp_path, scratch_recipe)
    found = exported.log()
    mlflow.set_tracking_uri(exported.uri)
    local = Path(mlflow.artifacts.download_artifacts("models:/docs/1", dst_path=str(tmp_path / "down")))
    assert (local / "weights").read_bytes() == b"weights"
    about = mlflow.models.Model.load(str(local / "MLmodel"))
    assert about.model_id == found.model_id
    assert about.run_id == exported.run.require("tracking.json")["run_id"]
    assert mlflow.models.Model.load(str(exported.folder / "MLmodel")).model_id is None


@pytest.mark.parametrize(
    ("gate", "moved"),
    [(None, False), ({"passed": False, "lines": []}, False), ({"passed": True, "lines": []}, True)],
    ids=["no-gate", "failed", "held"],
)
def test_the_alias_moves_when_the_gate_held(
    gate: dict[str, Any] | None, moved: bool, database: Path, tmp_path: Path, scratch_recipe: dict[str, Any]
) -> None:
    exported = Exported(database, tmp_path, scratch_recipe, alias="production")
    exported.run.put("evaluation.json", {"gate": gate} if gate else {})
    found = exported.log()
    aliases = exported.client.get_registered_model("docs").aliases
    assert {name: str(version) for name, version in aliases.items()} == ({"production": "1"} if moved else {})
    assert found.alias == ("production" if moved else None)


def test_a_server_that_is_away_is_said_without_its_password(
    database: Path, tmp_path: Path, scratch_recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    exported = Exported(database, tmp_path, scratch_recipe)
    exported.run.put("tracking.json", {"mlflow": "http://me:secret@127.0.0.1:9", "run_id": "x"})
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(BatonError, match=r"MLflow at http://127\.0\.0\.1:9 did not take the model") as raised:
        exported.log()
    assert "secret" not in str(raised.value)
    assert read_manifest(exported.run.storage, exported.run.path("export")) is None


@pytest.fixture
def kubeflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KubeflowsMLflow:
    """Kubeflow's own MLflow, with the variables of a stage in this process."""
    there = KubeflowsMLflow(tmp_path)
    for name, value in there.stage(there.pipeline_run(), "export").items():
        monkeypatch.setenv(name, value)
    return there


@pytest.mark.parametrize("tracked", [True, False], ids=["tracked", "not tracked"])
def test_kubeflows_registry_takes_the_model_of_a_recipe_without_a_server(
    tracked: bool, kubeflow: KubeflowsMLflow, tmp_path: Path, scratch_recipe: dict[str, Any]
) -> None:
    section = {"formats": ["safetensors", "mlflow"], "registered_model": "docs"}
    recipe = load.validate({**scratch_recipe, "tracking": {"mlflow": None}, "export": section}, origin="test")
    run = Run(Storage(str(tmp_path / "store")), "r")
    run.create(recipe)
    if tracked:
        tracking_run.start(run, recipe)
    exportable.check_registry(recipe, servers.server_address(run, recipe))
    folder = tmp_path / "model"
    folder.mkdir()
    mlflow.models.Model(flavors={"transformers": {}}).save(str(folder / "MLmodel"))
    logged = export.log_to_mlflow(run, recipe, Manifest(kind="model", folder="one", files={}), str(folder), "5" * 64)
    assert logged
    assert (logged.mlflow, logged.name, logged.version) == (kubeflow.uri, "docs", "1")
    version = kubeflow.client.get_model_version("docs", "1")
    assert version.run_id == (run.require("tracking.json")["run_id"] if tracked else None)  # and not the stage's
    model = kubeflow.client.get_logged_model(logged.model_id)
    assert model.experiment_id == kubeflow.experiment


def test_a_model_without_a_registry_is_refused(tmp_path: Path, scratch_recipe: dict[str, Any]) -> None:
    export = {"formats": ["safetensors", "mlflow"], "registered_model": "docs"}
    recipe = load.validate({**scratch_recipe, "tracking": {"mlflow": None}, "export": export}, origin="test")
    run = Run(Storage(str(tmp_path / "store")), "r")
    with pytest.raises(UserError, match=r"'docs' has no registry, as tracking\.mlflow is null"):
        exportable.check_registry(recipe, servers.server_address(run, recipe))


@pytest.mark.slow
def test_the_model_of_training_takes_the_files_once(
    database: Path, tmp_path: Path, scratch_recipe: dict[str, Any]
) -> None:
    exported = Exported(database, tmp_path, scratch_recipe)
    with Tracker(exported.run) as tracker:
        tracker.log({"eval_loss": 2.5}, 3)
    tracking_run.close(exported.run, "FINISHED")  # rejected, say
    tracked = exported.run.require("tracking.json")["run_id"]
    (output,) = exported.client.get_run(tracked).outputs.model_outputs
    before = exported.client.get_logged_model(output.model_id)
    assert (before.status, before.tags["mlflow.model.isExternal"]) == ("READY", "true")
    found = exported.log()
    assert found.model_id == output.model_id
    after = exported.client.get_logged_model(found.model_id)
    assert (after.status, "mlflow.model.isExternal" in after.tags) == ("READY", False)
    assert [(metric.key, metric.value) for metric in after.metrics] == [("eval_loss", 2.5)]
    assert len(exported.client.get_run(tracked).outputs.model_outputs) == 1
    assert exported.log("two").model_id != found.model_id  # other files are another model
