"""YAML as people write recipes, and what to write instead where a text is none."""

from __future__ import annotations

import json
import re
from collections.abc import Hashable, Iterator
from typing import Any

import yaml

MERGE = "tag:yaml.org,2002:merge"
NO_MARK = re.compile(r"(?<=: )[>@`%][^,}#]*")
"""A plain value that begins with a sign of YAML's own."""
COLON = re.compile(r"^(\s*[\w.-]+: +)([^\"'\[{|>#].*: .*)$")
"""A plain value with a colon in it."""
NO_SPACE = re.compile(r"^(\s*[\w.-]+):(?=[^\s:/])")
"""A key whose value stands right behind its colon."""


MOST_VALUES = 100_000
"""Values of a recipe; one with all settings has 500."""


class RepeatedKeyError(yaml.YAMLError):
    """A key that stands twice in one section, of which YAML's readers take the last and say nothing."""


class Loader(yaml.SafeLoader):
    """YAML as people write it: `1e-4` is a number, where YAML 1.1 asks for `1.0e-4`; no key stands twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """Returns a mapping.

        Raises:
            RepeatedKeyError: a key stands twice in it.
        """
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == MERGE:
                continue
            line = key.start_mark.line + 1
            if key.value in lines:
                first = lines[key.value]
                where = f"in line {first} and in line {line}" if first != line else f"in line {line}"
                raise RepeatedKeyError(
                    f"the key {key.value!r} stands twice, {where}. Remove one of them, or bring both into one"
                )
            lines[key.value] = line
        return super().construct_mapping(node, deep)


Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def require_bounded(document: object) -> None:
    """Checks that a document is small once its anchors are written out: each line of some may be ten of the one before.

    Raises:
        yaml.YAMLError: it is not, or holds itself.
    """
    sizes: dict[int, int] = {}

    def size(node: object) -> int:
        if not isinstance(node, dict | list):
            return 1
        if id(node) not in sizes:
            sizes[id(node)] = 0  # under way
            sizes[id(node)] = 1 + sum(map(size, node.values() if isinstance(node, dict) else node))
        elif not sizes[id(node)]:
            raise yaml.YAMLError("the file contains itself. Remove the anchors (&) that lead back")
        return sizes[id(node)]

    if size(document) > MOST_VALUES:
        raise yaml.YAMLError(f"with its anchors written out it holds more than {MOST_VALUES:,} values")


def explain(text: str, error: yaml.YAMLError) -> str:
    """Returns what is wrong with a text that is no YAML, with the line to write instead where one is found.

    Args:
        text: The text.
        error: What reading it raised.
    """
    if isinstance(error, RepeatedKeyError):
        return f"{error}."
    return " ".join([_told(text, error), *_remedy(text, error)])


def _told(text: str, error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    if not isinstance(error, yaml.MarkedYAMLError) or mark is None:
        return f"{' '.join(str(error).split())}."
    words = " ".join(part for part in (error.context, error.problem) if part)
    line = next(iter(text.splitlines()[mark.line :]), "")
    return f"{words} (line {mark.line + 1}, column {mark.column + 1}{f': {line.strip()!r}' if line.strip() else ''})."


def _remedy(text: str, error: yaml.YAMLError) -> Iterator[str]:
    lines = text.splitlines()
    tabbed = [number for number, line in enumerate(lines, 1) if "\t" in line[: len(line) - len(line.lstrip())]]
    if tabbed:
        many = ", ".join(map(str, tabbed))
        yield (
            f"YAML is indented by spaces, and line {many} begins with a tab: write two spaces for each, as "
            "`sed -i 's/\\t/  /g' FILE` does."
        )
        return
    mark = getattr(error, "problem_mark", None)
    last = min(mark.line, len(lines) - 1) if mark else -1
    for number in range(last, max(last - 3, -1), -1):
        for changed in _changes(lines[number]):
            if _reads("\n".join([*lines[:number], changed, *lines[number + 1 :]])):
                yield f"Write line {number + 1} so: {changed.strip()}"
                return


def _changes(line: str) -> Iterator[str]:
    """Yields what a line may have been meant to be."""
    for changed in (
        NO_MARK.sub(lambda match: f'"{match[0].rstrip()}"', line),
        NO_SPACE.sub(r"\1: ", line),
        COLON.sub(lambda match: f"{match[1]}{json.dumps(match[2], ensure_ascii=False)}", line),
    ):
        if changed != line:
            yield changed


def _reads(text: str) -> bool:
    try:
        return isinstance(yaml.load(text, Loader), dict)
    except yaml.YAMLError:
        return False
