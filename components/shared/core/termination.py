"""The last words of a stage, where Kubernetes keeps them: with its pod, and in Argo's and Kubeflow's pages.

The launcher of Kubeflow Pipelines exits with 1 whatever a stage exits with, so the code is in the words.
"""

from __future__ import annotations

import contextlib
import os
import re

PATH = "BATON_TERMINATION_LOG"
"""Environment variable: the container's `terminationMessagePath`, where that is not Kubernetes' own choice."""
MAX_BYTES = 4096
"""Kubernetes keeps no more of a container's message."""

_CODE = re.compile(r" \(baton exit code (\d+)\)$")


def leave(message: str, exit_code: int) -> None:
    """Writes a message for Kubernetes; outside a pod nothing.

    Args:
        message: What was found, what was expected, what to do.
        exit_code: What the stage ends with.
    """
    path = os.environ.get(PATH, "/dev/termination-log")
    if not os.path.exists(path):
        return
    words = " ".join(message.split()).encode()
    code = f" (baton exit code {exit_code})".encode()
    room = MAX_BYTES - len(code)
    if len(words) > room:  # what was found is at the beginning, what to do at the end
        half = room // 2 - 2
        words = words[:half] + "…".encode() + words[-half:]
    with contextlib.suppress(OSError), open(path, "wb") as file:
        file.write(words.decode(errors="ignore").encode() + code)


def read(text: str) -> tuple[str, int | None]:
    """Returns a stage's message and its exit code, None where it has left none."""
    match = _CODE.search(text)
    return (text[: match.start()], int(match[1])) if match else (text, None)
