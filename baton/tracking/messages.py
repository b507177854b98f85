"""Messages between a chunk and its MLflow sender, samples of machine use, and metrics held back as files.

Opening a database takes two seconds of a core, as MLflow's own client has to be imported: more than the steps of a
short chunk. So its lines are kept below the run, and go with those of the next process that opens the database.
"""

import contextlib
import fcntl
import importlib.util
import json
import os
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil

from baton import events, machine

# A metric as MLflow's API has it: key, value, timestamp, step, and model and data set where it has one.
Value = dict[str, str | int | float]


@dataclass(frozen=True)
class LoggedModel:
    """A logged model to be made, where the run has none; MLflow's search tells models apart by `kind`."""

    name: str
    kind: str
    tags: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class SenderConfig:
    """Destination of metrics."""

    uri: str
    run_id: str
    trains: bool = False  # set the run running, log the machine's use, and leave out steps that the run has already
    datasets: Mapping[str, Sequence[str]] = field(default_factory=dict)  # side of the data → name and digest
    model: LoggedModel | None = None
    params: Mapping[str, str] = field(default_factory=dict)  # parameters that a chunk has found out
    unsent: str | None = None  # folder of lines held back before, which are sent first; see `MetricBuffer`


@dataclass(frozen=True)
class TrackingState:
    """A tracking run as it is."""

    experiment_id: str
    status: str
    params: Mapping[str, str]
    steps: Mapping[str, int]  # metric → the step of its last value
    models: Sequence[str]


USAGE_INTERVAL_S = 5.0


class Usage:
    """Samples the use of this machine in a thread, under the names of MLflow's own monitor.

    MLflow's import would take longer than all else the sender does for a short chunk; only AMD's GPUs need it.
    `take` gets the means of several samples, as a line for the sender, which numbers it.
    """

    def __init__(self, take: Callable[[dict[str, Any]], None], *, imports_mlflow: bool) -> None:
        self._take = take
        self._ended = threading.Event()
        self._interval = machine.number_of("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", USAGE_INTERVAL_S)
        self._samples = int(machine.number_of("MLFLOW_SYSTEM_METRICS_SAMPLES_BEFORE_LOGGING", 1))
        node = os.environ.get("MLFLOW_SYSTEM_METRICS_NODE_ID")
        self._prefix = f"system/{node}/" if node else "system/"
        self._network = _network()
        self._gpus = _gpus(imports_mlflow)
        threading.Thread(target=self._run, daemon=True).start()

    def end(self) -> None:
        self._ended.set()

    def _run(self) -> None:
        psutil.cpu_percent()  # the next call of this thread tells of the time since this one
        while True:
            found: dict[str, list[float]] = defaultdict(list)
            for _ in range(self._samples):
                if self._ended.wait(self._interval):
                    return
                for name, value in self._sample():
                    found[name].append(value)
            means = {self._prefix + name: round(sum(values) / len(values), 1) for name, values in found.items()}
            self._take({"metrics": means, "milliseconds": int(time.time() * 1000)})

    def _sample(self) -> Iterator[tuple[str, float]]:
        memory, disk = psutil.virtual_memory(), psutil.disk_usage(os.sep)
        yield "cpu_utilization_percentage", psutil.cpu_percent()
        yield "system_memory_usage_megabytes", memory.used / 1e6
        yield "system_memory_usage_percentage", memory.used / memory.total * 100
        yield "disk_usage_percentage", disk.percent
        yield "disk_usage_megabytes", disk.used / 1e6
        yield "disk_available_megabytes", disk.free / 1e6
        for name, before, now in zip(("receive", "transmit"), self._network, _network(), strict=True):
            yield f"network_{name}_megabytes", now - before
        yield from self._gpus()


def _network() -> tuple[float, float]:
    counters = psutil.net_io_counters()
    return (counters.bytes_recv / 1e6, counters.bytes_sent / 1e6) if counters else (0.0, 0.0)


def _gpus(imports_mlflow: bool) -> Callable[[], Iterator[tuple[str, float]]]:
    """Returns the sampler of the GPUs: NVIDIA's by their own library, AMD's by MLflow's."""
    with contextlib.suppress(Exception):
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        return lambda: _nvidia(nvml, handles)
    if imports_mlflow and importlib.util.find_spec("pyrsmi"):
        with contextlib.suppress(Exception):
            from mlflow.system_metrics.metrics.rocm_monitor import ROCMMonitor

            monitor = ROCMMonitor()

            def amd() -> Iterator[tuple[str, float]]:
                monitor.clear_metrics()
                monitor.collect_metrics()
                yield from monitor.aggregate_metrics().items()

            return amd
    return lambda: iter(())


def _nvidia(nvml: Any, handles: list[Any]) -> Iterator[tuple[str, float]]:
    for index, handle in enumerate(handles):
        with contextlib.suppress(nvml.NVMLError):
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            yield f"gpu_{index}_memory_usage_percentage", memory.used / memory.total * 100
            yield f"gpu_{index}_memory_usage_megabytes", memory.used / 1e6
        with contextlib.suppress(nvml.NVMLError):
            yield f"gpu_{index}_utilization_percentage", nvml.nvmlDeviceGetUtilizationRates(handle).gpu
        with contextlib.suppress(nvml.NVMLError):
            watts = nvml.nvmlDeviceGetPowerUsage(handle) / 1000
            yield f"gpu_{index}_power_usage_watts", watts
            yield f"gpu_{index}_power_usage_percentage", watts * 1e5 / nvml.nvmlDeviceGetEnforcedPowerLimit(handle)


class MetricBuffer:
    """Lines that are held back in a folder; raises `OSError` where nothing can be written there."""

    def __init__(self, folder: str) -> None:
        self._lock = threading.Lock()
        os.makedirs(folder, exist_ok=True)
        # Named by time: files are sent in the order of their beginning.
        path = os.path.join(folder, f"{time.time_ns():019d}-{uuid.uuid4().hex[:6]}.jsonl")
        self._file = open(path, "w", encoding="utf-8")  # noqa: SIM115 - open as long as the chunk
        # The end of this process releases it, however it ends: the sender takes only files without a lock.
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def write(self, document: Mapping[str, object]) -> None:
        with self._lock:
            if self._file.closed:  # a thread that samples the machine may come late
                return
            try:
                self._file.write(json.dumps(document) + "\n")
                self._file.flush()
            except OSError as error:  # a full disk is no reason to stop training
                events.warn(f"metrics are not kept for MLflow: {error}")
                self._end()

    def close(self) -> None:
        with self._lock:
            self._end()

    def _end(self) -> None:
        with contextlib.suppress(OSError):  # failed writes are not repeated now
            self._file.close()


def buffered_files(folder: str | None) -> list[str]:
    """Returns the paths of files that are held back, the oldest first."""
    if folder is None or not os.path.isdir(folder):
        return []
    return [os.path.join(folder, name) for name in sorted(os.listdir(folder)) if name.endswith(".jsonl")]


def finished_buffers(folder: str | None) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yields path and lines of each file without a writer, the oldest first."""
    for path in buffered_files(folder):
        with open(path, encoding="utf-8") as file, contextlib.suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The last line may have been cut off with its process.
            yield path, [json.loads(line) for line in file if line.endswith("\n")]
