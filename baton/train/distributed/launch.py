"""Ranks of a chunk on this machine: each pinned to one device, joined, and failing with one message."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import psutil

from baton import errors, events, machine, scratch
from baton.errors import BatonError, DeviceError, NodeError, ProcessLostError
from baton.recipe.recipe import Recipe
from baton.train.distributed.ranks import Ranks

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure


logger = logging.getLogger("baton")

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
BROKEN_LINK = r"NCCL|gloo/transport|connectFullMesh|DistNetworkError|DistStoreError"
BROKEN_DEVICE = re.compile(
    rf"CUDA error|CUDA driver error|CUBLAS_STATUS|CUDNN_STATUS|cuDNN error|device-side assert|{BROKEN_LINK}"
)
"""Torch's messages for a broken device or link, which their process cannot mend."""


def is_device_broken(message: str) -> bool:
    """Tells whether an error is a device's, which a fresh process may find in order."""
    # Memory that is too small stays too small, and is a CUDA error, too.
    return bool(BROKEN_DEVICE.search(message)) and "out of memory" not in message


@contextlib.contextmanager
def watch_device(step: Callable[[], int]) -> Iterator[None]:
    """Raises `DeviceError` in place of a broken device's error, with the newest step that `step` returns."""
    try:
        yield
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        # No state that is trained can break the link to another device: the step says nothing about it.
        if isinstance(error, BatonError) or not is_device_broken(text) or re.search(BROKEN_LINK, text):
            raise
        logger.exception("a device broke")
        raise DeviceError(f"{text} It came after step {step()}.") from None


def pin_device(recipe: Recipe, ranks: Ranks) -> None:
    """Hides all GPUs but its own from a process that trains alone, before anything has asked CUDA for them."""
    # With several visible ones `Trainer` wraps the model in DataParallel and multiplies the rows per step. Ranks of
    # torch's launcher choose theirs by local rank and must see all; with virtual workers each trains as if alone.
    if (ranks.launched and not recipe.parallel.virtual_workers) or recipe.resources.gpus == 0:
        return
    visible = os.environ.get(VISIBLE_DEVICES, ",".join(map(str, range(ranks.local_rank + 1)))).split(",")
    os.environ[VISIBLE_DEVICES] = visible[ranks.local_rank % len(visible)].strip()  # an empty one hides all, and stays


NODES = "PET_NNODES"
"""Number of machines, which Kubeflow Trainer sets in each pod of a job."""


def is_node() -> bool:
    return NODES in os.environ


def rendezvous_settings(run_id: str) -> dict[str, Any]:
    """Returns the rendezvous as torch's `LaunchConfig` takes it: on this machine, or among the pods of a job."""
    if not is_node():
        return {
            "min_nodes": 1,
            "max_nodes": 1,
            # Several chunks may train on one machine: the name is this process's own, and torch takes a free port.
            "run_id": f"{run_id}-{os.getpid()}",
            "rdzv_backend": "c10d",
            "rdzv_endpoint": "127.0.0.1:0",
            "local_addr": "127.0.0.1",
        }
    nodes, rank = int(os.environ[NODES]), int(os.environ["PET_NODE_RANK"])
    return {
        "min_nodes": nodes,
        "max_nodes": nodes,
        "run_id": run_id,
        "rdzv_backend": "static",
        "rdzv_endpoint": f"{os.environ['PET_MASTER_ADDR']}:{os.environ['PET_MASTER_PORT']}",
        "rdzv_configs": {"rank": rank},
    }


def join_ranks(ranks: Ranks, recipe: Recipe) -> None:
    """Joins the other ranks; all but the first log only warnings, under their number."""
    workers = recipe.parallel.virtual_workers
    if ranks.size != recipe.world_size and (not workers or workers % ranks.size):
        message = f"{ranks.size} processes were started, and the recipe asks for {recipe.world_size}"
        message += f": on {ranks.nodes} of {recipe.max_nodes} machines, {recipe.processes} on each."
        if ranks.size < recipe.world_size:
            raise NodeError(message, remedy="Look at the job's pods: a machine or a GPU is missing.")
        raise BatonError(message, remedy="Let resources.nodes and resources.gpus be what the job has.")
    import torch

    threads = os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // recipe.processes)))
    torch.set_num_threads(int(threads))  # a forked process has imported torch before it could read the variable
    pin_device(recipe, ranks)
    ranks.join(on_gpu=recipe.resources.gpus > 0)
    if ranks.is_first:
        return
    events.mute()
    logging.getLogger("baton").setLevel(logging.WARNING)
    for handler in logging.getLogger().handlers:
        handler.setFormatter(logging.Formatter(f"%(asctime)s rank {ranks.rank} %(levelname)s %(name)s: %(message)s"))


T = TypeVar("T")
Handler = Callable[[int, FrameType | None], object] | int | None

KINDS = {kind.__name__: kind for kind in vars(errors).values() if isinstance(kind, type)}
"""Baton's errors by name, as torch's launcher writes them down."""
PEERS = 3.0
"""Seconds that an error waits which may only follow from another process's end, so that the cause is seen first."""

_preempted = threading.Event()


