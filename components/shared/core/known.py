"""What libraries look up each time they are imported, and what depends on the installed packages alone: looked up once.

`python -m baton.components.shared.core.known [FILE]` writes it down where an environment is made, such as an image, and
imports in it read it there. It is not believed where other packages are installed than were then, and not needed.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

FILE = Path(sys.prefix) / "share" / "baton" / "known.json"
"""Where it is written down."""
_LOOKS_UP = "transformers.utils.import_utils"
_MODELS = "models"
Structure = dict[frozenset[str], dict[str, set[str]]]
"""Of a package: what has to be installed for a module of it, the module, the names it has."""


@dataclass(frozen=True)
class Known:
    """What was written down.

    Attributes:
        key: What it depends on, see `installed`.
        distributions: Names of the distributions by the name of a package of theirs.
        models: Transformers' modules of models: what each needs, and the names it has.
    """

    key: str
    distributions: dict[str, list[str]]
    models: list[tuple[list[str], dict[str, list[str]]]]


def installed() -> str:
    """Returns the SHA-256 of the names and versions of all distributions that this interpreter finds."""
    names = {sys.version}
    for folder in sys.path:
        with contextlib.suppress(OSError):
            names |= {name for name in os.listdir(folder or ".") if name.endswith((".dist-info", ".egg-info"))}
    return hashlib.sha256("\n".join(sorted(names)).encode()).hexdigest()


def write(file: Path) -> None:
    """Looks all of it up, and writes it down."""
    from transformers.utils.import_utils import define_import_structure

    structure: Structure = define_import_structure(_models_folder())
    # Modules stay in their order: of a name that two have, Transformers takes the last one's.
    models = [
        (sorted(needs), {module: sorted(names) for module, names in modules.items()})
        for needs, modules in structure.items()
    ]
    distributions = {name: list(found) for name, found in importlib.metadata.packages_distributions().items()}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(asdict(Known(installed(), distributions, models))), encoding="utf-8")


@contextlib.contextmanager
def looked_up_once() -> Iterator[None]:
    """Looks up once what libraries that are imported within ask several times; not at all where it is written down."""
    known = _read()
    asked = importlib.metadata.packages_distributions
    answer = functools.cache(asked) if known is None else _always(known.distributions)
    finder = _Finder(known)
    importlib.metadata.packages_distributions = answer
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        importlib.metadata.packages_distributions = asked


def _read() -> Known | None:
    """Returns what is written down; None where nothing is, or where it is of other packages."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        known = Known(**json.loads(FILE.read_text(encoding="utf-8")))
        if known.key == installed():
            return known
    return None


def _always(distributions: dict[str, list[str]]) -> Callable[[], Mapping[str, list[str]]]:
    return lambda: distributions


def _models_folder() -> str:
    import transformers

    return os.path.join(os.path.dirname(transformers.__file__), _MODELS)


class _Finder(MetaPathFinder):
    """Finds the module by which Transformers reads its own source to learn what models it has."""

    def __init__(self, known: Known | None) -> None:
        self._known = known

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != _LOOKS_UP:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                # A release that looks them up in another way is left alone.
                if reads := getattr(module, "define_import_structure", None):
                    module.define_import_structure = _reading_once(reads, self._known)  # type: ignore[attr-defined]

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _reading_once(reads: Callable[..., Structure], known: Known | None) -> Callable[..., Structure]:
    """Returns the function that reads what models there are, which two packages ask for by two names of one folder."""

    @functools.cache
    def models(folder: str) -> Structure:
        if known is None:
            return reads(folder)
        return {
            frozenset(needs): {module: set(names) for module, names in modules.items()}
            for needs, modules in known.models
        }

    @functools.wraps(reads)
    def read(module_path: str | os.PathLike[str], prefix: str | None = None) -> Structure:
        folder = os.fspath(module_path).removesuffix(f"{os.sep}__init__.py")
        if os.path.basename(folder) != _MODELS:
            return reads(module_path, prefix)
        before = f"{prefix}." if prefix else ""
        # Who asks adds to it.
        return {
            needs: {f"{before}{module}": set(names) for module, names in modules.items()}
            for needs, modules in models(folder).items()
        }

    return read


if __name__ == "__main__":
    file = Path(sys.argv[1]) if sys.argv[1:] else FILE
    try:
        write(file)
    except OSError as error:
        sys.exit(f"{file} cannot be written: {error.strerror}. Nothing needs it: imports take half a second longer.")
