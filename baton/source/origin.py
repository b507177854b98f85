"""Origins of a recipe: a file, a pipe, standard input, an address, or Baton's bundled recipes."""

import contextlib
import difflib
import os
import re
import stat
import sys
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from baton.errors import UserError, suggest_path
from baton.recipe import load
from baton.recipe.yaml_text import LONGEST
from baton.store.clouds import CLOUDS
from baton.store.sources import SourceFile
from baton.store.storage import Storage

STDIN = "-"
ENDINGS = (".yaml", ".yml")
RECIPES = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "pipelines", "recipes")
"""Folder of the bundled recipes."""
LISTED = "`baton recipe list` lists the bundled ones"
SCHEMES = ("https", *CLOUDS, "gcs", "abfs", "abfss", "hf")
"""Addresses that a recipe is read from: their servers prove who they are."""
_LOOPBACK = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:\d+)?/")
_consent: ContextVar[bool] = ContextVar("consent", default=False)


@contextlib.contextmanager
def consenting(given: bool) -> Iterator[None]:
    """Reads recipes in this block with or without consent to run their code."""
    token = _consent.set(given)
    try:
        yield
    finally:
        _consent.reset(token)


@dataclass(frozen=True)
class RecipeSource:
    """A recipe as it was given, its text read: a pipe can be read only once.

    Attributes:
        folder: Where its relative paths begin.
        values: Its values, where it has no text.
        is_foreign: Whether somebody else may have written it: it came through a pipe or from an address.
        is_trusted: Whether somebody has consented to run its code.
    """

    name: str
    text: str
    folder: str
    values: Mapping[str, Any] | None = None
    is_foreign: bool = False
    is_trusted: bool = field(default_factory=lambda: _consent.get())

    def document(self, overrides: tuple[str, ...] | list[str] = ()) -> dict[str, Any]:
        """Returns its values, not checked yet."""
        return load.parse(self.text if self.values is None else self.values, overrides, origin=self.name)

    @property
    def summary(self) -> str:
        """Its first line, if that is a comment."""
        first = self.text.lstrip().partition("\n")[0]
        return first.lstrip("# ").rstrip() if first.startswith("#") else ""

    def standalone(self) -> str:
        """Returns its text for a file elsewhere, with whole paths of its neighbours."""
        text = self.text
        for path in sorted(_paths(self.document()), key=len, reverse=True):
            there = os.path.join(self.folder, path)
            if not os.path.isabs(path) and os.path.exists(there):
                whole = re.compile(rf"(?<![\w./-]){re.escape(path)}(?![\w./-])")
                text = whole.sub(there.replace("\\", r"\\"), text)
        return text


def _paths(node: object) -> Iterator[str]:
    """Yields the texts of a recipe that look like files."""
    if isinstance(node, str) and "\n" not in node and "://" not in node:
        yield from [node] if "/" in node or os.path.splitext(node)[1] else ()
    for child in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from _paths(child)


def find(given: str | RecipeSource) -> RecipeSource:
    """Reads a recipe from standard input (`-`), a file or pipe, an address, or else a bundled recipe's name."""
    if isinstance(given, RecipeSource):
        return given
    if given == STDIN:
        if sys.stdin is None or sys.stdin.closed or sys.stdin.isatty():
            raise _terminal()
        return RecipeSource(STDIN, _piped(sys.stdin.buffer.read(LONGEST + 1), given), os.getcwd(), is_foreign=True)
    if "://" in given:
        return RecipeSource(given, _text(_fetched(given), given), os.getcwd(), is_foreign=True)
    path = os.path.expanduser(given)
    if is_readable(path):
        try:
            with open(path, "rb") as file:
                if file.isatty():
                    raise _terminal()
                data = file.read(LONGEST + 1)  # a device may have no end
        except OSError as error:
            raise UserError(f"recipe {given!r} cannot be read: {error.strerror}.") from None
        is_pipe = not os.path.isfile(path) or path.startswith(("/dev/", "/proc/"))
        folder = os.getcwd() if is_pipe else os.path.dirname(os.path.abspath(path))
        text = _piped(data, given) if is_pipe else _text(data, given)
        return RecipeSource(given, text, folder, is_foreign=is_pipe)
    if bundled_name(given):
        return of_bundle(given)
    raise _absent(given)


def of_bundle(name: str) -> RecipeSource:
    """Reads a bundled recipe."""
    found = bundled_name(name)
    if not found:
        names = list(bundled())
        close = _meant(name, names)
        hint = f"Did you mean {close!r}? " if close else ""
        raise UserError(f"no bundled recipe is called {name!r}.", remedy=f"{hint}There are {', '.join(names)}.")
    path = bundled()[found]
    with open(path, "rb") as file:
        return RecipeSource(found, _text(file.read(), found), os.path.dirname(path))


