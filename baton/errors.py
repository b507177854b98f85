"""Errors that a person reads, with the remedy, and suggestions of names and paths that nearly match."""

from __future__ import annotations

import contextlib
import difflib
import errno
import math
import os
import sys
import tempfile
import traceback
from collections.abc import Iterable, Sequence

LIBRARIES = frozenset(
    {
        *("accelerate", "baton", "bitsandbytes", "datasets", "deepspeed", "kernels", "liger_kernel", "mlflow", "numpy"),
        *("peft", "rich", "safetensors", "tensorboard", "tokenizers", "torch", "tqdm", "transformers", "trl", "vllm"),
        "wandb",
    }
)
"""Top-level modules whose objects are nobody's own code, and keep nothing that training depends on but tensors."""
own_packages: set[str] = set()
"""Top-level modules that hooks were found in: they may be installed packages."""


class BatonError(Exception):
    """A run or a command that failed for a known reason.

    Args:
        message: One sentence with the value found and what was expected.
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
    """A row cannot be used; the message says why, and the other rows go on."""


class OtherRunError(UserError):
    """The name is that of a run with another recipe or other data, which this error is no part of."""


class FormatError(OtherRunError):
    """A run, or something of it, was made by a Baton whose work this one does not continue."""


class StoreError(UserError):
    """The object store cannot be used as given: unreachable, refused, absent."""


class AbsentError(StoreError):
    """The bucket or container of a store is not there."""


class UnavailableError(StoreError):
    """The object store does not answer as it should just now; the same request may succeed later."""


class DamagedError(BatonError):
    """Something in the store is not what was committed there."""


class RewritableDamageError(DamagedError):
    """Something damaged that was marked: when the run is started again, the stage that wrote it writes it again."""


class ExactnessError(BatonError):
    """State in memory after a restore differs from what was saved."""


class ProcessLostError(BatonError):
    """A process that was ended by what a fresh one may be spared: a signal, a device or a link that broke."""


class DeviceError(ProcessLostError):
    """A device that broke, after a step that the message names.

    Where a fresh process breaks after the same one, it is what is trained that does it: a state that has diverged.
    """


class SkipError(BatonError):
    """A step that the run's guard does not let pass: the next process restores the state before it, and skips it.

    `reason` is what was looked at: `nan` for a loss or norm that is not finite, else `loss` or `grad_norm`. The norm is
    of the gradients before clipping, the median of what was looked at over the steps before; None where it is not
    finite.
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
    """The machine is not what was asked for; another one may be."""


def is_own(module: str | None) -> bool:
    """Tells whether a module is the user's: not Python's, nor an installed one but for those that hooks come from."""
    top = (module or "").partition(".")[0]
    if not top or top in LIBRARIES or (top in sys.stdlib_module_names and top != "__main__"):
        return False
    file = getattr(sys.modules.get(str(module)), "__file__", None) or ""
    return top in own_packages or not ("site-packages" in file or "dist-packages" in file)


def place_of(error: BaseException) -> str:
    """Returns where the user's code has raised an error, or called what has; empty where it is not the user's."""
    place = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        named, file = frame.f_globals.get("__name__"), os.path.basename(frame.f_code.co_filename)
        if is_own(named) and str(frame.f_globals.get("__package__")).partition(".")[0] != "baton":
            place = f"{file}, line {line}, in {frame.f_code.co_qualname}"
    return place


def in_words(error: BaseException) -> str:
    """Returns an error that is not Baton's in one line, with the place in the user's code that it comes from."""
    place = place_of(error)
    return f"{type(error).__name__}: {error}" + (f" ({place})" if place else "")


def no_room(error: BaseException) -> BatonError | None:
    """Returns the error of a full disk where that is what has made something else fail, None where it has not."""
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
    """Returns a sentence, to be put behind another, with the known name that is most like one; or nothing."""
    close = difflib.get_close_matches(name, known, n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def suggest_path(path: str, folders: Sequence[str], *, cutoff: float = 0.6) -> str | None:
    """Returns the path that one which does not exist may have been meant to be, None where there is none like it."""
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
