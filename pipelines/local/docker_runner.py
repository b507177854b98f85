"""What containers of `baton run --runner docker` get from this machine: folders, environment, network, a user.

A container sees the folders that the recipe names, at their own paths, and nothing else of this machine. Its root is
read-only; it writes to the store, to the caches, to its own `/tmp` and to `/dev/shm`. It runs as the caller, so
that what it writes is the caller's. Credentials are passed on as environment: they are in no file, and in
`docker inspect` while the container lives.
"""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, TypedDict
from urllib.parse import urlparse

from baton.components.shared.core.errors import UserError
from baton.components.shared.core.machine import cache_dir
from baton.components.shared.recipe import Recipe
from baton.components.shared.store.registry import ENVIRONMENT
from baton.pipelines.local import containers

if TYPE_CHECKING:
    from types import FrameType

    from docker import DockerClient  # type: ignore[import-untyped]
    from docker.types import Mount  # type: ignore[import-untyped]
    from kfp.local import DockerRunner

NETWORK = "BATON_DOCKER_NETWORK"
"""Environment variable: Docker network of the containers. When left out, the host's where an address that they need is
on this machine, Docker's own otherwise."""

FORWARDED = (
    *ENVIRONMENT,
    *("HF_", "HUGGING_FACE_", "MLFLOW_", "WANDB_", "OMP_", "MKL_", "TOKENIZERS_", "BATON_STORE_", "BATON_SIGN"),
)
"""Beginnings of the names of environment variables that containers get."""
FORWARDED_NAMES = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")