def described(name: str) -> dict[str, str]:
    """Returns a bundled recipe's entry in lists: name, method, model, and summary."""
    source = of_bundle(name)
    recipe = load.validate(source.document(), origin=name)
    methods = [part.training.method for part in recipe.phase_recipes() or [recipe]]
    scratch = recipe.model.from_scratch
    model = recipe.model.base or (f"{scratch.architecture} from scratch" if scratch else "")
    return {"name": source.name, "method": " → ".join(methods), "model": model, "about": source.summary}


def is_readable(path: str) -> bool:
    """Tells whether a path is a file, or a pipe or device that can be read like one."""
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return False
    return not stat.S_ISDIR(mode)


def is_recipe(given: str) -> bool:
    """Tells whether a word of the command line means a recipe, where it may mean rows as well."""
    if given == STDIN or given.endswith(ENDINGS):
        return True
    if os.path.exists(given):
        return is_readable(given) and not os.path.isfile(given)
    return bool(bundled_name(given))


def bundled() -> dict[str, str]:
    """Returns name → path of the bundled recipes, the top folder's first."""
    found = {}
    for folder, folders, files in os.walk(RECIPES):
        folders[:] = sorted(name for name in folders if not name.startswith((".", "_")))
        for file in sorted(files):
            stem, ending = os.path.splitext(file)
            if ending in ENDINGS:
                name = os.path.relpath(os.path.join(folder, stem), RECIPES).replace(os.sep, "/")
                found[name] = os.path.join(folder, file)
    return found


def bundled_name(given: str) -> str:
    """Returns the full name of a bundled recipe, in any case of letters; empty for none."""
    wanted, recipes = given.lower(), bundled()
    whole = [name for name in recipes if name.lower() == wanted]
    names = whole or [name for name in recipes if name.lower().rpartition("/")[2] == wanted]
    if len(names) > 1:
        remedy = f"Say which: {_either(names)}."
        raise UserError(f"{given!r} is the name of {len(names)} bundled recipes.", remedy=remedy)
    return names[0] if names else ""


def _fetched(uri: str) -> bytes:
    """Returns the bytes at an address; `UserError` for none or an unsafe scheme, `StoreError` if out of reach."""
    scheme, _, rest = uri.partition("://")
    if scheme not in SCHEMES and not (scheme == "http" and _LOOPBACK.match(rest)):
        raise UserError(
            f"recipe {uri!r} cannot be read: {scheme}:// is none of {', '.join(SCHEMES)}.",
            remedy="Use https://, a bucket or hf://, or save it to a file.",
        )
    folder, _, name = uri.rpartition("/")
    try:
        with SourceFile(Storage(folder), name).open(block_size=LONGEST + 1) as file:
            return bytes(file.read(LONGEST + 1))
    except FileNotFoundError:
        raise UserError(f"recipe {uri!r} does not exist.", remedy="Check the address.") from None


def _text(data: bytes, given: str) -> str:
    if len(data) > LONGEST:
        raise UserError(
            f"recipe {given!r} is longer than {LONGEST >> 20} MiB, expected what a person writes.",
            remedy="Check the path; rows belong into a file that data.source names.",
        )
    return load.decode(data, origin=given)


def _piped(data: bytes, given: str) -> str:
    if not data.strip():
        where = "standard input is empty" if given == STDIN else "nothing came out of it"
        raise UserError(
            f"recipe {given!r}: {where}, expected a recipe in YAML.",
            remedy="Pipe one in, as in `baton check - < my.yaml`.",
        )
    return _text(data, given)


def _terminal() -> UserError:
    return UserError(
        "the recipe is read from standard input, which is a terminal.",
        remedy=f"Pipe one in, as in `baton check - < my.yaml`, or name a file; {LISTED}.",
    )


def _absent(given: str) -> UserError:
    if os.path.isdir(given):
        inside = [name for name in sorted(os.listdir(given)) if name.endswith(ENDINGS)]
        files = _either([os.path.join(given, name) for name in inside[:5]]) if inside else f"a YAML file; {LISTED}"
        return UserError(f"recipe {given!r} is not a file but a folder.", remedy=f"Name a recipe: {files}.")
    is_name = not given.endswith(ENDINGS) and "/" not in given.removeprefix("gallery/")
    close = _meant(os.path.splitext(os.path.basename(given))[0], list(bundled()))
    file = suggest_path(given, [os.getcwd()])
    meant = close if is_name and close else file if file and is_readable(file) else close
    hint = f"Did you mean {meant!r}? " if meant else ""
    kind = "is not a file, nor the name of a bundled recipe" if is_name else "is not a file"
    return UserError(f"recipe {given!r} {kind}.", remedy=f"{hint}Give the path of a YAML recipe, or a name; {LISTED}.")


def _meant(given: str, names: list[str]) -> str | None:
    """Returns the bundled recipe with a similar name."""
    known = {name.rpartition("/")[2].lower(): name for name in reversed(names)} | {name.lower(): name for name in names}
    close = difflib.get_close_matches(given.lower(), known, n=1)
    return known[close[0]] if close else None


def _either(names: list[str]) -> str:
    return " or ".join(names) if len(names) < 3 else f"{', '.join(names[:-1])} or {names[-1]}"
