"""YAML as people write recipes, with remedies for broken texts."""

import itertools
import json
import re
import unicodedata
from collections.abc import Hashable, Iterator
from typing import Any

import yaml
from yaml.composer import ComposerError
from yaml.constructor import ConstructorError

LONGEST = 2**20  # bytes of the longest text
# Most values of a text, with each repetition by an alias: nine lines of nine aliases make ten gigabytes.
MOST_VALUES = 100_000
DEEPEST = 32  # deepest nesting: the reader's time per sign grows with the open levels
# Characters of a number: sixties (`1:59:59…`) take Python the square of their length, and it writes no longer ones.
LONGEST_NUMBER = 300
NEXT_LINE = "\x85"  # a break to YAML, which PyYAML writes as it is
MENDED = 2**14  # characters of the longest text that remedies are tried on: each needs a new reading
SHOWN = 200  # characters of a value or line that a message shows
MERGE = "tag:yaml.org,2002:merge"
NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
# Category of signs that look like a space or like nothing → their likely meaning.
_SPACES = {"Zs": " ", "Zl": " ", "Zp": " ", "Cf": ""}
# Signs that word processors write → YAML's.
_LOOKALIKES = {
    **dict.fromkeys("\u201c\u201d\u201e\u201f\u00ab\u00bb", '"'),
    **dict.fromkeys("\u2018\u2019\u201a\u201b", "'"),
    **dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2212", "-"),
    "\uff1a": ":",
    "\uff0c": ",",
}
# A plain value that begins with a sign of YAML's own.
NO_MARK = re.compile(r"(?<=: )[>@`%][^,}#]*")
# A plain value with a colon in it.
COLON = re.compile(r"^(\s*[\w.-]+: +)([^\"'\[{|>#].*: .*)$")
NO_SPACE = re.compile(r"^(\s*[\w.-]+):(?=[^\s:/])")  # a key without a space after its colon


class RepeatedKeyError(yaml.YAMLError):
    """A key that occurs twice in one section, where YAML's readers silently take the last."""


class Loader(yaml.SafeLoader):
    """YAML as people write it: `1e-4` is a number, where YAML 1.1 needs `1.0e-4`; no key occurs twice."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._depth = self._num_nodes = 0

    def fetch_flow_collection_start(self, token: Any) -> None:
        # Before a node is made of it: the reader looks a thousand signs ahead, and at each at all that are open.
        self._require_depth(self.flow_level + 1)
        super().fetch_flow_collection_start(token)

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self._num_nodes += 1
        if self._num_nodes > MOST_VALUES:  # before all are read, which takes a while
            raise _too_many()
        self._depth += 1
        self._require_depth(self._depth)
        node: yaml.Node | None = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def _require_depth(self, depth: int) -> None:
        if depth > DEEPEST:
            raise ComposerError(None, None, f"it is nested deeper than {DEEPEST} levels", self.get_mark())

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            if node.tag in NUMBERS and len(node.value) > LONGEST_NUMBER:
                raise ValueError(f"it has {len(node.value)} characters")
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError) as error:
            if not isinstance(node, yaml.ScalarNode):
                raise
            kind = node.tag.rpartition(":")[2]
            problem = f"{brief(node.value)!r} is not a valid {kind}: {error}; put it in quotes if it is text"
            raise ConstructorError(None, None, problem, node.start_mark) from None

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> Any:
        """Returns a text; two escapes for one character, as in JSON, become that."""
        value = super().construct_scalar(node)
        if "\0" in value:
            raise ValueError("it has a NUL, which YAML does not allow")
        return value if value.isascii() else value.encode("utf-16", "surrogatepass").decode("utf-16")

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        lines: dict[str, int] = {}
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if not isinstance(key, yaml.ScalarNode) or key.tag == MERGE:
                continue
            line = key.start_mark.line + 1
            if key.value in lines:
                first = lines[key.value]
                where = f"in line {first} and in line {line}" if first != line else f"in line {line}"
                raise RepeatedKeyError(
                    f"the key {key.value!r} occurs twice, {where}. Remove one of them, or merge both"
                )
            lines[key.value] = line
        return super().construct_mapping(node, deep)


for _tag in ("binary", "omap", "pairs", "set"):  # JSON has none of them: written and read they would be other values
    Loader.add_constructor(f"tag:yaml.org,2002:{_tag}", Loader.construct_undefined)  # type: ignore[type-var]


class LenientLoader(Loader):
    """YAML of other tools, which take the last of repeated keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        return yaml.SafeLoader.construct_mapping(self, node, deep)


class Dumper(yaml.SafeDumper):
    """Writes YAML for `load`: quotes texts that look like numbers, and breaks that a reader would fold."""

    def represent_text(self, text: str, style: str | None = None) -> yaml.ScalarNode:
        """Represents a text, in `style` where that can be read back."""
        return self.represent_scalar("tag:yaml.org,2002:str", text, style='"' if NEXT_LINE in text else style)


Dumper.add_representer(str, Dumper.represent_text)

for _kind in (Loader, Dumper):
    _kind.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
    )


