"""Fingerprints of what bits depend on besides the recipe and the data: hardware, libraries, threads, flags."""

from __future__ import annotations

import contextlib
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Self

from baton.components.shared.core.document import Document

ADDED = ("datasets", "tokenizers", "safetensors")
"""Libraries that fingerprints did not name at first: one from then differs in none of them."""
LIBRARIES = ("torch", "transformers", "trl", "peft", "accelerate", "numpy", *ADDED)
KERNELS = ("triton", "bitsandbytes", "liger-kernel", "flash-attn")
"""Packages whose kernels a GPU may run, where they are installed."""


def library_versions() -> dict[str, str]:
    """Returns the versions of Python and of the libraries that compute."""
    return {"python": platform.python_version(), **{name: version(name) for name in LIBRARIES}}


class Fingerprint(Document):
    """Hardware, libraries, threads and flags that bits depend on besides the recipe and the data."""

    device: str = ""
    cpu: str = ""
    cuda: str | None = None
    world_size: int = 1
    """Processes that train together."""
    strategy: str = "ddp"
    """How they share the work; written only where there are several."""
    virtual_workers: int | None = None
    """For how many each step is cut, where the number of processes leaves no trace."""
    threads: int = 0
    deterministic: bool = False
    tf32: bool = False
    python: str = ""
    torch: str = ""
    transformers: str = ""
    trl: str = ""
    peft: str = ""
    accelerate: str = ""
    numpy: str = ""
    datasets: str = ""
    tokenizers: str = ""
    safetensors: str = ""
    deepspeed: str | None = None
    cudnn: int | None = None
    triton: str | None = None
    bitsandbytes: str | None = None
    liger_kernel: str | None = None
    flash_attn: str | None = None

    @classmethod
    def here(cls, world_size: int = 1, strategy: str = "ddp", virtual_workers: int | None = None) -> Self:
        """Returns this process's fingerprint; call it after threads and determinism are set.

        Args:
            world_size: Processes that train together.
            strategy: How they share the work, where there are several.
            virtual_workers: For how many each step is cut, where that is not the number of processes.
        """
        import torch

        cuda = torch.cuda.is_available()
        more: dict[str, Any] = library_versions() | (_kernels() if cuda else {})
        if world_size > 1:
            more["strategy"] = strategy
        if world_size > 1 and strategy.startswith("zero"):
            more["deepspeed"] = version("deepspeed")
        if virtual_workers:
            more["virtual_workers"] = virtual_workers
        return cls(
            device=torch.cuda.get_device_name(0) if cuda else "cpu",
            cpu=platform.machine() if cuda else _cpu_name(),
            cuda=torch.version.cuda if cuda else None,
            world_size=world_size,
            threads=torch.get_num_threads(),
            deterministic=torch.are_deterministic_algorithms_enabled(),
            tf32=cuda and rounds_products(),
            **more,
        )

    def differences(self, theirs: Fingerprint) -> list[str]:
        """Returns a line for each entry in which another fingerprint differs."""
        ours, other = self.to_json(), theirs.to_json()
        keys = sorted(ours.keys() | other.keys())
        if not (self.datasets and theirs.datasets):  # one of them is from before these were written down
            keys = [key for key in keys if key not in _LATER]
        if self.virtual_workers and self.virtual_workers == theirs.virtual_workers:
            keys = [key for key in keys if key not in ("world_size", "strategy")]
        return [f"{key}: {other.get(key)} → {ours.get(key)}" for key in keys if ours.get(key) != other.get(key)]

    @property
    def versions(self) -> dict[str, str]:
        """Versions of Python and of the libraries that compute."""
        return {name: str(getattr(self, name)) for name in ("python", *LIBRARIES)}


_LATER = {*ADDED, "cudnn", *(name.replace("-", "_") for name in KERNELS)}


def _kernels() -> dict[str, Any]:
    """Returns the versions of what a GPU computes with besides torch's own kernels."""
    import torch

    found: dict[str, Any] = {"cudnn": torch.backends.cudnn.version()}  # type: ignore[no-untyped-call]
    for name in KERNELS:
        with contextlib.suppress(PackageNotFoundError):
            found[name.replace("-", "_")] = version(name)
    return found


def rounds_products() -> bool:
    """Tells whether matrix products on GPUs read their operands in TF32, whichever of torch's settings says so."""
    import torch

    # `allow_tf32` raises an error where `fp32_precision` was set, as Transformers does.
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


def _cpu_name() -> str:
    """Returns the processor's model: vector width, and so the order of sums, depends on it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
