"""Python code that comes with a model, and that Transformers runs where `trust_remote_code` is on."""

from __future__ import annotations

import contextlib
import glob
import json
from collections.abc import Iterator

from baton.components.shared.core.errors import BatonError, UserError
from baton.components.shared.recipe import Recipe
from baton.components.shared.recipe.hooks import Trust, leaves
from baton.components.shared.runs import code


def files(setting: str, folder: str) -> list[str]:
    """Returns the SHA-256 of each Python file of a model, for consent to be kept with.

    Args:
        setting: The setting that names the model.
        folder: Its local files.

    Raises:
        UserError: its configuration takes code from another repository, where consent would not reach.
    """
    for name in _classes(folder):
        if "--" in name:
            raise UserError(
                f"{setting} takes code from another repository, {name}, which may change after somebody has consented "
                "to it.",
                remedy="Copy the model with that code into a folder of your own, and name its class without '--'.",
            )
    return [digest for _, digest in code.files(folder)]


def digest(folder: str) -> str:
    """Returns the SHA-256 over names and contents of a model's Python files."""
    return code.digest_of(code.files(folder))


def require_trusted(trust: Trust, setting: str, folder: str) -> None:
    """Checks that somebody has consented to the Python code of a model; see `code.require_trusted`.

    Raises:
        UserError: nobody has, or the model takes code from elsewhere.
    """
    if trust is not None:
        files(setting, folder)
        code.require_trusted(trust, setting, folder)


def required(recipe: Recipe, setting: str, folder: str) -> str:
    """Returns a folder whose Python code runs where `model.trust_remote_code` says so; see `require_trusted`.

    Raises:
        UserError: it does, and nobody has consented to it.
    """
    if recipe.model.trust_remote_code:
        require_trusted(recipe.trust, setting, folder)
    return folder


@contextlib.contextmanager
def asking_for_trust(uri: str) -> Iterator[None]:
    """Names the model and what is missing where Transformers does not load it.

    Raises:
        UserError: it does not.
    """
    try:
        yield
    except BatonError:
        raise
    except Exception as error:  # of damaged files any, and of each library its own
        if isinstance(error, ValueError) and "trust_remote_code" in str(error):
            raise UserError(
                f"{uri!r} comes with Python code, without which Transformers does not load it.",
                remedy="Read its .py files, then give --trust.",
            ) from None
        raise UserError(
            f"model {uri!r} cannot be loaded: {type(error).__name__}: {' '.join(str(error).split())[:300]}",
            remedy="Give the folder of a whole model with its tokenizer, as save_pretrained writes them.",
        ) from error


def _classes(folder: str) -> list[str]:
    """Returns the classes of its own that a model's configurations name, as `module.Class`."""
    paths = sorted(glob.glob(f"{glob.escape(folder)}/**/*.json", recursive=True))
    return [name for path in paths for name in _named(path)]


def _named(path: str) -> list[str]:
    try:
        with open(path, encoding="utf-8") as file:
            document = json.load(file)
    except (OSError, ValueError, RecursionError):
        return []  # none that Transformers would read
    classes = document.get("auto_map") if isinstance(document, dict) else None
    return [value for _, value in leaves(classes) if isinstance(value, str)]
