"""Segments: the same files whichever process makes them, however often the stage is killed, and one writer's alone."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import datasets
import pytest

from baton.data import tokenize as tokenization
from baton.data.fitting import Lengths
from baton.data.tokenize import TOKENIZER, Made, Parts, SideSegment
from baton.errors import BatonError, DamagedError
from baton.pages import quality_page
from baton.recipe import load
from baton.runs.run import Run
from baton.store import bundle
from baton.store.manifest import Manifest, read_manifest, usable_manifest
from baton.store.storage import Storage

ROWS = [{"prompt": f"area {n} of", "completion": f"a rectangle {n * n} " * (n % 9 + 1)} for n in range(300)]
SMALL = "from baton.data import tokenize; tokenize.LEAST, tokenize.WORTHWHILE = 600, 100; "
RUN = "import sys; from baton.data.tokenize import tokenize_run; tokenize_run(sys.argv[1])"


def prepared(folder: Path, **data: Any) -> Run:
    """A run whose rows are split, with a test side, and not yet tokenized."""
    recipe = load.validate(
        {
            "name": "tiny",
            "store": str(folder / "store"),
            "model": {"from_scratch": {"hidden_size": 16}, "tokenizer": {"train": {"vocab_size": 300}}},
            "data": {"source": "rows.jsonl", "max_length": 64, **data},
            "tracking": {"mlflow": None},
        },
        origin="r.yaml",
    )
    run = Run(Storage(recipe.store.uri), "run-1")
    run.create(recipe)
    (folder / "split").mkdir()
    for side, rows in (("train", ROWS), ("eval", ROWS[:20]), ("test", ROWS[:7])):
        (folder / "split" / f"{side}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    bundle.publish(run.storage, "data/digest/split", str(folder / "split"), kind="split", meta={})
    run.set_once("data.json", {"digest": "digest", "rows": len(ROWS)})
    return run


def tokenize(run: Run, kill_after: int | None = None, code: str = RUN) -> list[dict[str, Any]]:
    """Runs the stage in a process of its own, killed after so many parts; returns its events."""
    environment = {**os.environ, "BATON_EVENTS": "stdout"}
    process = subprocess.Popen(
        [sys.executable, "-c", SMALL + code, run.uri], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout
    found = []
    for line in process.stdout:
        found.append(json.loads(line.removeprefix("::baton ")))
        if kill_after and sum(event["event"] == "tokenized" for event in found) == kill_after:
            process.kill()
            break
    process.stdout.close()
    assert process.wait(120) == (-signal.SIGKILL if kill_after else 0)
    return found


def manifest_of(run: Run) -> Manifest:
    """What is committed."""
    found = read_manifest(run.storage, run.require("tokens.json")["prefix"])
    assert found is not None
    return found


def contents(run: Run) -> dict[str, str]:
    """Hashes of the files, without their writers' names and what names them."""
    files = manifest_of(run).files.items()
    return {
        re.sub(r"-[0-9a-f]{8}\.", ".", name): entry["sha256"]
        for name, entry in files
        if not name.endswith("state.json")
    }


@pytest.mark.slow
def test_neither_workers_nor_a_kill_change_a_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = {}
    for name, count in (("one", 1), ("many", 3)):
        (tmp_path / name).mkdir()
        runs[name] = prepared(tmp_path / name, workers=count)
    tmp = Path(tempfile.mkdtemp(dir="/tmp"))  # short: a socket's path has at most 107 characters
    monkeypatch.setenv("TMPDIR", str(tmp))
    tokenize(runs["one"])
    tokenize(runs["many"], kill_after=5)
    assert list(tmp.glob("baton-*"))
    assert runs["many"].raw("tokens.json") is None
    events = tokenize(runs["many"])
    assert not list(tmp.glob("baton-*"))
    shutil.rmtree(tmp)
    (resumed,) = [event for event in events if event["event"] == "resumed"]
    assert 5 <= resumed["parts"] < resumed["of"]
    made = [event["part"] for event in events if event["event"] == "tokenized"]
    assert len(made) == len(set(made)) == resumed["of"] - resumed["parts"]
    assert contents(runs["one"]) == contents(runs["many"])
    assert sum(name.startswith("train/") and name.endswith(".arrow") for name in contents(runs["one"])) > 20
    meta = {name: manifest_of(run).meta for name, run in runs.items()}
    assert {**meta["one"], "files": None} == {**meta["many"], "files": None}
    folder = runs["many"].storage.key(manifest_of(runs["many"]).path(runs["many"].require("tokens.json")["prefix"]))
    assert [len(datasets.load_from_disk(f"{folder}/{side}")) for side in ("train", "eval", "test")] == [300, 20, 7]
    assert {side: meta["one"][side] for side in ("train", "eval", "test")} == {"train": 300, "eval": 20, "test": 7}
    assert [rows for _, rows in meta["many"]["files"]["eval"]] == [
        len(datasets.Dataset.from_file(f"{folder}/{name}")) for name, _ in meta["many"]["files"]["eval"]
    ]


