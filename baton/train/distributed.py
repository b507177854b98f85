"""Ranks of a chunk: joined, launched on this machine, each pinned to one device, watched, and failing with one message.

A world of one rank needs no torch. One process that stops halts all, each inside a collective call, and no log tells
which it was. So each rank counts its work, and tells the others from a thread, through the store of torch's launcher.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import logging
import math
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
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import psutil

from baton import errors, events, machine, scratch
from baton.errors import BatonError, DeviceError, NodeError, ProcessLostError
from baton.recipe.recipe import Recipe

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
    from torch.nn import Module

logger = logging.getLogger("baton")

T = TypeVar("T")

# Seconds that a rank waits for the others in a collective call, as while the first one downloads or the store fails.
# The watchdog names a rank that hangs in training earlier; one that ends is noticed at once.
PATIENCE = 7200.0


@dataclass(frozen=True)
class Ranks:
    """This process among those of its chunk; by default a world of one rank."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    node: int = 0
    nodes: int = 1
    launched: bool = False

    @classmethod
    def here(cls) -> Ranks:
        if "LOCAL_RANK" not in os.environ:
            return cls()
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE")
        rank, size, local_rank, node, nodes = (int(os.environ[name]) for name in names)
        return cls(rank, size, local_rank, node, nodes, launched=True)

    @property
    def is_first(self) -> bool:
        """Whether this one reports, records and commits for all."""
        return self.rank == 0

    @property
    def leads_node(self) -> bool:
        """Whether this one downloads for its machine, and watches for its preemption."""
        return self.local_rank == 0

    @contextlib.contextmanager
    def hidden(self) -> Iterator[None]:
        """Lets Accelerate, set up in the block, take this process for one that trains alone."""
        names = ("LOCAL_RANK", "WORLD_SIZE")
        kept = {name: os.environ.pop(name) for name in names if name in os.environ}
        warned = logging.getLogger("transformers.training_args")
        level = warned.level
        warned.setLevel(logging.ERROR)  # it warns of the process group that it is not told of
        try:
            yield
        finally:
            warned.setLevel(level)
            os.environ.update(kept)

    def join(self, *, on_gpu: bool) -> None:
        """Joins the default process group, which Accelerate then uses; on a GPU each rank has its own device."""
        if self.size == 1:
            return
        import torch.distributed

        if on_gpu:
            torch.cuda.set_device(self.local_rank % torch.cuda.device_count())  # see `pin_device`
        # On GPUs both: values gathered after each step are on the CPU, which NCCL cannot reach.
        torch.distributed.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=datetime.timedelta(seconds=PATIENCE)
        )

    def leave(self) -> None:
        """Destroys the process group, once all ranks are here."""
        if self.size > 1:
            import torch.distributed

            # All share the first one's folder, and upstream looks into it once more at its end: the first must not
            # remove it before.
            self.gather(None)
            torch.distributed.destroy_process_group()

    def gather(self, value: T) -> list[T]:
        """Returns the values of all ranks, in their order; each must call it."""
        if self.size == 1:
            return [value]
        import torch.distributed

        values: list[T | None] = [None] * self.size
        torch.distributed.all_gather_object(values, value)
        return cast(list[T], values)

    def gather_numbers(self, numbers: list[float]) -> list[list[float]]:
        """Gathers as many numbers from each rank: cheaper than `gather`."""
        if self.size == 1:
            return [numbers]
        import torch.distributed

        ours = torch.tensor(numbers, dtype=torch.float64)
        rows = [torch.empty_like(ours) for _ in range(self.size)]
        torch.distributed.all_gather(rows, ours)
        return [row.tolist() for row in rows]

    def on_first(self, work: Callable[[], T]) -> T:
        """Runs `work` in the first rank alone, and returns its result, or raises its error, in all."""
        return self._run(work, 0 if self.is_first else None, 0)

    def on_node_leaders(self, work: Callable[[], T]) -> T:
        """Runs `work` in one rank of each machine and returns its result there; all raise the first `BatonError`."""
        return self._run(work, self.node if self.leads_node else None, self.node)

    def _run(self, work: Callable[[], T], role: int | None, wanted: int) -> T:
        if self.size == 1:
            return work()
        value: T | None = None
        failure: BatonError | None = None
        if role is not None:
            try:
                value = work()
            except BatonError as error:  # the others wait in `gather`: they are told instead of left there
                failure = error
        # Ranks without the role wait here for as long as the work takes. Any other error ends this process before, and
        # the launcher then ends the others.
        results = [row for row in self.gather((role, value, failure)) if row[0] is not None]
        for _, _, theirs in results:
            if theirs:
                raise theirs
        return cast(T, next(value for role, value, _ in results if role == wanted))


VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
BROKEN_LINK = r"NCCL|gloo/transport|connectFullMesh|DistNetworkError|DistStoreError"
# Torch's messages for a broken device or link, which their process cannot recover from.
BROKEN_DEVICE = re.compile(
    rf"CUDA error|CUDA driver error|CUBLAS_STATUS|CUDNN_STATUS|cuDNN error|device-side assert|{BROKEN_LINK}"
)


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
        # No state that is trained can break the link to another device: the step is unrelated.
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


NODES = "PET_NNODES"  # number of machines, which Kubeflow Trainer sets in each pod of a job


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
            raise NodeError(message, remedy="Check the job's pods: a machine or a GPU is missing.")
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


Handler = Callable[[int, FrameType | None], object] | int | None

# Baton's errors by name, as torch's launcher writes them down.
KINDS = {kind.__name__: kind for kind in vars(errors).values() if isinstance(kind, type)}
# Seconds that an error waits which may only follow from another process's end, so that the cause is seen first.
PEERS = 3.0

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

        for name in ("torch.distributed.elastic", "torch.multiprocessing"):  # `result` logs the same in fewer words
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
    if multiprocessing.parent_process() is None:  # torchrun started this, and no process of ours reads its output
        events.emit(events.Error(stage="train chunk", message=message, exit_code=BatonError.exit_code))
        logger.error("%s", message)
    os._exit(BatonError.exit_code)


ALONE = Ranks()
PAUSE = 1.0  # seconds
STAGGER = 0.3  # seconds from one rank's stacks to the next one's, so that they do not mix in a log


@dataclass(frozen=True)
class Heartbeat:
    """Newest heartbeat of a rank, which the others read."""

    count: int = 0
    step: int = 0
    doing: str = "start"
    is_paused: bool = False  # waits for the store
    ticks: int = 0

    @classmethod
    def parse(cls, text: bytes) -> Heartbeat:
        count, step, doing, paused, ticks = text.decode().split("|")
        return cls(int(count), int(step), doing, paused == "1", int(ticks))

    def __str__(self) -> str:
        return f"{self.count}|{self.step}|{self.doing}|{int(self.is_paused)}|{self.ticks}"


