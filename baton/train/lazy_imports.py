"""Packages that libraries import and may never use: deferred, and loaded at their first use.

Hiding a package while others are imported would make it missing, and libraries keep that answer. A deferred one is a
module as `importlib.util.LazyLoader` makes it, with one thing more: `from package import Class` alone does not load it,
nor does `isinstance`.

Libraries' look-ups at import that depend on the installed packages alone are done once. `python -m
baton.train.lazy_imports [FILE]` writes them where an environment is made, such as an image; its imports read the file.
It is ignored once other packages are installed, and nothing needs it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import importlib.metadata
import json
import operator
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any


class LazyObject:
    resolved: Any  # the object behind this one; access loads it

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self.resolved)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.resolved, name)

    def __eq__(self, other: object) -> bool:
        # By `type`: `isinstance` asks for `__class__`, which loads.
        return bool(self.resolved == (other.resolved if issubclass(type(other), LazyObject) else other))  # type: ignore[attr-defined]

    def __hash__(self) -> int:
        return hash(self.resolved)

    def __repr__(self) -> str:
        return repr(self.resolved)


@dataclass(frozen=True)
class LazySpec:
    """Answers about a package without loading it."""

    names: frozenset[str] = frozenset()  # classes and functions to import by name; never values
    made: frozenset[str] = frozenset()  # classes that may be called as well
    modules: frozenset[str] = frozenset()  # modules that the package itself imports
    values: Mapping[str, Any] = field(default_factory=dict)  # other attributes, as right after import
    loaded: Callable[[ModuleType], None] = lambda _: None  # called with the package after loading


Packages = Mapping[str, LazySpec]  # packages or modules, deferred with all below them


def defer(packages: Packages) -> None:
    """Defers packages from here on, in this process and its forks; imported ones stay."""
    finder = next((finder for finder in sys.meta_path if isinstance(finder, _LazyFinder)), None)
    if finder is None:
        finder = _LazyFinder()
        sys.meta_path.insert(0, finder)
    for name, contents in packages.items():
        if name not in sys.modules:
            finder.packages.setdefault(name, _Package(name, contents))


def is_waiting(name: str) -> bool:
    return type(sys.modules.get(name)) is _Module


class LazyName:
    """A class or function of a package that is not loaded: loads it when called, subclassed, or looked into.

    An instance of a class has its name among those of its own classes: `isinstance` loads nothing for others.
    """

    def __init__(self, module: ModuleType, name: str, *, is_made: bool) -> None:
        self._module, self._name, self._is_made = module, name, is_made

    def resolved(self) -> Any:
        return getattr(_load(self._module), self._name)

    def _may_be(self, kind: type) -> bool:
        return kind is LazyInstance or any(base.__name__ == self._name for base in kind.__mro__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_made and not _loader(self._module).package.is_loaded:
            return LazyInstance(self, args, kwargs)
        return self.resolved()(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.resolved(), name)

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self.resolved(),)

    def __instancecheck__(self, instance: object) -> bool:
        return self._may_be(type(instance)) and isinstance(instance, self.resolved())

    def __subclasscheck__(self, kind: type) -> bool:
        return self._may_be(kind) and issubclass(kind, self.resolved())

    def __getitem__(self, item: Any) -> Any:
        return self.resolved()[item]

    def __or__(self, other: Any) -> Any:
        return LazyUnion((self, other))

    def __ror__(self, other: Any) -> Any:
        return LazyUnion((other, self))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, LazyName):
            return bool(self.resolved() == other.resolved())
        return getattr(other, "__name__", None) == self._name and bool(self.resolved() == other)

    def __hash__(self) -> int:
        return hash(self.resolved())


class LazyInstance(LazyObject):
    def __init__(self, name: LazyName, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._call = (name, args, kwargs)

    @functools.cached_property
    def resolved(self) -> Any:
        name, args, kwargs = self._call
        return name.resolved()(*args, **kwargs)


class LazyUnion(LazyObject):
    """A union of classes, one not loaded, as annotations have it: `isinstance` asks each."""

    def __init__(self, kinds: tuple[Any, ...]) -> None:
        self._kinds = kinds

    @functools.cached_property
    def resolved(self) -> Any:
        return functools.reduce(operator.or_, map(_resolved, self._kinds))

    def __instancecheck__(self, instance: object) -> bool:
        return any(isinstance(instance, kind) for kind in self._kinds)

    def __or__(self, other: Any) -> Any:
        return LazyUnion((*self._kinds, other))

    def __ror__(self, other: Any) -> Any:
        return LazyUnion((other, *self._kinds))


def _resolved(value: Any) -> Any:
    if type(value) is LazyName:
        return value.resolved()
    return value.resolved if type(value) in (LazyInstance, LazyUnion) else value


class _Module(ModuleType):
    """A module whose code has not run, or is running; after loading, a proxy in use."""

    def __getattr__(self, name: str) -> Any:
        if name == "__path__":  # a package has it; imports ask each module for it
            raise AttributeError(name)
        package = _loader(self).package
        contents = LazySpec() if package.is_loaded else package.contents
        if name in contents.values:
            return contents.values[name]
        if name in contents.modules:
            return importlib.import_module(f"{self.__name__}.{name}")
        if name in contents.names | contents.made:
            return LazyName(self, name, is_made=name in contents.made)
        module = _load(self)
        if type(module) is _Module:  # this thread is loading it
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(module, name)


class _LazyFinder(MetaPathFinder):
    def __init__(self) -> None:
        self.packages: dict[str, _Package] = {}

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        package = next((self.packages[name] for name in self.packages if f"{fullname}.".startswith(f"{name}.")), None)
        if package is None or package.is_loaded:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, package)
        return spec


class _Loader(Loader):
    """Makes a module and defers its code."""

    def __init__(self, loader: Loader, package: _Package) -> None:
        self.loader, self.package = loader, package
        self.before: dict[str, Any] = {}

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__class__ = _Module
        self.before = dict(vars(module))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)  # `get_data` and others, for those who ask a module's loader


class _Package:
    def __init__(self, name: str, contents: LazySpec) -> None:
        self.name, self.contents = name, contents
        self.is_loaded = False  # set at the first use; from then on its modules are like any others
        self._lock = threading.RLock()

    def load(self) -> None:
        with self._lock:
            if self.is_loaded:
                return
            self.is_loaded = True
            root = sys.modules[self.name]
            # The package's own code imports them again, in its own order.
            below = {name: sys.modules[name] for name in list(sys.modules) if name.startswith(f"{self.name}.")}
            news = {name: _news(module) for name, module in {self.name: root, **below}.items()}
            for name in below:
                del sys.modules[name]
            try:
                _loader(root).loader.exec_module(root)
            except BaseException:
                sys.modules.update(below)
                self.is_loaded = False
                raise
            if type(root) is _Module:  # else its code has set another class
                root.__class__ = ModuleType  # type: ignore[assignment]
            for name, values in news.items():
                for key, value in values.items():
                    setattr(importlib.import_module(name), key, value)
            self.contents.loaded(root)


def _news(module: ModuleType) -> dict[str, Any]:
    """Takes out and returns values that others have set in a module that has not run, but for its own modules."""
    before = _loader(module).before
    news = {name: value for name, value in vars(module).items() if name not in before or before[name] is not value}
    for name in news:
        delattr(module, name)
    return {name: value for name, value in news.items() if type(value) is not _Module}


def _loader(module: ModuleType) -> _Loader:
    loader = module.__spec__.loader if module.__spec__ else None
    assert isinstance(loader, _Loader)
    return loader


def _load(module: ModuleType) -> ModuleType:
    if type(module) is not _Module:
        return module
    _loader(module).package.load()
    return importlib.import_module(module.__name__)


INSTALLED_FILE = Path(sys.prefix) / "share" / "baton" / "known.json"
_LOOKS_UP = "transformers.utils.import_utils"
_MODELS_FOLDER = "models"
Structure = dict[frozenset[str], dict[str, set[str]]]  # distributions that a module needs → module → its names


@dataclass(frozen=True)
class InstalledPackages:
    """The file's content."""

    key: str  # `installed_digest`
    distributions: dict[str, list[str]]  # by package
    models: list[tuple[list[str], dict[str, list[str]]]]  # of Transformers, as `Structure`


