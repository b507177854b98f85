"""Errors that a person reads, with the remedy, and suggestions of names and paths that nearly match."""

import contextlib
import difflib
import errno
import math
import os
import sys
import tempfile
import traceback
from collections.abc import Iterable, Sequence

# Top-level modules that are not the user's code: they keep nothing that training depends on but tensors.
LIBRARIES = frozenset(
    {
        *("accelerate", "baton", "bitsandbytes", "datasets", "deepspeed", "kernels", "liger_kernel", "mlflow", "numpy"),
        *("peft", "rich", "safetensors", "tensorboard", "tokenizers", "torch", "tqdm", "transformers", "trl", "vllm"),
        "wandb",
    }
)
own_packages: set[str] = set()  # top-level modules of hooks, which may be installed packages


class BatonError(Exception):
    """A run or a command that failed for a known reason.

    Args:
        message: One sentence with the value found and the expected one.
        remedy: What the reader can do about it.
    """

    exit_code = 1

    def __init__(self, message: str, *, remedy: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message} {self.remedy}" if self.remedy else self.message


class UserError(BatonError):
    """A mistake in what the user gave: a recipe, a path, a credential."""

    exit_code = 2


class RowError(Exception):
    """A row cannot be used, for the reason in the message; other rows continue."""


class OtherRunError(UserError):
    """A run of that name has another recipe or other data; that run itself has not failed."""


class FormatError(OtherRunError):
    """Made by a Baton whose work this one does not continue."""


class StoreError(UserError):
    """The object store is unreachable, absent or refuses."""


class AbsentError(StoreError):
    """The bucket or container of a store does not exist."""


class UnavailableError(StoreError):
    """The object store fails for now; the same request may succeed later."""


class DamagedError(BatonError):
    """An object in the store differs from the committed one."""


class RewritableDamageError(DamagedError):
    """Damage that was marked: when the run is started again, the stage that wrote it writes it again."""


class ExactnessError(BatonError):
    """State in memory after a restore differs from the saved state."""


class ProcessLostError(BatonError):
    """A process ended by a signal, a device or a link; a fresh one may be spared that."""


class DeviceError(ProcessLostError):
    """A device that broke after the step in the message; twice after the same step, the state has diverged."""


class SkipError(BatonError):
    """A step that the run's guard refuses: the next process restores the state before it, and skips it.

    `reason` is `nan` for a loss or norm that is not finite, else `loss` or `grad_norm`. The norm is taken before
    clipping, the median over the steps before; None where it is not finite.
    """

    def __init__(
        self,
        message: str,
        *,
        remedy: str | None = None,
        step: int = 0,
        reason: str = "",
        loss: float = math.nan,
        grad_norm: float = math.nan,
        median: float | None = None,
    ) -> None:
        super().__init__(message, remedy=remedy)
        self.step, self.reason = step, reason
        self.loss, self.grad_norm, self.median = loss, grad_norm, median


class NodeError(BatonError):
    """The machine lacks a requested resource; another one may have it."""


def is_own(module: str | None) -> bool:
    """Tells whether a module is the user's: neither Python's nor installed, except packages of hooks."""
    top = (module or "").partition(".")[0]
    if not top or top in LIBRARIES or (top in sys.stdlib_module_names and top != "__main__"):
        return False
    file = getattr(sys.modules.get(str(module)), "__file__", None) or ""
    return top in own_packages or not ("site-packages" in file or "dist-packages" in file)


def place_of(error: BaseException) -> str:
    """Returns the innermost place in the user's code from which an error comes; empty where there is none."""
    place = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        named, file = frame.f_globals.get("__name__"), os.path.basename(frame.f_code.co_filename)
        if is_own(named) and str(frame.f_globals.get("__package__")).partition(".")[0] != "baton":
            place = f"{file}, line {line}, in {frame.f_code.co_qualname}"
    return place


def in_words(error: BaseException) -> str:
    """Returns an error that is not Baton's in one line, with its place in the user's code."""
    place = place_of(error)
    return f"{type(error).__name__}: {error}" + (f" ({place})" if place else "")


def no_room(error: BaseException) -> BatonError | None:
    """Returns the error of a full disk where that caused another error, else None."""
    cause: BaseException | None = error
    while cause is not None and getattr(cause, "errno", None) != errno.ENOSPC:
        cause = cause.__cause__ or cause.__context__
    if cause is None:
        return None
    where = getattr(cause, "filename", None) or tempfile.gettempdir()
    return BatonError(
        f"there is no room left at {where} ({type(error).__name__}: {error}).",
        remedy="Give the machine more disk, or /dev/shm more memory (resources.shm).",
    )


def suggest(name: str, known: Iterable[str]) -> str:
    """Returns " Did you mean …?" with the most similar known name, or an empty text."""
    close = difflib.get_close_matches(name, known, n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def suggest_path(path: str, folders: Sequence[str], *, cutoff: float = 0.6) -> str | None:
    """Returns an existing path similar to one that does not exist, else None."""
    for folder in folders:
        with contextlib.suppress(OSError):
            if found := _like_path(path, folder, cutoff):
                return found
    return None


def _like_path(path: str, folder: str, cutoff: float) -> str | None:
    at, parts = ("/" if path.startswith("/") else os.path.expanduser(folder)), []
    for part in path.rstrip("/").split("/"):
        there = part in ("", ".", "..", "~") or os.path.exists(os.path.join(at, part))
        names = [part] if there else difflib.get_close_matches(part, sorted(os.listdir(at)), n=1, cutoff=cutoff)
        if not names:
            return None
        parts.append(names[0])
        at = os.path.expanduser(names[0]) if names[0] == "~" else os.path.join(at, names[0])
    found = "/".join(parts)
    return found if found != path.rstrip("/") else None
