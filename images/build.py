"""Builds the container images, and writes beside them what they are: `make images`.

    python3 images/build.py cpu [gpu]

For each image it writes build/images/NAME.json, with the tag, the id and, once it is pushed, the digest to pin, and
build/images/NAME.sbom.json, its bill of materials (CycloneDX). The tag is the commit; -dirty is added where a file that
goes into the image differs from it. From the environment:

    REGISTRY                 such as ghcr.io/me: the image is named after it and pushed; localhost when left out
    TAG                      instead of the commit's, outside a git checkout
    TORCH_INDEX              index of torch's CPU build for the image `cpu`; torch's own when left out
    PYTHON_IMAGE, EXTRAS, PIP_EXTRA_INDEX_URL, FLASH_ATTN_WHEEL
                             build arguments; the Dockerfile says what they are
    DOCKER                   the command, docker when left out

Needs Python 3.11, git and an engine (DOCKER_HOST); nothing is installed.
"""

import datetime
import json
import os
import shutil
import subprocess
import sys
import tomllib
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUTPUT = ROOT / "build" / "images"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PASSED_ON = ("PYTHON_IMAGE", "EXTRAS", "PIP_EXTRA_INDEX_URL", "FLASH_ATTN_WHEEL")
DEVICES = {"cpu": {}, "gpu": {"DEVICE": "gpu", "NVIDIA_VISIBLE_DEVICES": "all"}}
"""Image → what the Dockerfile is told of it."""
INSIDE = ("baton", "components", "pipelines", "images", "pyproject.toml", "requirements.lock", "torch-cpu.lock",
          "README.md", "LICENSE")  # fmt: skip
SBOM = "/opt/baton/share/sbom.cdx.json"


def main(names: list[str]) -> None:
    if unknown := [name for name in names if name not in DEVICES]:
        raise SystemExit(f"make images: IMAGES names {', '.join(unknown)}; expected some of {', '.join(DEVICES)}.")
    docker = os.environ.get("DOCKER") or "docker"
    if not shutil.which(docker):
        raise SystemExit(f"make images: there is no command {docker!r}; install Docker, or set DOCKER=podman.")
    OUTPUT.mkdir(parents=True, exist_ok=True)
    for name in names:
        build(name, docker)


def build(name: str, docker: str) -> None:
    registry = os.environ.get("REGISTRY")
    revision, created = source()
    image = f"{registry or 'localhost'}/baton-{name}:{os.environ.get('TAG') or tag(revision)}"
    with open(ROOT / "pyproject.toml", "rb") as file:
        version = tomllib.load(file)["project"]["version"]
    given = {key: os.environ[key] for key in PASSED_ON if os.environ.get(key)}
    if name == "cpu" and "PIP_EXTRA_INDEX_URL" not in os.environ:
        index = os.environ.get("TORCH_INDEX") or CPU_INDEX
        try:
            urllib.request.urlopen(f"{index}/torch/", timeout=20).close()
            given["PIP_EXTRA_INDEX_URL"] = index
        except (OSError, ValueError) as error:
            print(f"make images: {index} is out of reach ({error}): the image takes PyPI's torch, with CUDA on Linux.")
    labels = {"VERSION": version, "REVISION": revision, "CREATED": created}
    arguments = [
        part for key, value in (given | DEVICES[name] | labels).items() for part in ("--build-arg", f"{key}={value}")
    ]
    run(docker, "build", "--file", "images/Dockerfile", "--tag", image, *arguments, ".")
    if registry:
        run(docker, "push", image)
    about = json.loads(read(docker, "image", "inspect", image))[0]
    digest = next((found for found in about["RepoDigests"] if found.startswith(image.rpartition(":")[0] + "@")), None)
    sbom = read(docker, "run", "--rm", "--network", "none", "--read-only", image, "cat", SBOM)
    (OUTPUT / f"{name}.sbom.json").write_text(sbom, encoding="utf-8")
    document = {
        "image": image,
        "id": about["Id"],
        "digest": digest,
        "bytes": about["Size"],
        "revision": revision,
        "created": created,
    }
    (OUTPUT / f"{name}.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    print(f"{digest or image}  {about['Size'] / 1e9:.2f} GB  (build/images/{name}.json, {name}.sbom.json)")
    print(f"next: baton run RECIPE --runner docker --image {image}")


def source() -> tuple[str, str]:
    """Returns the commit and its time, or SOURCE_DATE_EPOCH, as ISO 8601."""
    try:
        revision = read("git", "rev-parse", "HEAD").strip()
        epoch = read("git", "show", "--no-patch", "--format=%ct", "HEAD").strip()
    except (OSError, subprocess.CalledProcessError):
        revision, epoch = "unknown", "0"
    moment = datetime.datetime.fromtimestamp(int(os.environ.get("SOURCE_DATE_EPOCH") or epoch), datetime.UTC)
    return revision, moment.strftime("%Y-%m-%dT%H:%M:%SZ")


def tag(revision: str) -> str:
    if revision == "unknown":
        raise SystemExit("make images: this is no git checkout, whose commit names the image; set TAG.")
    return revision[:12] + ("-dirty" if read("git", "status", "--porcelain", "--", *INSIDE) else "")


def run(*command: str) -> None:
    if code := subprocess.run(command, cwd=ROOT, check=False).returncode:
        raise SystemExit(f"make images: {' '.join(command[:2])} ended with code {code}.")


def read(*command: str) -> str:
    return subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    main(sys.argv[1:] or ["cpu"])
