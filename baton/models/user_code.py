"""Code of users, models and harness tasks: shipped with the run by content, and run only with consent."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterable, Iterator

from baton.errors import BatonError, UserError
from baton.recipe.recipe import Recipe
from baton.recipe.run import ASK, Trust, leaves
from baton.runs.documents import OwnCode
from baton.runs.run import Run
from baton.scratch import scratch_folder
from baton.store import bundle
from baton.store.manifest import read_manifest
from baton.store.storage import Storage

ENDINGS = (".py",)
TASKS_SETTING = "evaluation.tasks.include_path"
TASK_ENDINGS = (".yaml", ".yml", ".py")  # a task's YAML file names functions, and its templates can call some


def ship(run: Run, source: str | None, trust: Trust = None) -> None:
    """Puts the files of `hooks.source` into the store, once for the same content, and notes them with the run."""
    if source is None:
        return
    with scratch_folder("code") as folder:
        prefix = f"data/{_collected(source, folder)}/code"
        require_trusted(trust, "hooks.source", folder)
        if bundle.undamaged(run.storage, prefix) is None:
            bundle.publish(run.storage, prefix, folder, kind="code", meta={"files": sorted(os.listdir(folder))})
    run.write_once(OwnCode(prefix=prefix))


def digest(source: str) -> str:
    """Returns the SHA-256 over names and contents of the files of `hooks.source`."""
    with scratch_folder("code") as folder:
        return _collected(source, folder)


def files_of(source: str) -> list[str]:
    """Returns the SHA-256 of each file of `hooks.source`."""
    with scratch_folder("code") as folder:
        _collected(source, folder)
        return [digest for _, digest in files(folder)]


def files(folder: str, endings: tuple[str, ...] = ENDINGS) -> list[tuple[str, str]]:
    """Returns path and SHA-256 of each file of code in a folder and below, in order."""
    paths = (os.path.join(place, name) for place, _, names in os.walk(folder) for name in names)
    return [
        (os.path.relpath(path, folder), bundle.file_sha256(path)) for path in sorted(paths) if path.endswith(endings)
    ]


def digest_of(files: Iterable[tuple[str, str]]) -> str:
    """Returns the SHA-256 over the names and digests of files, as `files` yields them."""
    return hashlib.sha256("".join(f"{name} {digest}\n" for name, digest in files).encode()).hexdigest()


def require_trusted(trust: Trust, setting: str, folder: str, endings: tuple[str, ...] = ENDINGS) -> None:
    """Checks that somebody has consented to all code in a folder, before any of it runs."""
    # No `trust` means that the recipe is its user's own, and so is all code that it names.
    unknown = [] if trust is None else [x for x in files(folder, endings) if trust == ASK or x[1] not in trust]
    if unknown:
        name, digest = unknown[0]
        raise UserError(
            f"{setting}: the recipe comes from elsewhere, without consent to run this {name} (SHA-256 {digest[:16]}…).",
            remedy="Read it, and compile, submit or run the recipe again with --trust.",
        )


def fetch(run: Run, scratch: str) -> str | None:
    """Returns a local folder with the run's Python files and nothing else, None where it has none."""
    noted = run.read(OwnCode)
    if noted is None:
        return None
    manifest = read_manifest(run.storage, noted.prefix)
    if manifest is None:
        raise BatonError(f"{run.storage.uri(noted.prefix)} is gone.", remedy="Run the data-split stage again.")
    folder = os.path.join(scratch, "code")
    # Not in place: a neighbouring file, bytecode too, would be imported.
    bundle.fetch(run.storage, noted.prefix, manifest, folder, in_place=False)
    named = ((name, bundle.file_sha256(os.path.join(folder, name))) for name in sorted(manifest.files))
    # By the address and not the manifest, which anybody who may write to the store can replace: the address is part of
    # the checkpoints' identity, and of signatures.
    if noted.prefix != f"data/{digest_of(named)}/code":
        raise BatonError(
            f"{run.storage.uri(noted.prefix)} does not hold the code that the run began with; none of it has run.",
            remedy="Find out who changed it; with the same hooks.source a new run begins with its own.",
        )
    return folder