def load(text: str, kind: type[Loader] = Loader) -> Any:
    """Returns a text's values; `YAMLError` for broken YAML, or a longer or deeper text than a person writes."""
    if len(text) > LONGEST:
        raise yaml.YAMLError(f"it is longer than {LONGEST >> 20} MiB")
    loader = kind(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        if _num_values(node, {}) > MOST_VALUES:
            raise _too_many()
        return loader.construct_document(node)
    except (ValueError, OverflowError) as error:  # an escape that is no character
        raise yaml.MarkedYAMLError(problem=str(error), problem_mark=loader.get_mark()) from None
    finally:
        loader.dispose()


def decode(data: bytes) -> str:
    """Returns a YAML file's text: UTF-8, or UTF-16 or UTF-32 by its first bytes; else `YAMLError`."""
    encoding = json.detect_encoding(data)
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        if encoding != "utf-8":
            raise yaml.YAMLError(f"it begins as {encoding}, and the others are not") from None
        line = data.count(b"\n", 0, error.start) + 1
        byte = data[error.start : error.start + 1]
        shown = byte.decode("cp1252", errors="replace")
        raise yaml.YAMLError(
            f"line {line} has the byte 0x{byte.hex()}, which is not UTF-8. In Windows' encoding it is {shown!r}: save "
            "the file as UTF-8, as `iconv -f CP1252 -t UTF-8 FILE` does"
        ) from None


def plain(text: str) -> str:
    """Returns a text with a keyboard's signs in place of similar ones, such as no-break spaces."""
    return "".join(_LOOKALIKES.get(sign) or _SPACES.get(unicodedata.category(sign), sign) for sign in text)


def lookalikes(text: str) -> str:
    """Returns the names of the signs that `plain` replaces; empty for none."""
    found = dict.fromkeys(sign for sign in text if plain(sign) != sign)
    return ", ".join(f"{unicodedata.name(sign, 'a sign')} (U+{ord(sign):04X})" for sign in found)


def written(text: str, location: tuple[str | int, ...]) -> str | None:
    """Returns the text of a scalar at a place that `load` has read, None where there is none."""
    if len(text) > MENDED:  # reading it again takes seconds, and no hand wrote it
        return None
    loader = Loader(text)
    node = loader.get_single_node()
    loader.dispose()
    for part in location:
        if isinstance(node, yaml.MappingNode):
            node = next((value for key, value in node.value if key.value == part), None)
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int):
            node = node.value[part]
        else:
            return None
    return node.value if isinstance(node, yaml.ScalarNode) else None


def dump(document: Any, **options: Any) -> str:
    """Returns a text that `load` reads as these values."""
    return str(yaml.dump(document, Dumper=Dumper, **options))


def _too_many() -> yaml.YAMLError:
    return yaml.YAMLError(f"it has more than {MOST_VALUES:,} values, those that aliases (*) repeat counted each time")


def _num_values(node: yaml.Node, known: dict[int, int | None]) -> int:
    """Returns a node's number of values; `known` is by `id`, None while a node is being counted."""
    if isinstance(node, yaml.ScalarNode):
        return 1
    if id(node) not in known:
        known[id(node)] = None
        parts = itertools.chain.from_iterable(node.value) if isinstance(node, yaml.MappingNode) else node.value
        known[id(node)] = 1 + sum(_num_values(part, known) for part in parts)
    number = known[id(node)]
    if number is None:
        raise ComposerError(None, None, "an alias (*) repeats the section around it", node.start_mark)
    return number


def brief(text: str) -> str:
    """Returns a text, shortened for a message."""
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


def explain(text: str, error: yaml.YAMLError) -> str:
    """Returns the fault of a broken text, with the corrected line where one is found; `error` is from reading it."""
    if isinstance(error, RepeatedKeyError):
        return f"{error}."
    return " ".join([_told(text, error), *_remedy(text, error)])


def _told(text: str, error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    if not isinstance(error, yaml.MarkedYAMLError) or mark is None:
        return f"{' '.join(str(error).split())}."
    words = " ".join(part for part in (error.context, error.problem) if part)
    line = brief(next(iter(text.splitlines()[mark.line :]), "").strip())
    return f"{words} (line {mark.line + 1}, column {mark.column + 1}{f': {line!r}' if line else ''})."


def _remedy(text: str, error: yaml.YAMLError) -> Iterator[str]:
    lines = text.splitlines() if len(text) <= MENDED else []
    tabbed = [number for number, line in enumerate(lines, 1) if "\t" in line[: len(line) - len(line.lstrip())]]
    if tabbed:
        many = ", ".join(map(str, tabbed))
        yield (
            f"YAML is indented by spaces, and line {many} begins with a tab: write two spaces for each, as "
            "`sed -i 's/\\t/  /g' FILE` does."
        )
        return
    odd = [number for number, line in enumerate(lines) if plain(line) != line]
    mended = [plain(line) for line in lines]
    if odd and _reads("\n".join(mended)):
        for number in odd:
            if not _reads("\n".join([*mended[:number], lines[number], *mended[number + 1 :]])):  # else it is text
                yield f"Line {number + 1} has {lookalikes(lines[number])}; write it so: {mended[number].strip()}"
        return
    mark = getattr(error, "problem_mark", None)
    last = min(mark.line, len(lines) - 1) if mark else -1
    for number in range(last, max(last - 3, -1), -1):
        for changed in _changes(lines[number]):
            if _reads("\n".join([*lines[:number], changed, *lines[number + 1 :]])):
                yield f"Write line {number + 1} so: {changed.strip()}"
                return


def _changes(line: str) -> Iterator[str]:
    """Yields likely corrections of a line."""
    for changed in (
        NO_MARK.sub(lambda match: f'"{match[0].rstrip()}"', line),
        NO_SPACE.sub(r"\1: ", line),
        COLON.sub(lambda match: f"{match[1]}{json.dumps(match[2], ensure_ascii=False)}", line),
    ):
        if changed != line:
            yield changed


def _reads(text: str) -> bool:
    try:
        return isinstance(load(text), dict)
    except yaml.YAMLError:
        return False