_OURS = ("/", "/tmp", "/dev", "/dev/shm", "/proc", "/sys", "/bin", "/etc", "/lib", "/opt", "/opt/baton", "/usr")
"""Folders that an image has itself."""
_CACHES = ("BATON_CACHE", "HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "HF_XET_CACHE", "HF_MODULES_CACHE")
_SEEN = """
command -v baton >/dev/null || { echo image; exit 3; }
for path; do [ -e "$path" ] || { echo "unseen $path"; exit 3; }; done
"""
_WRITABLE = 'for path; do [ -w "$path" ] || { echo "readonly $path"; exit 3; }; done'


@contextlib.contextmanager
def runner(recipe: Recipe, package_path: str, root: str) -> Iterator[DockerRunner]:
    """Yields kfp's Docker runner for a recipe, once a container has seen what stages will need.

    Args:
        recipe: The recipe, its paths absolute.
        package_path: The compiled file.
        root: Folder for the outputs of tasks.

    Raises:
        UserError: there is no engine, it has no such image, or containers do not see a folder.
    """
    from kfp import local

    client = _connect()
    try:
        _require_image(client, recipe.resources.image)
        arguments = _arguments(recipe, client)
        _look(client, recipe, root, arguments)
    finally:
        client.close()
    with containers.installed(containers.Containers(containers.read_needs(package_path))), _ended_by_term():
        yield local.DockerRunner(**arguments)


def environment(recipe: Recipe, here: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of the containers.

    Args:
        recipe: Its `resources.env` is in the compiled file and comes before what this machine has;
            `resources.secret_env` names credentials.
        here: This machine's environment.
    """
    wanted = {*FORWARDED_NAMES, *(name.lower() for name in FORWARDED_NAMES), *recipe.resources.secret_env}
    passed = {name: value for name, value in here.items() if name in wanted or name.startswith(FORWARDED)}
    for name, file in (("AWS_SHARED_CREDENTIALS_FILE", "credentials"), ("AWS_CONFIG_FILE", "config")):
        path = os.path.expanduser(os.path.join("~", ".aws", file))
        if name not in passed and os.path.isfile(path):
            passed[name] = path
    passed["BATON_CACHE"] = cache_dir()
    passed["HF_HOME"] = here.get("HF_HOME") or os.path.expanduser(os.path.join("~", ".cache", "huggingface"))
    passed["BATON_EVENTS"] = "stdout"
    return {name: value for name, value in passed.items() if name not in recipe.resources.env}


def folders(recipe: Recipe, env: Mapping[str, str]) -> dict[str, bool]:
    """Returns what containers see of this machine's files: path → whether they may write there.

    Args:
        recipe: The recipe, its paths absolute.
        env: The environment of the containers.

    Raises:
        UserError: the store is a folder that an image has itself.
    """
    document = recipe.model_dump(mode="json")
    mounted = {path: False for path in _paths([document, *env.values()]) if path not in _OURS}
    written = [recipe.store.cache_dir, *(env[name] for name in _CACHES if name in env)]
    if "://" not in recipe.store.uri:
        if recipe.store.uri in _OURS:
            raise UserError(
                f"store {recipe.store.uri!r} is a folder of every image and cannot be shared with containers.",
                remedy="Name a folder that holds nothing else, or a bucket: s3://, gs:// or az://.",
            )
        written.append(recipe.store.uri)
    if (recipe.tracking.mlflow or "").startswith("sqlite:///"):
        written.append(os.path.dirname(str(recipe.tracking.mlflow).removeprefix("sqlite:///")))
    for path in filter(None, written):
        os.makedirs(path, exist_ok=True)
        mounted[path] = True
    return mounted


def network(env: Mapping[str, str], recipe: Recipe) -> str | None:
    """Returns the network of the containers, None for Docker's own; see `NETWORK`."""
    if chosen := os.environ.get(NETWORK):
        return chosen
    addresses = [*env.values(), *recipe.resources.env.values(), recipe.tracking.mlflow or ""]
    return "host" if any(_is_here(address) for address in addresses) else None


def _is_here(address: str) -> bool:
    if "://" not in address:
        return False
    host = urlparse(address).hostname or ""
    return host in ("localhost", "::1") or host.startswith("127.")


def _paths(value: object) -> Iterator[str]:
    """Yields the files and folders that a document names, of a pattern the folder above its first wildcard."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for part in value:
            yield from _paths(part)
    elif isinstance(value, str) and value.startswith("/") and "\n" not in value:
        plain = value
        while any(sign in plain for sign in "*?["):
            plain = os.path.dirname(plain)
        if os.path.isdir(plain) or os.path.isfile(plain):
            yield os.path.normpath(plain)


class Arguments(TypedDict):
    """Options that every container is run with, as Docker's client takes it."""

    environment: dict[str, str]
    mounts: list[Mount]
    network_mode: str | None
    user: str
    read_only: bool
    cap_drop: list[str]
    security_opt: list[str]
    labels: dict[str, str]


def _arguments(recipe: Recipe, client: DockerClient) -> Arguments:
    from docker.types import Mount

    env = environment(recipe, os.environ)
    mounts = [Mount(path, path, type="bind", read_only=not written) for path, written in folders(recipe, env).items()]
    rootless = any("rootless" in option for option in client.info().get("SecurityOptions") or [])
    return {
        "environment": env,
        "mounts": [*mounts, Mount("/tmp", None, type="volume")],  # on disk, as a pod's; a tmpfs would count as memory
        "network_mode": network(env, recipe),
        "user": "0:0" if rootless else f"{os.getuid()}:{os.getgid()}",  # a rootless engine's root is the caller
        "read_only": True,
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges", "label=disable"],  # SELinux would hide folders that have no label for it
        "labels": {"app.kubernetes.io/part-of": "baton", "baton/recipe": recipe.name},
    }


def _connect() -> DockerClient:
    """Returns Docker's client.

    Raises:
        UserError: no engine answers.
    """
    import docker

    try:
        client = docker.from_env()
        client.ping()
    except docker.errors.DockerException as error:
        where = os.environ.get("DOCKER_HOST") or "the default socket (DOCKER_HOST is not set)"
        raise UserError(
            f"--runner docker: no container engine answers at {where}: {error}.",
            remedy="Start Docker, or set DOCKER_HOST to an engine on this machine.",
        ) from None
    return client


def _require_image(client: DockerClient, image: str) -> None:
    """Fetches an image that the engine lacks where its name has a registry in it.

    Raises:
        UserError: there is no such image.
    """
    import docker

    try:
        client.images.get(image)
        return
    except docker.errors.ImageNotFound:
        reason = "it is not on this engine"
    registry = image.partition("/")[0]
    if "/" in image and ("." in registry or ":" in registry):  # any other name would be fetched from Docker Hub
        try:
            client.images.pull(image)
            return
        except docker.errors.APIError as error:
            reason = error.explanation or str(error)
    raise UserError(
        f"image {image!r} cannot be used: {reason}.",
        remedy="Build one with `make images` and name it: --image NAME:TAG, or resources.image in the recipe.",
    )


def _look(client: DockerClient, recipe: Recipe, root: str, arguments: Arguments) -> None:
    """Starts one container to see whether stages will find what they need.

    Raises:
        UserError: they will not.
    """
    seen = [mount["Target"] for mount in arguments["mounts"] if mount["Type"] == "bind"]
    written = [mount["Target"] for mount in arguments["mounts"] if not mount.get("ReadOnly")]
    # A file that was made just now: an engine on another machine may have folders of the same names.
    with tempfile.NamedTemporaryFile(dir=root) as mark:
        volumes = {root: {"bind": root, "mode": "rw"}}
        script = f"{_SEEN}shift {len(seen) + 1}\n{_WRITABLE}"
        command = ["sh", "-c", script, "sh", mark.name, *seen, root, *written]
        container = containers.start(client, recipe.resources.image, command, volumes=volumes, **arguments)
        try:
            answer = " ".join(container.lines())
            code = container.wait()
        finally:
            container.remove()
    if code:
        raise _unusable(recipe.resources.image, answer)


def _unusable(image: str, answer: str) -> UserError:
    what, _, path = answer.partition(" ")
    if what == "image":
        return UserError(f"image {image!r} has no `baton`.", remedy="Build one with `make images`, or give --image.")
    if what == "unseen":
        return UserError(
            f"containers do not see {path!r}: the engine is on another machine, or does not share that folder.",
            remedy="Use an engine on this machine, share the folder, or use a store at s3://, gs:// or az://.",
        )
    if what == "readonly":
        return UserError(f"containers may not write to {path!r} as user {os.getuid()}.", remedy="Check who owns it.")
    return UserError(f"a container of {image!r} does not work on this engine: {answer or 'it says nothing'}.")


@contextlib.contextmanager
def _ended_by_term() -> Iterator[None]:
    """Lets SIGTERM end this process as Ctrl-C does: by way of the clean-up that removes the container."""

    def end(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