def install(folder: str | None) -> None:
    """Makes the modules in a folder importable, if there is one."""
    if folder and folder not in sys.path:
        sys.path.insert(0, folder)


def _collected(source: str, folder: str) -> str:
    """Copies the files into a folder and returns their digest."""
    if "://" in source:
        storage = Storage(source if not source.endswith(".py") else source.rpartition("/")[0])
        wanted = [source.rpartition("/")[2]] if source.endswith(".py") else storage.list("")
        for name in wanted:
            if not name.endswith(".py"):
                continue
            try:
                storage.download(name, os.path.join(folder, name))
            except FileNotFoundError:
                raise UserError(f"hooks.source {source!r} does not exist.", remedy="Check the address.") from None
    elif os.path.isfile(source) and source.endswith(".py"):
        shutil.copy(source, folder)
    elif os.path.isdir(source):
        for name in os.listdir(source):
            if os.path.isfile(os.path.join(source, name, "__init__.py")):
                raise UserError(
                    f"hooks.source {source!r} holds the package {name!r}; only modules side by side travel with a run.",
                    remedy="Install the package in the image, or move its modules up.",
                )
            if name.endswith(".py"):
                shutil.copy(os.path.join(source, name), folder)
    else:
        raise UserError(f"hooks.source {source!r} is not a Python file or folder.", remedy="Check the path.")
    collected = files(folder)
    if not collected:
        raise UserError(f"hooks.source {source!r} holds no Python file.", remedy="Name a .py file or its folder.")
    return digest_of(collected)


def model_files(setting: str, folder: str) -> list[str]:
    """Returns the SHA-256 of each Python file of a model, to keep consent by."""
    for name in _named_classes(folder):
        if "--" in name:
            raise UserError(
                f"{setting} takes code from another repository, {name}, which may change after somebody has consented "
                "to it.",
                remedy="Copy the model with that code into a folder of your own, and name its class without '--'.",
            )
    return [digest for _, digest in files(folder)]


def model_digest(folder: str) -> str:
    """Returns the SHA-256 over names and contents of a model's Python files."""
    return digest_of(files(folder))


def require_model_trusted(trust: Trust, setting: str, folder: str) -> None:
    """Checks the consent to a model's Python code; see `require_trusted`."""
    if trust is not None:
        model_files(setting, folder)
        require_trusted(trust, setting, folder)


def trusted_model(recipe: Recipe, setting: str, folder: str) -> str:
    """Returns a folder, its code checked where it runs (`model.trust_remote_code`); see `require_trusted`."""
    if recipe.model.trust_remote_code:
        require_model_trusted(recipe.trust, setting, folder)
    return folder


@contextlib.contextmanager
def asking_for_trust(uri: str) -> Iterator[None]:
    """Names the model and the missing consent where Transformers does not load it."""
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


def _named_classes(folder: str) -> list[str]:
    """Returns a model's own classes in its configurations, as `module.Class`."""
    names = []
    for path in sorted(glob.glob(f"{glob.escape(folder)}/**/*.json", recursive=True)):
        try:
            with open(path, encoding="utf-8") as file:
                document = json.load(file)
        except (OSError, ValueError, RecursionError):
            continue  # Transformers would read none either
        classes = document.get("auto_map") if isinstance(document, dict) else None
        names += [value for _, value in leaves(classes) if isinstance(value, str)]
    return names


def fetch_tasks(include_path: str, scratch: str) -> str:
    """Returns a local folder with the user's tasks."""
    folder = include_path
    if "://" in include_path:
        storage, folder = Storage(include_path), os.path.join(scratch, "tasks")
        os.makedirs(folder, exist_ok=True)
        for name in storage.find(""):
            storage.download(name, os.path.join(folder, name))
    names = [name for _, _, files in os.walk(folder) for name in files]
    if not any(name.endswith((".yaml", ".yml")) for name in names):
        raise UserError(
            f"{TASKS_SETTING} {include_path!r} holds no task.",
            remedy="Give a folder with the YAML files of your tasks.",
        )
    return os.path.abspath(folder)
