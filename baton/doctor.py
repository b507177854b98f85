"""`baton check`: checks of this machine, the store and a recipe's services, each tried out."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import shutil
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from importlib import metadata
from typing import TYPE_CHECKING, Literal, TypedDict
from urllib.parse import urlsplit

import psutil
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from rich.table import Table
from rich.text import Text

from baton import machine
from baton.errors import BatonError, UserError
from baton.models import pinned
from baton.recipe.recipe import Recipe
from baton.source import prepare
from baton.source.origin import RecipeSource
from baton.store.cache import NodeCache
from baton.store.clouds import CloudStore
from baton.store.protocol import OWN, DeniedError
from baton.store.storage import Storage
from baton.terminal import Terminal

if TYPE_CHECKING:
    from baton.kubeflow.connection import KubeflowClient


@dataclass(frozen=True)
class Check:
    name: str
    state: Literal["ok", "note", "problem"]  # a problem stops a run or loses data; a note costs speed or comfort
    found: str
    remedy: str = ""  # empty where nothing need be done


def _found(name: str, found: str, remedy: str | None = None) -> Check:
    """Returns a note where there is a remedy, else that all is well."""
    return Check(name, "note" if remedy else "ok", found, remedy or "")


LARGE = 64 * 10**6
SLOW = 10e6  # bytes per second below which saving a checkpoint holds up small models already
NOTICEABLE, REFUSED = 30.0, 15 * 60.0  # seconds between two clocks: worth a line, or a forged request to a cloud


def examine_store(uri: str) -> list[Check]:
    """Tries a store out and removes its traces."""
    try:
        storage = Storage(uri, patience=0)
    except BatonError as error:
        return [_problem("store", error)]
    made, folder = [], storage.root
    while storage.is_local and folder and not os.path.exists(folder):
        made.append(folder)
        folder = os.path.dirname(folder)
    below = f"{OWN}doctor-{uuid.uuid4().hex}"
    looks = {"listing": _listing, "commit": _commit, "large objects": _large, "clock": _clock}
    checks = [_tried("store", partial(_reach, storage))]
    if isinstance(storage.client, CloudStore):
        with contextlib.suppress(BatonError):  # without an address the check of the store reports the reason
            if proxy := machine.describe_proxy(storage.client.address):
                checks.append(Check("store: proxy", "ok", proxy))
    checks += [] if storage.is_local else _rights(storage, f"{below}-right/1")
    if any(check.state == "problem" for check in checks):
        return checks
    if storage.cannot_remove:
        del looks["large objects"]  # they would stay
    try:
        checks += [_tried(f"store: {name}", partial(look, storage, below)) for name, look in looks.items()]
    finally:
        checks += _clean(storage, below, made)
    return checks


def _rights(storage: Storage, path: str) -> list[Check]:
    """Tries each right that a run needs, and names each that is denied with the statement it needs."""
    rights: dict[str, tuple[Callable[[], object], str]] = {
        "write": (lambda: storage.client.write(path, b"1"), ""),
        "read": (lambda: storage.client.read(path), ""),
        "list": (lambda: storage.client.list(""), "Chunks find each other's checkpoints by listing."),
        "remove": (lambda: storage.client.remove(path), "Without it a run works, and all that it writes stays."),
    }
    denied = []
    for name, (ask, why) in rights.items():
        try:
            with storage.translated():
                ask()
        except DeniedError as error:
            remedy = f"{error.remedy} {why}".strip()
            denied.append(
                Check(f"store: right to {name}", "note" if name == "remove" else "problem", error.message, remedy)
            )
        except FileNotFoundError:  # nothing could be written, and is looked for in vain: no right is missing for that
            continue
        except (BatonError, OSError):  # not about rights; "store" reports it
            return denied
    return denied or [Check("store: rights", "ok", "to write, read, list and remove: each was tried")]


def _tried(name: str, look: Callable[[], Check]) -> Check:
    try:
        return look()
    except (BatonError, OSError) as error:
        return _problem(name, error)


def _problem(name: str, error: Exception) -> Check:
    if isinstance(error, BatonError):
        return Check(name, "problem", error.message, error.remedy or "")
    return Check(name, "problem", f"{type(error).__name__}: {error}", "Check the store's consistency and rights.")


def _reach(storage: Storage) -> Check:
    began = time.monotonic()
    storage.check()
    return Check(
        "store", "ok", f"{storage.uri()} can be written, {1000 * (time.monotonic() - began) / 2:.0f} ms a request"
    )


def _listing(storage: Storage, below: str) -> Check:
    content = uuid.uuid4().bytes
    storage.write(f"{below}/small", content)
    if storage.read(f"{below}/small") != content:
        return Check("store: listing", "problem", "an object reads back with other content", "Use another store.")
    if storage.list(below) != ["small"]:
        return Check(
            "store: listing",
            "problem",
            "a new object is not listed",
            "Chunks find each other's checkpoints by listing: use a store that is consistent at once, and no cache.",
        )
    return Check("store: listing", "ok", "a new object is read back and listed")


def _commit(storage: Storage, below: str) -> Check:
    won = [storage.create(f"{below}/once", data) for data in (b"1", b"2")]
    if won != [True, False]:
        summary = f"of two writers that commit the same, {sum(won)} are told that they won"
        return Check("store: commit", "problem", summary, "Use another store: chunks that run twice would not notice.")
    if storage.is_local:
        return _found("store: commit", "hard links: of writers that commit at once, the file system lets one win")
    if storage.has_conditional_put:
        return _found("store: commit", "conditional put: of writers that commit at once, the store lets one win")
    return _found(
        "store: commit",
        "no conditional put; a lease object with expiry takes its place",
        "A commit takes about a second longer. A writer stopped within it for more than ten seconds may replace "
        "another's of the same step. A store that honours If-None-Match rules that out.",
    )


def _large(storage: Storage, below: str) -> Check:
    with tempfile.TemporaryDirectory(prefix="baton-doctor-") as folder:
        sent, received = os.path.join(folder, "sent"), os.path.join(folder, "received")
        data = os.urandom(LARGE)
        with open(sent, "wb") as file:
            file.write(data)
        began = time.monotonic()
        storage.upload(sent, f"{below}/large")
        uploaded = time.monotonic()
        digest = storage.download(f"{below}/large", received)
        up, down = LARGE / (uploaded - began), LARGE / (time.monotonic() - uploaded)
    if digest != hashlib.sha256(data).hexdigest():
        return Check("store: large objects", "problem", "64 MB read back differ", "Use another store.")
    summary = f"64 MB came back whole: {up / 1e6:.0f} MB/s up, {down / 1e6:.0f} MB/s down"
    slow = "A checkpoint of 1 GB takes minutes; save less often."
    return _found("store: large objects", summary, slow if min(up, down) < SLOW else None)


def _clock(storage: Storage, below: str) -> Check:
    before = datetime.now(UTC)
    storage.write(f"{below}/clock", b"")
    after = datetime.now(UTC)
    written = storage.find(below)["clock"][1]
    early, late = (before - written).total_seconds(), (written - after).total_seconds()
    apart = max(early, late, 0.0)
    if apart < 2:  # stores tell whole seconds
        return _found("store: clock", "agrees with this machine's to the second")
    summary = f"is {apart:.0f} s {'behind' if early > late else 'ahead of'} this machine's"
    if apart < NOTICEABLE:
        return _found("store: clock", summary)
    remedy = "Set the clocks by NTP: clouds refuse requests 15 minutes off, and retention goes by the age of uploads."
    return Check("store: clock", "note" if apart < REFUSED else "problem", summary, remedy)


def _clean(storage: Storage, below: str, made: list[str]) -> list[Check]:
    try:
        for name in storage.find(below):
            storage.remove(f"{below}/{name}")
        storage.tidy(below)
        for folder in made:
            if os.path.isdir(folder):
                os.rmdir(folder)
    except (BatonError, OSError) as error:
        return [_problem("store: removal", error)]
    return []


DISTRIBUTION = "baton-llm"
COLORS = {"ok": "green", "note": "yellow", "problem": "red"}
MEMORY = "/dev/shm"
ROOM = 2 * 2**30  # bytes below which staging checkpoints is tight for any but small models


class Examined(TypedDict):
    ok: bool  # no check is a problem
    checks: list[dict[str, str]]


def examine(
    recipe_path: str | RecipeSource | None = None, overrides: Sequence[str] = (), *, store: str | None = None
) -> list[Check]:
    """Checks this machine, and all that a recipe or store names."""
    if overrides and not recipe_path:
        raise UserError("--set changes a recipe, and none is given.", remedy="Name the recipe.")
    checks: list[Check] = []
    recipe: Recipe | None = None
    if recipe_path:
        loaded = prepare.load(recipe_path, overrides, store=store)
        recipe = loaded.recipe
        try:
            recipe = loaded.localised()
            prepare.check_model(recipe)
            checks.append(Check("recipe", "ok", f"{loaded.origin.name}: {loaded.name}, all it names is there"))
        except UserError as error:
            checks.append(Check("recipe", "problem", error.message, error.remedy or ""))
    checks += [_python(), _libraries(), _devices(recipe), _threads(recipe), _memory(), _shm(), _temporary()]
    uri = recipe.store.uri if recipe else store
    checks += examine_store(uri) if uri else [Check("store", "note", "none given", "Add a recipe or --store.")]
    checks += [seen for look in (_cache, _mlflow) if recipe and (seen := look(recipe))]
    checks += [seen for origin in (pinned.origins(recipe).values() if recipe else ()) if (seen := _hub(origin))]
    return checks


def examined(checks: Sequence[Check]) -> Examined:
    """Returns the checks as plain values, and whether none of them is a problem."""
    return {"ok": all(check.state != "problem" for check in checks), "checks": [asdict(check) for check in checks]}


def print_table(checks: Sequence[Check]) -> None:
    """Prints checks for people."""
    console = Terminal(highlight=False)
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for name in ("check", "", "found"):
        table.add_column(name, overflow="fold", no_wrap=name != "found")
    for check in checks:
        text = Text(check.found)
        if check.remedy:
            text.append(f"\n{check.remedy}", style="dim")
        table.add_row(check.name, Text(check.state, style=COLORS[check.state]), text)
    console.print(table)


def _python() -> Check:
    version, declared = platform.python_version(), metadata.metadata(DISTRIBUTION)["Requires-Python"]
    if SpecifierSet(declared).contains(version, prereleases=True):
        return Check("python", "ok", version)
    return Check("python", "problem", version, f"Baton is tested with Python {declared}.")


def _libraries() -> Check:
    declared = [Requirement(line) for line in metadata.requires(DISTRIBUTION) or []]
    required = {need.name: need.specifier for need in declared if not need.marker or need.marker.evaluate()}
    installed = {name: _version(name) for name in required}
    missing = [name for name, version in installed.items() if version is None]
    if missing:
        return Check("libraries", "problem", f"not installed: {', '.join(missing)}", "Install Baton again.")
    versions = {name: version for name, version in installed.items() if version}
    other = [
        f"{name} {version}, not {required[name]}"
        for name, version in versions.items()
        if not required[name].contains(version, prereleases=True)
    ]
    if other:
        remedy = "Baton is tested with the versions that it declares; others may fail, or round otherwise."
        return _found("libraries", "; ".join(other), remedy)
    shown = ", ".join(f"{name} {versions[name]}" for name in ("torch", "transformers", "trl", "peft", "obstore"))
    return Check("libraries", "ok", f"{shown} and {len(versions) - 5} more, as declared")


def _version(name: str) -> str | None:
    try:
        return metadata.version(name).partition("+")[0]  # torch adds its build
    except metadata.PackageNotFoundError:
        return None


def _devices(recipe: Recipe | None) -> Check:
    try:
        import torch

        devices = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    except (ImportError, OSError, RuntimeError) as error:
        return Check("device", "problem", f"torch does not work: {error}", "Install Baton again.")
    if devices:
        return Check("device", "ok", f"{', '.join(devices)}; torch for CUDA {torch.version.cuda}")
    summary = f"CPU; torch for {'CUDA ' + torch.version.cuda if torch.version.cuda else 'CPU only'}"
    remedy = (
        f"The recipe asks for {recipe.resources.gpus} per pod; here it trains on the CPU, and a pod that sees less "
        "ends before it fetches anything."
        if recipe and recipe.resources.gpus
        else None
    )
    return _found("device", summary, remedy)


def _threads(recipe: Recipe | None) -> Check:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    summary = f"{usable} usable of {os.cpu_count()}"
    with contextlib.suppress(ImportError, OSError):
        import torch

        summary += f", torch takes {torch.get_num_threads()}"
    wanted = (recipe.training.threads if recipe else None) or 0
    remedy = f"training.threads is {wanted}: they will wait for each other." if wanted > usable else None
    return _found("processors", summary, remedy)


def _memory() -> Check:
    memory = psutil.virtual_memory()
    limit = None
    with contextlib.suppress(OSError, ValueError), open("/sys/fs/cgroup/memory.max", encoding="ascii") as file:
        limit = int(file.read())  # no file, or "max", where there is no limit
    summary = f"{_gib(memory.available)} available of {_gib(memory.total)}"
    summary += f", this container may use {_gib(limit)}" if limit and limit < memory.total else ""
    is_tight = min(memory.available, limit or memory.available) < ROOM
    return _found("memory", summary, "Only small models fit." if is_tight else None)


def _shm() -> Check:
    try:
        usage = shutil.disk_usage(MEMORY)
    except OSError:
        return _found(MEMORY, "there is none", "Checkpoints are staged on disk, which is slower.")
    remedy = "Checkpoints that do not fit are staged on disk. docker: --shm-size 2g; pods: resources.shm."
    found = f"{_gib(usage.free)} free of {_gib(usage.total)}"
    return _found(MEMORY, found, remedy if usage.free < ROOM else None)


def _temporary() -> Check:
    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    remedy = "Make room, or point TMPDIR elsewhere." if free < ROOM else None
    return _found("temporary files", f"{folder}: {_gib(free)} free", remedy)


def _cache(recipe: Recipe) -> Check | None:
    cache = NodeCache.of(recipe.store)
    if cache is None:
        return None
    there = cache.folder
    while not os.path.exists(there):
        there = os.path.dirname(os.path.abspath(there))
    try:
        with tempfile.TemporaryFile(dir=there):
            free = shutil.disk_usage(there).free
    except OSError as error:
        return _found("node cache", f"{cache.folder}: {error}", "Nothing is kept there; mount it writable.")
    summary = f"{cache.folder}: {_gib(free)} free" + ("" if there == cache.folder else ", made when first used")
    is_tight = free < cache.max_bytes and not os.path.isdir(cache.folder)
    remedy = f"store.cache_size is {recipe.store.cache_size}, more than is free."
    return _found("node cache", summary, remedy if is_tight else None)


def _mlflow(recipe: Recipe) -> Check | None:
    parts = urlsplit(recipe.tracking.mlflow or "")
    if parts.scheme not in ("http", "https"):
        return None
    where = f"{parts.scheme}://{parts.hostname}" + (f":{parts.port}" if parts.port else "")
    remedy = "A run continues without tracking. Check tracking.mlflow and the network."
    try:
        with urllib.request.urlopen(f"{where}{parts.path.rstrip('/')}/health", timeout=10) as answer:
            answer.read()
    except urllib.error.HTTPError as error:
        if error.code in (401, 403):
            return _found("mlflow", f"{where} answers, and wants credentials", "Set MLFLOW_TRACKING_USERNAME.")
        return Check("mlflow", "problem", f"{where} answers {error.code}", remedy)
    except OSError as error:
        return Check("mlflow", "problem", f"{where} cannot be reached: {getattr(error, 'reason', error)}", remedy)
    return Check("mlflow", "ok", f"{where} answers")


def _hub(origin: pinned.ModelOrigin) -> Check | None:
    base = origin.base
    if "://" in base or os.path.isdir(base) or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", base):
        return None
    import huggingface_hub

    here = isinstance(huggingface_hub.try_to_load_from_cache(base, "config.json"), str)
    cached = "this machine has it already" if here else "this machine does not have it yet"
    if huggingface_hub.constants.HF_HUB_OFFLINE:
        summary = f"offline by HF_HUB_OFFLINE; {cached}"
        return Check("hub", "ok", summary) if here else Check("hub", "problem", summary, "Unset HF_HUB_OFFLINE once.")
    try:
        huggingface_hub.HfApi().model_info(base, revision=origin.revision, timeout=10)
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        remedy = f"Check {origin.setting}, HF_TOKEN and the network."
        return Check("hub", "note" if here else "problem", f"{base}: {reason}; {cached}", remedy)
    return Check("hub", "ok", f"{base} can be fetched; {cached}")


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"


def examine_kubeflow(endpoint: str, namespace: str | None) -> list[Check]:
    """Checks an installation of Kubeflow, and its newest finished run."""
    from baton.kubeflow import connection, submit

    proxy = machine.describe_proxy(endpoint)
    through = [Check("kubeflow: proxy", "ok", proxy)] if proxy else []
    try:
        client = connection.connect(endpoint, namespace)
        says = client.installation()
        is_multi_user, version = bool(says.get("multi_user")), says.get("tag_name", "unknown")
        kind = "multi-user" if is_multi_user else "single-user"
        answers = f"{endpoint} speaks v2beta1, version {version}, {kind}; pages at {submit.run_url(endpoint, 'ID')}"
        pipelines = _pipelines(client, submit.namespace_of(client, namespace), is_multi_user=is_multi_user)
        return [Check("kubeflow", "ok", answers), *through, pipelines, *_of_runs(client, namespace)]
    except BatonError as error:
        return [Check("kubeflow", "problem", error.message, error.remedy or ""), *through]


def _pipelines(client: KubeflowClient, namespace: str | None, *, is_multi_user: bool) -> Check:
    """Tells whether `baton kfp submit` can register its pipeline, as far as that shows without posting one."""
    from baton.kubeflow import submit

    try:
        listed = client.list_pipelines(page_size=1, namespace=namespace)
    except BatonError as error:
        return Check("pipelines", "note", f"cannot be registered: {error.message}", submit.LEAVE_OUT)
    count = listed.total_size or 0
    if is_multi_user:
        found = f"can be listed, {count} are; the right to register one shows with the first submission"
    else:
        found = f"can be registered; {count} are"
    return Check("pipelines", "ok", found)


def _of_runs(client: KubeflowClient, namespace: str | None) -> list[Check]:
    from baton.kubeflow import run_status
    from baton.kubeflow.submit import FINAL_STATES

    run = next((run for run in client.newest_runs(20, namespace)[0] if run.state in FINAL_STATES), None)
    if run is None:
        return [Check("lost pods", "note", "unknown until a run has ended there")]
    checks = [Check("service account", "ok", f"{run.service_account or 'unknown'}, of run {run.display_name}")]
    if mlflow := client.own_mlflow(run.run_id):
        checks.append(Check("kubeflow's mlflow", "ok", f"logs every run: {mlflow}"))
    try:
        loss = run_status.lost_pods_end_run(client.workflow(run.run_id))
    except (BatonError, ValueError):
        return [*checks, Check("lost pods", "note", "unknown: the workflow of that run cannot be read")]
    lost = Check("lost pods", "note", loss, f"{run_status.APPLY}.") if loss else Check("lost pods", "ok", "start again")
    return [*checks, lost]