def launch_ranks(
    entry: Callable[..., T], arguments: tuple[object, ...], *, name: str, processes: int, forks: bool
) -> T | None:
    """Runs a function of a module in several processes on this machine, which train together.

    `name` is the rendezvous, the same on all machines. Returns the first rank's result, None on other machines.
    Raises `BatonError` if one of them failed; the message names it.
    """
    # No forks once this process has asked a cloud: its client has threads that a fork lacks.
    agent = _Agent(entry, arguments, name, processes, forks and "trl" in sys.modules)
    killed_before = machine.oom_kills()
    agent.start()
    before: Handler = None
    if threading.current_thread() is threading.main_thread():
        _preempted.clear()
        before = signal.signal(signal.SIGTERM, _note_sigterm) or signal.SIG_DFL
    signalled: set[int] = set()
    try:
        while agent.is_alive():
            agent.join(0.2)
            # SIGTERM once to each process, also to one started after it came; saving is up to them.
            for child in psutil.Process().children() if _preempted.is_set() else ():
                if child.pid not in signalled:
                    signalled.add(child.pid)
                    with contextlib.suppress(psutil.NoSuchProcess):
                        child.send_signal(signal.SIGTERM)
    except BaseException:
        # Ranks sit in collective calls and would wait there for one another.
        for child in psutil.Process().children(recursive=True):
            child.kill()
        raise
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)
    try:
        return agent.result()
    except ProcessLostError as error:
        if machine.oom_kills() > killed_before:
            raise machine.without_memory(error) from None
        raise


def _run_rank(entry: Callable[..., T], arguments: tuple[object, ...]) -> T:
    if signal.getsignal(signal.SIGTERM) is _note_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a forked process has it from the launching one
    events.setup_logging()
    try:
        return entry(*arguments)
    except Exception as error:
        if isinstance(error, DeviceError) or not isinstance(error, BatonError):
            time.sleep(PEERS)
        if not isinstance(error, BatonError) and errors.place_of(error):  # which torch's launcher does not pass on
            logger.exception("rank %s failed", os.environ.get("LOCAL_RANK"))
            raise BatonError(f"rank {os.environ.get('LOCAL_RANK')} failed: {errors.in_words(error)}.") from error
        raise
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


class _Agent(threading.Thread, Generic[T]):
    """Torch's launcher, in a thread: in the main one it would take the signals for itself, and save nothing."""

    def __init__(
        self, entry: Callable[..., T], arguments: tuple[object, ...], name: str, processes: int, forks: bool
    ) -> None:
        super().__init__(name="baton-launcher")
        self._entry, self._arguments = entry, arguments
        self._rendezvous, self._processes, self._forks = name, processes, forks
        self._folder = scratch.make(tempfile.gettempdir(), "launch")
        self._results: dict[int, T] = {}
        self._failure: BaseException | None = None

    def run(self) -> None:
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

        for name in ("torch.distributed.elastic", "torch.multiprocessing"):  # `result` says shorter what they log
            logging.getLogger(name).setLevel(logging.CRITICAL)
        config = LaunchConfig(
            **rendezvous_settings(self._rendezvous),
            nproc_per_node=self._processes,
            # A rank that starts again alone cannot join the others: the stage's retry starts all of them.
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=self._folder),
            # A process that has imported everything and done nothing is as good as a fresh interpreter, and quicker.
            start_method="fork" if self._forks else "spawn",
        )
        try:
            self._results = elastic_launch(config, _run_rank)(self._entry, self._arguments)
        except BaseException as error:
            self._failure = error
        finally:
            scratch.remove(self._folder)

    def result(self) -> T | None:
        """Returns the first rank's result, once the thread has ended; raises the error of a process that failed."""
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

        if isinstance(self._failure, ChildFailedError):
            raise _explained(self._failure) from None
        if self._failure:
            raise self._failure
        return self._results.get(0)


def _note_sigterm(_: int, __: FrameType | None) -> None:
    _preempted.set()


def _explained(failed: ChildFailedError) -> BatonError:
    """Returns one error for all failures: the first that gives a reason, else the first."""
    failures = sorted(failed.failures.values(), key=lambda failure: failure.timestamp)
    # By time: ranks that fail later fail for want of the first. A signal goes before codes, which only follow it.
    for failure in failures:
        kind, _, text = _noted(failure)[0].partition(": ")
        if kind in KINDS:
            return KINDS[kind](text)
    first = next((failure for failure in failures if failure.exitcode < 0), failures[0])
    if first.exitcode < 0:
        return ProcessLostError(
            f"rank {first.local_rank} was ended by {first.signal_name()}.",
            remedy="Run again: training resumes from the newest checkpoint.",
        )
    message, stack = _noted(first)
    logger.error("rank %d: %s", first.local_rank, stack)
    error = ProcessLostError if is_device_broken(message) else BatonError
    return error(f"rank {first.local_rank} failed: {message or f'exit code {first.exitcode}'}.")


def _noted(failure: ProcessFailure) -> tuple[str, str]:
    noted = failure.error_file_data.get("message", "")
    if not isinstance(noted, dict):
        return str(noted), str(noted)
    return str(noted.get("message", "")), str(noted.get("extraInfo", {}).get("py_callstack", ""))


def note_failure(message: str) -> None:
    """Writes the reason for torch's launcher, and ends this process."""
    from torch.distributed.elastic.multiprocessing.errors.error_handler import ErrorHandler

    try:
        ErrorHandler().record_exception(BatonError(message))
    except Exception:
        traceback.print_exc()
    if multiprocessing.parent_process() is None:  # torchrun started this, and no process of ours reads what is written
        events.emit(events.Error(stage="train chunk", message=message, exit_code=BatonError.exit_code))
        logger.error("%s", message)
    os._exit(BatonError.exit_code)
