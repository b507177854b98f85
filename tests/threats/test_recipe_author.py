"""What whoever wrote a recipe, and no code, may do to those who check, compile and run it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from baton.compiler import pipeline_file
from baton.data import readers
from baton.errors import UserError
from baton.importers import draft as drafts
from baton.models import chat
from baton.recipe import load
from baton.runs import ref
from baton.runs.run import check_name

RUN = '!!python/object/apply:os.mkdir ["{mark}"]'
TEN = "a: &a [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
"""Ten to the ninth values in 600 bytes."""

READERS = {
    "recipe": lambda text, path: load.parse(text, origin="r.yaml"),
    "another trainer's file": lambda text, path: drafts.load_file(_written(path, text), "axolotl"),
}


def _written(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_yaml_makes_no_objects(read: Any, tmp_path: Path) -> None:
    mark = tmp_path / "it-ran"
    text = f"name: {RUN.format(mark=mark)}\n"
    with pytest.raises(UserError, match="could not determine a constructor for the tag"):
        read(text, tmp_path / "f.yaml")
    assert not mark.exists()
    yaml.unsafe_load(text)
    assert mark.exists()


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (TEN, "it has more than 100,000 values, those that aliases"),
        ("a: &a [*a]\n", r"an alias \(\*\) repeats the section around it"),
        ("a: " + "[" * 5000 + "]" * 5000, "it is nested deeper than 32 levels"),
    ],
    ids=["anchors-of-anchors", "in-itself", "deep"],
)
def test_yaml_that_unpacks_to_more_than_a_recipe_is_refused(text: str, message: str, read: Any, tmp_path: Path) -> None:
    began = time.process_time()
    with pytest.raises(UserError, match=message):
        read(text, tmp_path / "f.yaml")
    assert time.process_time() - began < 5


@pytest.mark.parametrize("line", ["1" * 100_000, "1" + " " * 100_000 + "x"], ids=["digits", "spaces"])
def test_nobody_guesses_what_a_text_of_100_kb_may_have_meant(line: str, scratch_recipe: dict[str, Any]) -> None:
    """Guessing took over a minute."""
    scratch_recipe["evaluation"] = {"gate": {"perplexity": line}}
    began = time.process_time()
    with pytest.raises(UserError, match="is not a gate condition") as caught:
        load.validate(scratch_recipe, origin="r")
    assert time.process_time() - began < 5
    assert len(str(caught.value)) < 1000


def test_anchors_that_save_a_few_lines_are_read() -> None:
    assert load.parse("a: &a {x: [1, 2]}\nb: *a\nc: {<<: *a, y: 3}\n", origin="r")["c"] == {"x": [1, 2], "y": 3}


SHELL = "$(touch /tmp/x) `id`; rm -rf / #' \" && {{workflow.name}} {{=1+1}} --privileged"


@pytest.mark.parametrize("name", [SHELL, "../x", "a b", "-x", "a/b", "A", ""])
def test_names_are_words(name: str, scratch_recipe: dict[str, Any]) -> None:
    scratch_recipe["name"] = name
    with pytest.raises(UserError, match="name"):
        load.validate(scratch_recipe, origin="r")
    if name != "-x":
        with pytest.raises(UserError, match="is not lower-case letters, digits and dashes"):
            check_name(name)


def test_text_of_a_recipe_is_one_value_in_the_compiled_pipeline(scratch_recipe: dict[str, Any], tmp_path: Path) -> None:
    """No shell reads it, and no field of a pod holds it: it is packed JSON in one parameter of the stages."""
    scratch_recipe["data"]["system"] = SHELL
    scratch_recipe["tracking"] = {"experiment": SHELL}
    scratch_recipe["store"] = {"uri": "s3://bucket/runs"}
    path = str(tmp_path / "p.yaml")
    pipeline_file.write_package(load.validate(scratch_recipe, origin="r"), path)
    spec, *platform = yaml.safe_load_all(Path(path).read_text())
    for executor in spec["deploymentSpec"]["executors"].values():
        container = executor["container"]
        assert container["command"][1:3] == ["-m", "baton.kfp.executor"]
        assert SHELL not in json.dumps(container).replace("\\", "")
    assert not any("touch /tmp/x" in json.dumps(document) for document in platform)
    assert not any("touch /tmp/x" in value for value in _strings(spec))
    found = [ref.decode_texts(value) for value in _strings(spec) if value.startswith(ref.PACKED)]
    assert found
    for value in found:
        assert json.loads(value)["data"]["system"] == SHELL


def _strings(node: object) -> list[str]:
    if isinstance(node, dict):
        return [text for value in node.values() for text in _strings(value)]
    if isinstance(node, list):
        return [text for value in node for text in _strings(value)]
    return [node] if isinstance(node, str) else []


@pytest.mark.parametrize("path", ["/etc/passwd", "/proc/self/environ", "/proc/self/cmdline"])
def test_files_that_hold_no_rows_are_no_source(path: str) -> None:
    with pytest.raises(UserError, match="and its content is of no known one"):
        list(readers.read(path, "line"))
    with pytest.raises(UserError, match=r"no \.jinja file and no template"):
        chat.chat_template(path)


def test_a_file_of_json_is_a_source_whoever_it_belongs_to(tmp_path: Path) -> None:
    """What is not prevented: a recipe reads whatever whoever runs it may read, if it looks like rows."""
    (tmp_path / "credentials.json").write_text('{"client_secret": "x"}')
    (row,) = readers.read(str(tmp_path / "credentials.json"), "line")
    assert row == type(row)(row.file, 1, {"client_secret": "x"})  # type: ignore[call-arg, arg-type]