def test_what_is_done_stays_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """The store is as a killed stage leaves it: some parts, and no manifest."""
    monkeypatch.setenv("BATON_EVENTS", "stdout")
    monkeypatch.setattr(tokenization, "LEAST", 2000)
    run = prepared(tmp_path)
    tokenization.tokenize_run(run.uri)
    before, prefix = contents(run), run.require("tokens.json")["prefix"]
    assert '"event": "resumed"' not in capsys.readouterr().out
    run.storage.remove(f"{prefix}/manifest.json")
    lost = [name for name in run.storage.list(f"{prefix}/files-1/parts") if name.startswith("train")][::2]
    for name in lost:
        run.storage.remove(f"{prefix}/files-1/parts/{name}")
    tokenization.tokenize_run(run.uri)
    printed = capsys.readouterr().out
    assert printed.count('"event": "tokenized"') == len(lost) > 3
    assert printed.count('"event": "resumed"') == 1
    assert contents(run) == before


@pytest.mark.parametrize("data", [None, b"{"], ids=["lost", "damaged"])
def test_shown_rows_that_are_gone_are_left_out(
    data: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenization, "LEAST", 2000)
    run = prepared(tmp_path)
    tokenization.tokenize_run(run.uri)
    manifest, prefix = manifest_of(run), run.require("tokens.json")["prefix"]
    before, path = quality_page.seen(run), next(name for name in manifest.files if name.startswith("seen/train"))
    run.storage.remove(manifest.path(prefix, path))
    if data:
        run.storage.write(manifest.path(prefix, path), data)
    assert quality_page.seen(run) == [row for row in before if row.side != "train"] != before


@pytest.mark.parametrize(
    ("lines", "least", "expected"),
    [
        ([3, 4, 5], 100, [(0, 12, 1)]),
        ([3, 4, 5], 3, [(0, 3, 1), (3, 7, 2), (7, 12, 3)]),
        ([3, 4, 5], 4, [(0, 7, 1), (7, 12, 3)]),
        ([9, 2, 2, 2], 4, [(0, 9, 1), (9, 13, 2), (13, 15, 4)]),
        ([], 4, []),
    ],
    ids=["one", "each", "to the end of a line", "a long line", "empty"],
)
def test_a_file_is_cut_behind_lines(
    lines: list[int], least: int, expected: list[tuple[int, int, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenization, "LEAST", least)
    path = tmp_path / "rows"
    path.write_bytes(b"".join(b"x" * (length - 1) + b"\n" for length in lines))
    found = tokenization.cut(str(path), "train")
    assert [(x.start, x.end, x.first_line) for x in found] == expected
    assert [x.name for x in found] == [f"train-{number:05d}" for number in range(len(expected))]


def made_of(folder: Path, text: str) -> Made:
    """What a writer made of a segment."""
    path = folder / f"{text}.arrow"
    path.write_text(text)
    figures = {"rows": 1, "tokens": len(text), "truncated": 0, "dropped": 0, "lengths": Lengths(9).to_json()}
    return Made(name="train-00000", files={"arrow": str(path)}, figures=figures)


def test_a_writer_who_is_late_does_no_harm(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path / "store"))
    first, late = Parts(storage, "tokens"), Parts(storage, "tokens")
    part = first.add(made_of(tmp_path, "first"))
    assert late.add(made_of(tmp_path, "later")) == part
    assert late.done() == {"train-00000": part}
    manifest = first.commit(part["files"], {})
    assert late.commit(part["files"], {"by": "late"}) == manifest
    (name,) = manifest.files
    assert storage.read(manifest.path("tokens", name)) == b"first"
    assert bundle.verify(storage, "tokens", manifest) == []


def test_what_is_found_damaged_is_made_anew_elsewhere(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path / "store"))
    parts = Parts(storage, "tokens")
    part = parts.add(made_of(tmp_path, "first"))
    (name,) = part["files"]
    os.unlink(storage.key(f"tokens/files-1/{name}"))
    with pytest.raises(DamagedError, match=r"files-1/train/00000-.*, which was written before, is missing or damaged"):
        parts.commit(part["files"], {})
    anew = Parts(storage, "tokens")
    assert (anew.folder, anew.done()) == ("files-2", {})
    manifest = anew.commit(anew.add(made_of(tmp_path, "again"))["files"], {})
    assert usable_manifest(storage, "tokens") == manifest


