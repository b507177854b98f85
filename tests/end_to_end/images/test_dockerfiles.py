"""What can be said of the Dockerfile and its builds without an engine."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[3]
DOCKERFILE = ROOT / "images" / "Dockerfile"


def hadolint() -> str:
    beside = Path(sys.executable).with_name("hadolint")
    found = str(beside) if beside.exists() else shutil.which("hadolint")
    if not found:
        pytest.skip("hadolint is not installed")
    return found


def test_hadolint_finds_nothing():
    done = subprocess.run([hadolint(), DOCKERFILE], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_hadolint_finds_a_planted_fault(tmp_path):
    bad = tmp_path / "Dockerfile"
    bad.write_text("FROM python:latest\nRUN cd /tmp && pip install torch\n")
    done = subprocess.run([hadolint(), bad], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "DL3007" in done.stdout


def test_ends_as_a_numbered_user_with_the_code_after_its_dependencies():
    stages = DOCKERFILE.read_text().split("\nFROM ")[1:]
    assert ["COPY components" in stage for stage in stages] == [False, False, True, False, False, False]
    last = stages[-1]
    assert re.findall(r"^USER (.*)$", last, re.MULTILINE) == [
        "10001:10001"
    ]  # of a name nobody knows that it is not root
    assert re.findall(r"^COPY --from=(\w+)", last, re.MULTILINE) == ["dependencies", "code", "reads", "sbom"]
    assert not any("HEALTHCHECK" in stage for stage in stages)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        pytest.param("cpu", {}, id="cpu"),
        pytest.param("gpu", {"DEVICE": "gpu", "NVIDIA_VISIBLE_DEVICES": "all"}, id="gpu"),
    ],
)
def test_an_image_is_told_its_device_and_no_argument_that_the_dockerfile_lacks(name, told, tmp_path):
    engine = tmp_path / "engine"
    engine.write_text(f'#!/bin/sh\n[ "$1" = build ] && printf \'%s\\n\' "$@" >{tmp_path}/arguments\nexit 1\n')
    engine.chmod(0o755)
    env = {**os.environ, "DOCKER": str(engine), "TAG": "x", "EXTRAS": "export"}
    subprocess.run([sys.executable, ROOT / "images" / "build.py", name], env=env, capture_output=True, check=False)
    words = (tmp_path / "arguments").read_text().splitlines()
    arguments = dict(words[at + 1].split("=", 1) for at, word in enumerate(words) if word == "--build-arg")
    assert {key: arguments[key] for key in ("DEVICE", "NVIDIA_VISIBLE_DEVICES") if key in arguments} == told
    assert arguments["EXTRAS"] == "export"
    declared = set(re.findall(r"^ARG (\w+)", DOCKERFILE.read_text(), re.MULTILINE))
    assert arguments.keys() <= declared
    assert words[words.index("--file") + 1] == "images/Dockerfile"


def requirements(folder: Path, *extras: str) -> subprocess.CompletedProcess[str]:
    for name in ("pyproject.toml", "requirements.lock", "torch-cpu.lock"):
        shutil.copy(ROOT / name, folder)
    return subprocess.run(
        [sys.executable, ROOT / "images" / "requirements.py", *extras],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


def names(done: subprocess.CompletedProcess[str]) -> set[str]:
    assert done.returncode == 0, done.stderr
    return {line.partition("==")[0] for line in done.stdout.splitlines() if "==" in line}


def test_an_image_installs_what_the_code_needs_and_nothing_of_development(tmp_path):
    found = names(requirements(tmp_path, "."))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {Requirement(line).name for line in project["dependencies"]} <= found
    assert {"botocore", "aiobotocore", "markupsafe", "sympy"} <= found  # brought by others
    assert found.isdisjoint({"pytest", "mypy", "moto", "pip-tools", "rouge-score", "liger-kernel", "mkdocs"})


def test_extras_and_groups_are_added(tmp_path):
    alone, gpu, server = (
        names(requirements(tmp_path, ".", *more)) for more in ((), ("bitsandbytes", "gpu", "gpu"), ("mlflow-server",))
    )
    # MLflow reads the GPU's utilisation with nvidia-ml-py.
    assert {"bitsandbytes", "liger-kernel", "nvidia-ml-py", "triton", "nvidia-cudnn-cu13"} <= gpu - alone
    assert {"psycopg2-binary"} <= server - alone
    assert names(requirements(tmp_path, "installer")) == {"pip"}


def test_every_image_has_what_stages_import_for_metrics_and_sweeps():
    (told,) = re.findall(r"^RUN set -- (.*?) \\$", DOCKERFILE.read_text(), re.MULTILINE)
    assert told.split() == [".", "metrics", "sweep"]


def test_the_base_is_the_one_that_dependabot_moves():
    (base,) = re.findall(r"^ARG PYTHON_IMAGE=(.*)$", DOCKERFILE.read_text(), re.MULTILINE)
    assert re.fullmatch(r"[\w.:-]+@sha256:[0-9a-f]{64}", base)
    assert re.findall(r"^FROM (.*)$", (ROOT / "images" / "base.Dockerfile").read_text(), re.MULTILINE) == [base]


def test_an_extra_that_is_not_there_is_named(tmp_path):
    done = requirements(tmp_path, "flash")
    assert done.returncode == 1
    assert done.stderr.startswith("EXTRAS names flash; pyproject.toml has ., dev, docs, evaluate")


@pytest.mark.parametrize(
    ("names", "env", "message"),
    [
        (["tpu"], {}, "make images: IMAGES names tpu; expected some of cpu, gpu.\n"),
        (["cpu"], {"DOCKER": "no-such-engine"}, "make images: there is no command 'no-such-engine'; install Docker, "),
    ],
    ids=["unknown-image", "no-engine"],
)
def test_what_hinders_a_build_is_one_message(names, env, message):
    done = subprocess.run(
        [sys.executable, ROOT / "images" / "build.py", *names],
        env={"PATH": "/usr/bin:/bin", **env},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith(message)
