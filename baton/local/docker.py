"""Containers for `baton run --runner docker`: their folders, environment, network and user, run to the end.

`kfp.local` calls `Containers.run` instead of kfp's runner, which (2.17.0 to 2.17.3) runs a container with `auto_remove`
and takes one that is gone before its exit code was read for a success: of short failures one in six passed with Docker
20.10, and every failure after much output. Here a container is removed only once it has been waited for.
A container sees the recipe's folders at their own paths, has a read-only root, and runs as the caller.
Credentials are environment variables: in no file, but shown by `docker inspect` while it lives.
"""

from __future__ import annotations

import codecs
import contextlib
import json
import os
import signal
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any
from urllib.parse import urlparse

import yaml

from baton import events
from baton.errors import UserError
from baton.machine import cache_dir
from baton.recipe.base import amount
from baton.recipe.recipe import Recipe
from baton.store.clouds import ANY_BUCKET, ENVIRONMENT

if TYPE_CHECKING:
    from docker import DockerClient  # type: ignore[import-untyped]
    from kfp.local import DockerRunner


KILLED = 137  # exit code after SIGKILL, as by the kernel where memory runs out
_SHM = "/dev/shm"


@dataclass(frozen=True, kw_only=True)
class Needs:
    """Resources of a stage in the compiled file: cores, bytes and accelerators, 0 where it asks for none."""

    cpu: float = 0.0
    memory: int = 0
    shm: int = 0
    gpus: int = 0

    def arguments(self) -> dict[str, object]:
        limits: dict[str, object] = {}
        if self.cpu:
            limits["nano_cpus"] = int(self.cpu * 1e9)
        if self.memory:
            limits |= {"mem_limit": self.memory, "memswap_limit": self.memory}  # a pod has no swap
        if self.shm:
            limits["shm_size"] = self.shm
        if self.gpus:
            from docker.types import DeviceRequest  # type: ignore[import-untyped]

            limits["device_requests"] = [DeviceRequest(count=self.gpus, capabilities=[["gpu"]])]
        return limits


def read_needs(package_path: str) -> dict[str, Needs]:
    """Reads the resources of a compiled pipeline's stages, by the name of the stage's function."""
    with open(package_path, encoding="utf-8") as file:
        spec, *platform = yaml.safe_load_all(file)
    kubernetes = {}
    for document in platform:
        kubernetes = document["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    needs = {}
    for label, executor in spec["deploymentSpec"]["executors"].items():
        container = executor["container"]
        asked = container.get("resources", {})
        volumes = kubernetes.get(label, {}).get("emptyDirMounts", [])
        # All tasks of a stage ask for the same, which `resources` in the recipe has once.
        needs[_function(container["args"])] = Needs(
            cpu=amount(asked.get("resourceCpuLimit", "0")),
            memory=int(amount(asked.get("resourceMemoryLimit", "0"))),
            shm=int(sum(amount(volume["sizeLimit"]) for volume in volumes if volume["mountPath"] == _SHM)),
            gpus=int(asked.get("accelerator", {}).get("resourceCount", 0)),
        )
    return needs


class Containers:
    """Runs stages in containers, with resources by the name of the stage's function."""

    def __init__(self, needs: dict[str, Needs]) -> None:
        self._needs = needs

    def run(
        self,
        client: DockerClient,
        image: str,
        command: Sequence[str],
        volumes: Mapping[str, Mapping[str, str]],
        **arguments: object,
    ) -> int:
        """Runs a container to its end, prints its output, removes it, and returns its exit code."""
        stage = _function(command)
        needs = self._needs.get(stage, Needs())
        container = Container(client, image, command, volumes=volumes, **needs.arguments(), **arguments)
        try:
            for line in container.lines():
                print(line)
            code = container.wait()
            if code == KILLED and container.out_of_memory():
                message = f"it was killed when its memory reached {needs.memory / 2**30:.3g} GiB (resources.memory)."
                error = events.Error(stage.replace("_", " "), message, exit_code=1)
                print(events.MARK + json.dumps({"event": error.kind, **error.fields()}))
            return code
        finally:
            container.remove()


class Container:
    """A running container, unless the engine refuses it; `arguments` are those of Docker's client."""

    def __init__(self, client: DockerClient, image: str, command: Sequence[str], **arguments: object) -> None:
        import docker

        try:
            self._container = client.containers.create(image, list(command), **arguments)
            try:
                self._output = self._container.attach(stream=True, demux=True)  # before the start: nothing is lost
                self._container.start()
            except BaseException:
                self.remove()
                raise
        except docker.errors.APIError as error:
            raise UserError(f"the container engine refuses a container of {image!r}: {error.explanation}.") from None

    def lines(self) -> Iterator[str]:
        """Yields its output until it ends, whole lines of either stream."""
        decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in range(2)]
        rests = ["", ""]
        for chunks in self._output:
            for index, chunk in enumerate(chunks):
                *whole, rests[index] = (rests[index] + decoders[index].decode(chunk or b"")).split("\n")
                yield from whole
        yield from filter(None, rests)

    def wait(self) -> int:
        return int(self._container.wait()["StatusCode"])

    def out_of_memory(self) -> bool:
        self._container.reload()
        return bool(self._container.attrs["State"]["OOMKilled"])

    def remove(self) -> None:
        import docker

        with contextlib.suppress(docker.errors.NotFound):
            self._container.remove(force=True, v=True)