FILE = {"size": 1, "sha256": "0" * 64}
DAMAGE: dict[str, tuple[str, bytes]] = {
    "torn": ("train-00000", b'{"files": '),
    "another thing": ("train-00000", b"[1]"),
    "no counts": ("train-00000", b'{"files": {}, "lengths": {"rows": 1}}'),
    "a file elsewhere": (TOKENIZER, json.dumps({"files": {f"{TOKENIZER}/../../../outside": FILE}}).encode()),
    "a file that is none": (TOKENIZER, json.dumps({"files": {f"{TOKENIZER}/vocab.json": [1]}}).encode()),
}


@pytest.mark.parametrize(("part", "data"), DAMAGE.values(), ids=DAMAGE)
def test_a_part_that_nobody_has_written_is_made_anew(part: str, data: bytes, tmp_path: Path) -> None:
    """Whoever may write to the store could end the stage with a traceback."""
    run = prepared(tmp_path)
    prefix = tokenization.tokenize_run(run.uri)["data_uri"].removeprefix(f"{run.storage.base_uri}/")
    manifest = manifest_of(run)
    for name in run.storage.list(prefix):
        if name.startswith("manifest"):
            run.storage.remove(f"{prefix}/{name}")
    run.storage.write(f"{prefix}/{manifest.folder}/parts/{part}.json", data)
    with pytest.raises(DamagedError, match=rf"parts/{part}\.json, which was written before, is missing or damaged"):
        tokenization.tokenize_run(run.uri)
    tokenization.tokenize_run(run.uri)
    again = manifest_of(run)
    assert (again.folder, again.meta) == ("files-2", manifest.meta | {"files": again.meta["files"]})


def test_tokens_found_damaged_by_a_reader_are_made_again(tmp_path: Path) -> None:
    run = prepared(tmp_path)
    before = tokenization.tokenize_run(run.uri)
    prefix, manifest = run.require("tokens.json")["prefix"], manifest_of(run)
    (name,) = [name for name in manifest.files if name.startswith("train/0")]
    Path(run.storage.key(manifest.path(prefix, name))).write_bytes(b"?")
    with pytest.raises(DamagedError):
        bundle.fetch(run.storage, prefix, manifest, str(tmp_path / "unused"))
    again = tokenization.tokenize_run(run.uri)
    assert again.pop("address") != before.pop("address")
    assert again == before
    assert manifest_of(run).folder == "files-2"
    assert bundle.verify(run.storage, prefix, manifest_of(run)) == []


@pytest.mark.slow
def test_a_worker_that_is_killed_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenization, "WORTHWHILE", 1)
    doomed: Any = signal.raise_signal  # the segments stand for the signals
    numbers: Any = [Doomed(signal.SIGKILL), Doomed(signal.SIGKILL)]
    with pytest.raises(BatonError, match="a process that tokenizes was killed, probably out of memory"):
        list(tokenization.make_each(numbers, doomed, 2))


class Doomed(int):
    """A signal's number that is as long as a segment."""

    start, end = 0, 1

    def __reduce__(self) -> Any:
        return int, (int(self),)


def test_little_text_is_made_in_this_process() -> None:
    one = SideSegment(side="train", index=0, path="", start=0, end=2**21, first_line=1)
    found = list(
        tokenization.make_each([one, one], lambda segment: Made(name=str(os.getpid()), files={}, figures={}), 2)
    )
    assert {made.name for _, made in found} == {str(os.getpid())}
