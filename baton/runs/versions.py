"""Versions that bits depend on: numbers of our own formats, and fingerprints of machine and libraries.

`recipe.json` of a run has `made` with the numbers it began with, a checkpoint's manifest has `meta.made`. A number
that is missing is 1. A newer release must not continue an older run unnoticed: `FORMATS` lists the older numbers that
it continues. docs/guides/migrate/upgrading.md tells users the effect, CONTRIBUTING.md when to raise a number.
"""

import contextlib
import functools
import platform
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Self

from pydantic import Field

from baton.documents import Document
from baton.errors import FormatError

PACKAGE = "baton-llm"


@dataclass(frozen=True)
class OlderFormat:
    release: str  # the last that makes it
    is_continued: bool  # by this release, to the same bits


@dataclass(frozen=True)
class VersionedFormat:
    """Something made from a recipe, which another release may make otherwise."""

    number: int  # as this release makes it
    what: str  # the effect, for people
    instead: str  # remedy for a number that is no longer continued, with the release that makes it
    older: Mapping[int, OlderFormat] = field(default_factory=dict)

    def is_continued(self, number: int) -> bool:
        return number == self.number or (number in self.older and self.older[number].is_continued)


FORMATS: Mapping[str, VersionedFormat] = {
    "rows": VersionedFormat(
        2,
        what="which rows a split holds, and on which side",
        instead="start the run under another name",
        older={1: OlderFormat("0.1.0", True)},
    ),
    "tokens": VersionedFormat(
        2,
        what="tokenization of rows, and the tokens in the loss",
        instead="start the run under another name",
        older={1: OlderFormat("0.1.0", True)},
    ),
    "draws": VersionedFormat(
        1,
        what="the order of rows, and every random number",
        instead="fork the run, which from there on draws as this Baton does: `baton runs fork NAME`",
    ),
    "loss": VersionedFormat(
        2,
        what="how much each row and token counts in the loss of a step and of an evaluation",
        instead="fork the run, whose rows and tokens count as here from there on: `baton runs fork NAME`",
        # Micro-batches and evaluation batches counted alike there, whatever they held.
        older={1: OlderFormat("0.1.0", is_continued=True)},
    ),
    "digest": VersionedFormat(
        1,
        what="the contents of a state digest",
        instead="fork its weights alone: `baton runs fork NAME@STEP --weights-only`",
    ),
    "checkpoint": VersionedFormat(
        1, what="the files of a checkpoint, and their contents", instead="export it with that release"
    ),
}

DATA_FORMATS = ("rows", "tokens")  # inherited by a warm fork and a sweep's trial, with the data of another run
RUN_FORMATS = (*DATA_FORMATS, "draws", "loss")  # the same for every chunk of a run
CHECKPOINT_FORMATS = ("digest", "checkpoint")  # may change from one checkpoint of a run to the next


class FormatVersions(Document):
    baton: str = ""  # release; empty where an old one did not write it
    formats: dict[str, int] = Field(default_factory=dict)  # format → number, 1 where left out

    @classmethod
    def here(cls, names: Iterable[str], data: Self | None = None) -> Self:
        numbers = {name: FORMATS[name].number for name in names}
        return cls(
            baton=release(), formats=numbers | ({name: data.number(name) for name in DATA_FORMATS} if data else {})
        )

    def number(self, name: str) -> int:
        return self.formats.get(name, 1)

    def require_known(self, what: str, formats: Mapping[str, VersionedFormat] = FORMATS) -> None:
        """Refuses formats newer than this Baton."""
        for name, number in sorted(self.formats.items()):
            newest = formats[name].number if name in formats else 1
            if number > newest:
                raise FormatError(
                    f"{what} has {name} of format {number}, made by Baton {self.baton or 'of another release'}; this "
                    f"Baton, {release()}, knows format {newest}{'' if newest == 1 else ' and those before it'}.",
                    remedy=f"Use {_package(self.baton)} or a newer one, in the image of the pods too.",
                )

    def require_continued(
        self, what: str, names: Iterable[str], formats: Mapping[str, VersionedFormat] = FORMATS
    ) -> None:
        """Refuses formats that this Baton does not continue to the same bits."""
        self.require_known(what, formats)
        for name in names:
            entry, number = formats[name], self.number(name)
            if not entry.is_continued(number):
                last = entry.older[number].release if number in entry.older else self.baton
                raise FormatError(
                    f"{what} has {name} of format {number} ({entry.what}), which this Baton, {release()}, does not "
                    f"continue; it makes format {entry.number}.",
                    remedy=f"Resume with {_package(last)}, in the image of the pods too, or {entry.instead}.",
                )


@functools.cache
def release() -> str:
    """Returns this Baton's release."""
    return version(PACKAGE)


def _package(version: str) -> str:
    return f"{PACKAGE}=={version}" if version else f"the {PACKAGE} that made it"


ADDED = ("datasets", "tokenizers", "safetensors")  # libraries missing in old fingerprints, which differ in none of them
LIBRARIES = ("torch", "transformers", "trl", "peft", "accelerate", "numpy", *ADDED)
# Packages whose kernels a GPU may run, where they are installed.
KERNELS = ("triton", "bitsandbytes", "liger-kernel", "flash-attn")


def library_versions() -> dict[str, str]:
    """Returns the versions of Python and of `LIBRARIES`."""
    return {"python": platform.python_version(), **{name: version(name) for name in LIBRARIES}}


class Fingerprint(Document):
    """Hardware, libraries, threads and flags that bits depend on, other than recipe and data."""

    device: str = ""
    cpu: str = ""
    cuda: str | None = None
    world_size: int = 1
    strategy: str = "ddp"  # written only where there are several processes
    virtual_workers: int | None = None  # parts of each step, where the number of processes has no effect
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
    def here(
        cls,
        world_size: int = 1,
        strategy: str = "ddp",
        virtual_workers: int | None = None,
        *,
        uses_bitsandbytes: bool = False,
    ) -> Self:
        """Returns this process's fingerprint; call it after threads and determinism are set."""
        import torch

        cuda = torch.cuda.is_available()
        more: dict[str, Any] = library_versions()
        if cuda:
            cudnn: Any = torch.backends.cudnn  # carries no types
            more["cudnn"] = cudnn.version()
            for name in KERNELS:
                with contextlib.suppress(PackageNotFoundError):
                    more[name.replace("-", "_")] = version(name)
        elif uses_bitsandbytes:
            more["bitsandbytes"] = version("bitsandbytes")
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

    def differences(self, theirs: Self) -> list[str]:
        ours, other = self.to_json(), theirs.to_json()
        keys = sorted(ours.keys() | other.keys())
        if not (self.datasets and theirs.datasets):  # one of the two is older than these entries
            keys = [key for key in keys if key not in _LATER]
        if self.virtual_workers and self.virtual_workers == theirs.virtual_workers:
            keys = [key for key in keys if key not in ("world_size", "strategy")]
        return [f"{key}: {other.get(key)} → {ours.get(key)}" for key in keys if ours.get(key) != other.get(key)]

    @property
    def versions(self) -> dict[str, str]:
        return {name: str(getattr(self, name)) for name in ("python", *LIBRARIES)}


_LATER = {*ADDED, "cudnn", *(name.replace("-", "_") for name in KERNELS)}


def rounds_products() -> bool:
    """Tells whether matrix products on GPUs read their operands in TF32, by any of torch's settings."""
    import torch

    # `allow_tf32` raises an error where `fp32_precision` was set, as Transformers does.
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


def _cpu_name() -> str:
    # Vector width, and so the order of sums, depends on the model.
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