@contextlib.contextmanager
def containers_installed(containers: Containers) -> Iterator[None]:
    """Puts `Containers.run` where kfp's Docker runner calls its own function."""
    from kfp.local import docker_task_handler as handler

    before = handler.run_docker_container
    handler.run_docker_container = containers.run
    try:
        yield
    finally:
        handler.run_docker_container = before


def _function(command: Sequence[str]) -> str:
    return command[command.index("--function_to_execute") + 1]


NETWORK = "BATON_DOCKER_NETWORK"  # environment variable; else the host's for addresses of this machine, or Docker's own

FORWARDED = (  # beginnings of the names of variables that containers get
    *ENVIRONMENT,
    *("HF_", "HUGGING_FACE_", "MLFLOW_", "WANDB_", "OMP_", "MKL_", "TOKENIZERS_", "BATON_STORE_", "BATON_SIGN"),
)
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
    """Yields kfp's Docker runner for a recipe, once a container has found all that stages need."""
    from kfp import local

    client = _connect()
    try:
        _require_image(client, recipe.resources.image)
        arguments = _arguments(recipe, client)
        _look(client, recipe, root, arguments)
    finally:
        client.close()
    with containers_installed(Containers(read_needs(package_path))), _ended_by_term():
        yield local.DockerRunner(**arguments)


def environment(recipe: Recipe, here: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of the containers, taken from this machine's."""
    wanted = {*FORWARDED_NAMES, *(name.lower() for name in FORWARDED_NAMES), *recipe.resources.secret_env}
    passed = {name: value for name, value in here.items() if name in wanted or name.startswith(FORWARDED)}
    for name, file in (("AWS_SHARED_CREDENTIALS_FILE", "credentials"), ("AWS_CONFIG_FILE", "config")):
        path = os.path.expanduser(os.path.join("~", ".aws", file))
        if name not in passed and os.path.isfile(path):
            passed[name] = path
    passed["BATON_CACHE"] = cache_dir()
    passed["HF_HOME"] = here.get("HF_HOME") or os.path.expanduser(os.path.join("~", ".cache", "huggingface"))
    passed["BATON_EVENTS"] = "stdout"
    # Those in `resources.env` are in the compiled file, and hold.
    return {name: value for name, value in passed.items() if name not in recipe.resources.env}


def folders(recipe: Recipe, env: Mapping[str, str]) -> dict[str, bool]:
    """Returns the files of this machine that containers see: path → whether they may write there."""
    document = recipe.model_dump(mode="json")
    mounted = {path: False for path in _paths([document, *env.values()]) if path not in _OURS}
    written = [recipe.store.cache_dir, *(env[name] for name in _CACHES if name in env)]
    if "://" not in recipe.store.uri:
        if recipe.store.uri in _OURS:
            raise UserError(
                f"store {recipe.store.uri!r} is a folder of every image and cannot be shared with containers.",
                remedy=f"Name a folder that holds nothing else, or a bucket: {ANY_BUCKET}.",
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
    hosts = [urlparse(address).hostname or "" for address in addresses if "://" in address]
    return "host" if any(host in ("localhost", "::1") or host.startswith("127.") for host in hosts) else None


def _paths(value: object) -> Iterator[str]:
    """Yields the files and folders in a document, of a pattern the folder above its first wildcard."""
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


def _arguments(recipe: Recipe, client: DockerClient) -> dict[str, Any]:
    """Returns the options of every container, as Docker's client takes them."""
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
    """Fetches an image that the engine lacks where its name has a registry in it."""
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


def _look(client: DockerClient, recipe: Recipe, root: str, arguments: dict[str, Any]) -> None:
    """Starts one container to check that stages will find all they need."""
    seen = [mount["Target"] for mount in arguments["mounts"] if mount["Type"] == "bind"]
    written = [mount["Target"] for mount in arguments["mounts"] if not mount.get("ReadOnly")]
    # A file that was made just now: an engine on another machine may have folders of the same names.
    with tempfile.NamedTemporaryFile(dir=root) as mark:
        volumes = {root: {"bind": root, "mode": "rw"}}
        script = f"{_SEEN}shift {len(seen) + 1}\n{_WRITABLE}"
        command = ["sh", "-c", script, "sh", mark.name, *seen, root, *written]
        container = Container(client, recipe.resources.image, command, volumes=volumes, **arguments)
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
            remedy=f"Use an engine on this machine, share the folder, or use a store at {ANY_BUCKET}.",
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
