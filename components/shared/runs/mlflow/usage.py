"""Use of this machine, under the names and by the variables of MLflow's own system metrics."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import psutil

from baton.components.shared.core import machine

INTERVAL = 5.0
"""Seconds between two samples."""


def prefix() -> str:
    """Returns what the names begin with."""
    node = os.environ.get("MLFLOW_SYSTEM_METRICS_NODE_ID")
    return f"system/{node}/" if node else "system/"


def line(figures: dict[str, float], milliseconds: int) -> dict[str, Any]:
    """Returns a sample as a line for the sender, which numbers it."""
    return {"metrics": figures, "milliseconds": milliseconds}


class Usage:
    """Samples the use of this machine in a thread, and hands on the means of several samples.

    Args:
        take: Takes figures and the time in milliseconds.
        imports_mlflow: Whether MLflow may be imported for those of AMD's GPUs.
    """

    def __init__(self, take: Callable[[dict[str, float], int], None], *, imports_mlflow: bool) -> None:
        self._take = take
        self._ended = threading.Event()
        self._interval = machine.number_of("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", INTERVAL)
        self._samples = int(machine.number_of("MLFLOW_SYSTEM_METRICS_SAMPLES_BEFORE_LOGGING", 1))
        self._network = _network()
        self._gpus = _gpus(imports_mlflow)
        threading.Thread(target=self._run, daemon=True).start()

    def end(self) -> None:
        """Takes no more samples."""
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
            means = {prefix() + name: round(sum(values) / len(values), 1) for name, values in found.items()}
            self._take(means, int(time.time() * 1000))

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
    """Returns what samples the GPUs: NVIDIA's by their own library, AMD's by what MLflow has for them."""
    with contextlib.suppress(Exception):
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        return lambda: _nvidia(nvml, handles)
    if imports_mlflow and importlib.util.find_spec("pyrsmi"):
        with contextlib.suppress(Exception):
            from mlflow.system_metrics.metrics.rocm_monitor import ROCMMonitor

            monitor = ROCMMonitor()
            return lambda: _amd(monitor)
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


def _amd(monitor: Any) -> Iterator[tuple[str, float]]:
    monitor.clear_metrics()
    monitor.collect_metrics()
    yield from monitor.aggregate_metrics().items()