def installed_digest() -> str:
    """Returns the SHA-256 of the names and versions of all distributions that this interpreter finds."""
    names = {sys.version}
    for folder in sys.path:
        with contextlib.suppress(OSError):
            names |= {name for name in os.listdir(folder or ".") if name.endswith((".dist-info", ".egg-info"))}
    return hashlib.sha256("\n".join(sorted(names)).encode()).hexdigest()


def write_installed(file: Path) -> None:
    import transformers
    from transformers.utils.import_utils import define_import_structure

    folder = os.path.join(os.path.dirname(transformers.__file__), _MODELS_FOLDER)
    structure: Structure = define_import_structure(folder)
    # In their own order: Transformers takes a name that two modules have from the last.
    models = [
        (sorted(needs), {module: sorted(names) for module, names in modules.items()})
        for needs, modules in structure.items()
    ]
    distributions = {name: list(found) for name, found in importlib.metadata.packages_distributions().items()}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(asdict(InstalledPackages(installed_digest(), distributions, models))), encoding="utf-8")


@contextlib.contextmanager
def looked_up_once() -> Iterator[None]:
    """Answers once the look-ups that libraries imported within repeat; from the file where it is there."""
    known = _read_installed()
    asked = importlib.metadata.packages_distributions
    finder = _LookupFinder(known)
    written = functools.partial(getattr, known, "distributions")
    importlib.metadata.packages_distributions = functools.cache(asked) if known is None else written
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        importlib.metadata.packages_distributions = asked


def _read_installed() -> InstalledPackages | None:
    with contextlib.suppress(OSError, ValueError, TypeError):
        known = InstalledPackages(**json.loads(INSTALLED_FILE.read_text(encoding="utf-8")))
        if known.key == installed_digest():
            return known
    return None


class _LookupFinder(MetaPathFinder):
    """Finds the module by which Transformers reads its own source, to list its models."""

    def __init__(self, known: InstalledPackages | None) -> None:
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


def _reading_once(reads: Callable[..., Structure], known: InstalledPackages | None) -> Callable[..., Structure]:
    """Returns the function that reads which models there are; two packages ask, by two names of one folder."""

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
        if os.path.basename(folder) != _MODELS_FOLDER:
            return reads(module_path, prefix)
        before = f"{prefix}." if prefix else ""
        # A copy: the caller adds to it.
        return {
            needs: {f"{before}{module}": set(names) for module, names in modules.items()}
            for needs, modules in models(folder).items()
        }

    return read


if __name__ == "__main__":
    file = Path(sys.argv[1]) if sys.argv[1:] else INSTALLED_FILE
    try:
        write_installed(file)
    except OSError as error:
        sys.exit(f"{file} cannot be written: {error.strerror}. Nothing needs it: imports take half a second longer.")
