"""One container, run to its end: what `kfp.local` calls for each stage, in place of kfp's.

kfp's own (2.17.0) runs a container with `auto_remove` and takes one that is gone before its exit code was read for a
success: of short failures one in six passed with Docker 20.10, and every failure after much output. Here a container is
removed only once it has been waited for, and whatever interrupts that.
"""

from __future__ import annotations

import codecs
import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import yaml

from baton.components.shared.core import events
from baton.components.shared.core.errors import UserError
from baton.components.shared.recipe.base import amount

if TYPE_CHECKING:
    from docker import DockerClient  # type: ignore[import-untyped]

KILLED = 137
"""Exit code of a process that was ended by SIGKILL, as by the kernel where memory runs out."""
_SHM = "/dev/shm"


@dataclass(frozen=True, kw_only=True)
class Needs:
    """Resources that the compiled file asks for a stage; 0 where it asks for nothing.

    Attributes:
        cpu: Cores.
        memory: Bytes.
        shm: Bytes of `/dev/shm`.
        gpus: Accelerators.
    """

    cpu: float = 0.0
    memory: int = 0
    shm: int = 0
    gpus: int = 0

    def arguments(self) -> dict[str, object]:
        """Returns it as Docker takes it."""
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
    """Reads what the stages of a compiled pipeline ask for, by the name of the stage's function.

    All tasks of one stage ask for the same: `resources` in the recipe has one value for them.
    """
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
        needs[_function(container["args"])] = Needs(
            cpu=amount(asked.get("resourceCpuLimit", "0")),
            memory=int(amount(asked.get("resourceMemoryLimit", "0"))),
            shm=int(sum(amount(volume["sizeLimit"]) for volume in volumes if volume["mountPath"] == _SHM)),
            gpus=int(asked.get("accelerator", {}).get("resourceCount", 0)),
        )
    return needs


class Containers:
    """Runs stages in containers.

    Args:
        needs: What each stage may use, by the name of its function.
    """

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
        """Runs a container to its end, prints what it prints, and removes it.

        Args:
            client: Docker's client.
            image: The image, which the engine has.
            command: Command and arguments.
            volumes: Folders, as Docker's client takes them.
            arguments: Whatever else it takes.

        Returns:
            The exit code.

        Raises:
            UserError: the engine refuses to start it.
        """
        stage = _function(command)
        needs = self._needs.get(stage, Needs())
        container = start(client, image, command, volumes=volumes, **needs.arguments(), **arguments)
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
    """A container that runs.

    Args:
        client: Docker's client.
        image: The image.
        command: Command and arguments.
        arguments: Whatever else Docker's client takes.
    """

    def __init__(self, client: DockerClient, image: str, command: Sequence[str], **arguments: object) -> None:
        self._container = client.containers.create(image, list(command), **arguments)
        try:
            self._output = self._container.attach(stream=True, demux=True)  # before the start, so that nothing is lost
            self._container.start()
        except BaseException:
            self.remove()
            raise

    def lines(self) -> Iterator[str]:
        """Yields what it prints until it ends, whole lines of either stream."""
        decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in range(2)]
        rests = ["", ""]
        for chunks in self._output:
            for index, chunk in enumerate(chunks):
                *whole, rests[index] = (rests[index] + decoders[index].decode(chunk or b"")).split("\n")
                yield from whole
        yield from filter(None, rests)

    def wait(self) -> int:
        """Waits for its end and returns its exit code."""
        return int(self._container.wait()["StatusCode"])

    def out_of_memory(self) -> bool:
        """Tells whether the kernel ended a process of it for its memory limit."""
        self._container.reload()
        return bool(self._container.attrs["State"]["OOMKilled"])

    def remove(self) -> None:
        """Ends it, if it has not ended, and removes it with its volumes."""
        import docker

        with contextlib.suppress(docker.errors.NotFound):
            self._container.remove(force=True, v=True)


def start(client: DockerClient, image: str, command: Sequence[str], **arguments: object) -> Container:
    """Starts a container.

    Raises:
        UserError: the engine refuses, with the reason that it gives.
    """
    import docker

    try:
        return Container(client, image, command, **arguments)
    except docker.errors.APIError as error:
        raise UserError(f"the container engine refuses a container of {image!r}: {error.explanation}.") from None


@contextlib.contextmanager
def installed(containers: Containers) -> Iterator[None]:
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