class Watchdog:
    """Heartbeats of this rank, and a thread that watches those of the others; none in a world of one rank.

    `hang_after` is in seconds. The first rank to notice calls `fail` with a message, in a thread; it ends the process.
    """

    def __init__(
        self,
        ranks: Ranks = ALONE,
        hang_after: float = math.inf,
        fail: Callable[[str], None] = note_failure,
    ) -> None:
        self.ranks = ranks
        self.hang_after = hang_after
        self.is_watching = ranks.size > 1
        self.beats_of_a_pass: tuple[str, ...] = ("forward pass", "backward pass")
        self._fail = fail
        self._count = self._ticks = 0
        self._doing = "start"
        self._step = 0
        self._at = time.monotonic()
        self._is_paused = False
        self._heard: list[Heartbeat] = []
        self._heard_at = self._at
        self._ended = threading.Event()
        self._parent = os.getppid()

    def start(self, step: int) -> None:
        """Begins to watch, from the first step; before, processes load for as long as that takes."""
        if not self.is_watching:
            return
        from torch.distributed import PrefixStore, distributed_c10d

        # The launcher's own store, for which torch has no public name. A collective call would wait for the very rank
        # that hangs.
        self._store = PrefixStore("baton-watchdog", distributed_c10d._get_default_store())
        self.heartbeat("start", step)
        threading.Thread(target=self._work, name="baton-watchdog", daemon=True).start()

    def stop(self) -> None:
        self._ended.set()
        if self.is_watching:
            faulthandler.cancel_dump_traceback_later()

    def heartbeat(self, doing: str, step: int | None = None) -> None:
        """Tells the next work and its step, if that has changed; all ranks tell the same in the same order."""
        self._count, self._ticks, self._at, self._doing = self._count + 1, 0, time.monotonic(), doing
        self._step = self._step if step is None else step

    def tick(self) -> None:
        """Gives a sign of life that the others may not give, such as a token where some generate longer than others."""
        self._ticks, self._at = self._ticks + 1, time.monotonic()

    def follow(self, model: Module) -> None:
        """Has a model, as training calls it, beat before and after each forward pass in training."""
        if not self.is_watching:
            return
        import torch

        # Two beats around each pass: DDP waits for the others as it begins, and a loss may after it.
        self.beats_of_a_pass = ("forward pass", "forward pass", "loss", "backward pass")

        def beats(doing: str) -> Callable[..., None]:
            def hook(module: Module, *_: object) -> None:
                # Generation, or the model as a reference, may call the same module: without gradients.
                if module.training and torch.is_grad_enabled():
                    self.heartbeat(doing)

            return hook

        model.register_forward_pre_hook(beats("forward pass"))
        model.register_forward_hook(beats("loss"))

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Stops the clock while this rank waits for the store, which has its own patience."""
        if not self.is_watching:
            yield
            return
        self._is_paused = True
        self._tell()
        try:
            yield
        finally:
            self._is_paused, self._at = False, time.monotonic()
            self._tell()

    def _tell(self) -> None:
        newest = Heartbeat(self._count, self._step, self._doing, self._is_paused, self._ticks)
        self._store.set(str(self.ranks.rank), str(newest))

    def _work(self) -> None:
        # No count is below 0: the first look tells the others that this rank is there.
        told = (-1, 0)
        pause = min(PAUSE, self.hang_after / 4)
        while not self._ended.wait(pause):
            if os.getppid() != self._parent:  # the launching process, which would report and clear up, is gone
                os._exit(1)
            if told != (self._count, self._ticks):
                told = (self._count, self._ticks)
                self._tell()
            silence = self._silence()
            if not silence:
                # From a thread of C: it fires also where a call that hangs holds the interpreter's lock.
                faulthandler.dump_traceback_later(self.hang_after + 10 * STAGGER * self.ranks.size, file=2)
            if silence > self.hang_after:
                self._end()
                return

    def _silence(self) -> float:
        """Returns the seconds since any rank's last sign of life; others are asked only where this one waits."""
        now = time.monotonic()
        if now - self._at < self.hang_after / 20:
            return 0.0
        if self._store.check(["hang"]):
            return math.inf
        newest = self._others()
        if newest != self._heard or any(beat.is_paused for beat in newest):
            # Any rank's will do: while one gets on, the others wait with reason.
            self._heard, self._heard_at = newest, now
        return now - self._heard_at

    def _others(self) -> list[Heartbeat]:
        keys = [str(rank) for rank in range(self.ranks.size)]
        return [Heartbeat.parse(self._store.get(key)) if self._store.check([key]) else Heartbeat() for key in keys]

    def _end(self) -> None:
        self._store.set("hang", "")  # the others show theirs too, when they look next
        time.sleep(STAGGER * self.ranks.local_rank)
        print(f"rank {self.ranks.rank}, process {os.getpid()}, has these stacks:", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(file=2, all_threads=True)
        time.sleep(PAUSE + STAGGER * (self.ranks.size + 1 - self.ranks.local_rank))
        message = self.verdict(self._others())
        # The first to come here speaks for all: a launcher's report of every rank would repeat it.
        if self._store.compare_set("verdict", "", str(self.ranks.rank)).decode() == str(self.ranks.rank):
            self._fail(message)
        time.sleep(10.0)  # the launcher ends the others
        os._exit(1)

    def verdict(self, newest: list[Heartbeat]) -> str:
        """Names the hanging rank, and where: it has done least, as the others wait for it."""
        counts = [(beat.count, beat.ticks) for beat in newest]
        hanging = [rank for rank, count in enumerate(counts) if count == min(counts)]
        at = newest[hanging[0]]
        who = f"rank {hanging[0]} hangs" if len(hanging) == 1 else f"ranks {', '.join(map(str, hanging))} hang"
        return (
            f"{who} in step {at.step}, before or in its {at.doing}: no sign of life for {self.hang_after:.0f} s "
            "(training.parallel.hang_timeout). The stacks of all ranks are in the log."
        )
