"""State of the user's own code: found by a walk from the trainer's hooks, kept in checkpoints, or named as not kept.

A walk begins at loss, rewards, callbacks, metrics, collator and the trainer's own class. It follows the names in their
code: globals of modules, attributes of objects and classes, closures, defaults of arguments. Each place of a value is a
`StateSlot`. Values are compared before training and at each checkpoint. A changed one is carried as JSON and arrays, or
named as not carried.
"""

from __future__ import annotations

import base64
import collections
import dis
import functools
import hashlib
import inspect
import io
import itertools
import json
import os
import random
import sys
import types
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from baton.documents import load_object
from baton.errors import LIBRARIES, ExactnessError, is_own
from baton.models.hooks import SeededCollator
from baton.runs.documents import OwnState
from baton.train import state
from baton.train.protocol import ChunkTrainer

PART = "hooks"  # name of this part of the state; only where something is carried
# Modules of Python whose objects keep nothing that training depends on.
SILENT = ("logging", "threading", "weakref")
# Attributes of trainers that hold hooks, which may be installed packages.
HOOKS = (
    *("compute_loss_func", "compute_metrics", "data_collator", "preprocess_logits_for_metrics", "reward_funcs"),
    *("rollout_func", "formatting_func"),
)
AHEAD = "data_collator"  # called for batches ahead of the step: its state at a step's end is of no step
ROWS = ("train_dataset", "eval_dataset")
DYNAMIC = {"globals", "vars", "exec", "eval", "modules"}  # names by which code may refer to any other
CONSTANT = (type(None), bool, int, float, str)
MUTABLE = (list, dict, set, bytearray, collections.deque, np.ndarray, torch.Tensor)
CALLABLE = (types.FunctionType, types.MethodType, functools.partial, functools._lru_cache_wrapper, SeededCollator)
# Generators of random numbers: how to get the state of one, and how to set it.
RANDOM: dict[Any, tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]] = {
    random.Random: (lambda it: it.getstate(), lambda it, state: it.setstate(state)),
    np.random.Generator: (
        lambda it: it.bit_generator.state,
        lambda it, state: setattr(it.bit_generator, "state", state),
    ),
    np.random.RandomState: (lambda it: it.get_state(legacy=False), lambda it, state: it.set_state(state)),
    torch.Generator: (lambda it: it.get_state(), lambda it, state: it.set_state(state)),
}
BIT_GENERATORS: dict[str, Any] = {
    each.__name__: each
    for each in (np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937, np.random.Philox, np.random.SFC64)
}
SEQUENCES = ("list", "tuple", "set", "frozenset", "deque")
MAPPINGS = ("dict", "OrderedDict", "Counter", "defaultdict")
FACTORIES: dict[str, Callable[[], Any]] = {each.__name__: each for each in (int, float, str, list, dict, set)}
LARGE = 2**26  # bytes from which an array is known by sums of its pieces: a hash would take seconds
DEEPEST = 6  # levels compared of a library's object, and of containers searched for objects
NESTED = 30  # levels of a value that is carried


@dataclass(frozen=True)
class StateSlot:
    owner: str  # name of the object that the value belongs to, the `holder`
    kind: str  # `item` of a mapping, `attribute`, `cell` of a closure, or `state_dict`
    key: str
    holder: Any
    ahead: bool = False  # whether code that is called ahead of the step refers to it

    def get(self) -> Any:
        """Returns the value; raises AttributeError, KeyError or ValueError where there is none."""
        if self.kind == "item":
            return self.holder[self.key]
        if self.kind == "attribute":
            return getattr(self.holder, self.key)
        return self.holder.cell_contents if self.kind == "cell" else self.holder.state_dict()

    def put(self, value: Any) -> None:
        if self.kind == "state_dict":
            self.holder.load_state_dict(value)
            return
        try:
            now = self.get()
        except (AttributeError, KeyError, ValueError):
            now = None
        # In place where possible, as other code may hold the same object.
        if _put_in_place(now, value):
            return
        if self.kind == "item":
            self.holder[self.key] = value
        elif self.kind == "cell":
            self.holder.cell_contents = value
        elif isinstance(self.holder, type):
            setattr(self.holder, self.key, value)
        else:
            object.__setattr__(self.holder, self.key, value)  # a frozen dataclass's own refuses


class OwnStates:
    """The state of the user's code that a trainer calls; made once callbacks are complete, before any call."""

    def __init__(self, trainer: ChunkTrainer) -> None:
        self._trainer = trainer
        # Digests that a change is measured from: before the run's first step, as far as a checkpoint carries them.
        self._bases = {name: value.digest for name, value in Walk(trainer).values().items()}
        # As this chunk's training began: digests, owners, and identities of mutable values.
        self._began: dict[str, str] = {}
        self._owners: set[str] = set()
        self._same: dict[str, int] = {}
        self._saved: dict[str, Any] = {}
        self._arrays: dict[str, torch.Tensor] = {}

    def begin(self, folder: str | None, rank: int) -> None:
        """Compares from here on, with all that callbacks made as training began; reads a checkpoint's state."""
        found = Walk(self._trainer)
        values = found.values()
        self._began, self._owners = {name: each.digest for name, each in values.items()}, set(found.owners)
        self._same = {name: each.identity for name, each in values.items() if each.identity is not None}
        if folder is None or not os.path.isfile(path := os.path.join(folder, file_name(rank))):
            return
        with open(path, "rb") as file:
            self._saved = load_object(file.read(), path)
        if os.path.isfile(arrays := path.replace(".json", ".safetensors")):
            self._arrays = load_file(arrays)
        self._bases.update({name: each["began"] for name, each in self._saved.items()})

    def restore(self, *, partly: bool = False) -> dict[str, str]:
        """Puts back a checkpoint's state, `partly` without absent objects; returns digests of the values in memory."""
        if not self._saved:
            return {}
        found = Walk(self._trainer)
        for name, saved in self._saved.items():
            holder = found.slots[name].holder if name in found.slots else found.owners.get(saved["owner"])
            if holder is None and not partly:
                raise ExactnessError(
                    f"state of `{name}` cannot be restored: this chunk has no `{saved['owner']}`.",
                    remedy="Check that code and options are those that the checkpoint was made with.",
                )
            if holder is not None:
                value = _decoded(saved["value"], self._arrays)
                StateSlot(saved["owner"], saved["kind"], saved["key"], holder).put(value)
        values = Walk(self._trainer).values()
        return {name: values[name].digest for name in self._saved if name in values}

    def capture(self) -> tuple[dict[str, Any], dict[str, torch.Tensor], OwnState]:
        """Returns the carried state, its arrays, and the names of carried and lost values."""
        found = Walk(self._trainer)
        values = found.values()
        changed = {name: value for name, value in values.items() if value.digest != self._bases.get(name)}
        lost = {name: "it was removed" for name in self._began.keys() - values.keys() if name in self._bases}
        holders: dict[int, list[str]] = {}
        for name, value in changed.items():
            for each in value.inside:
                holders.setdefault(each, []).append(name)
        kept: dict[str, Encoded] = {}
        for name, value in changed.items():
            if found.slots[name].ahead:
                lost[name] = "it is called for batches ahead of the step"
            elif value.opaque and self._began.get(name) == value.digest:
                pass  # each chunk makes it as it begins, and nothing has changed it since
            elif value.opaque:
                lost[name] = "it holds more than numbers, texts, lists, dictionaries and arrays"
            elif found.slots[name].owner not in self._owners:
                lost[name] = "its object was made during training"
            elif other := self._shared(name, value, holders, values):
                lost[name] = f"it shares an object with `{other}`"
            else:
                kept[name] = value
        document = {
            name: {
                "owner": found.slots[name].owner,
                "kind": found.slots[name].kind,
                "key": found.slots[name].key,
                "began": self._bases.get(name, ""),
                "value": value.tree,
            }
            for name, value in kept.items()
        }
        arrays = {digest: tensor for value in kept.values() for digest, tensor in value.arrays.items()}
        outer = {name: why for name, why in lost.items() if not any(name.startswith((f"{x}.", f"{x}[")) for x in lost)}
        carried = {name: value.digest for name, value in kept.items()}
        return document, arrays, OwnState(carried=carried, lost=outer) if carried or outer else OwnState()

    def _shared(
        self, name: str, value: Encoded, holders: Mapping[int, list[str]], values: Mapping[str, Encoded]
    ) -> str | None:
        """Returns another place that holds an object of a value, where a restore would make two of it."""
        for identity in value.inside:
            for other in holders[identity]:
                both_now = values[name].identity == values[other].identity == identity
                if other != name and not (both_now and self._same.get(name, name) == self._same.get(other)):
                    return other
        return None


def save(folder: str, rank: int, document: Mapping[str, Any], arrays: Mapping[str, torch.Tensor]) -> None:
    if not document:
        return
    path = os.path.join(folder, file_name(rank))
    with open(path, "w", encoding="utf-8") as file:
        json.dump(document, file)
    if arrays:
        on_cpu = {name: each.detach().cpu().contiguous().clone() for name, each in arrays.items()}
        save_file(on_cpu, path.replace(".json", ".safetensors"))


def file_name(rank: int) -> str:
    return "baton_state_hooks.json" if rank == 0 else f"baton_state_hooks_{rank}.json"


def digest(carried: Mapping[str, str]) -> str:
    return hashlib.sha256("".join(f"{name}={carried[name]};" for name in sorted(carried)).encode()).hexdigest()


def merge_rank_states(rows: Sequence[OwnState], *, each_writes: bool = True) -> OwnState:
    """Returns the state of all ranks; `each_writes` its own part, or all share one checkpoint."""
    carried, lost = {}, {name: why for row in rows for name, why in row.lost.items()}
    for name in sorted({name for row in rows for name in row.carried}):
        digests = [row.carried.get(name, "") for row in rows]
        if each_writes or len(set(digests)) == 1:
            carried[name] = state.combine_ranks(digests)
        else:
            lost[name] = "it differs between processes that share one checkpoint"
    return OwnState(carried=carried, lost=dict(sorted(lost.items()))) if carried or lost else OwnState()


class Walk:
    """A walk from a trainer's hooks: names of places, and of the objects that they belong to."""

    def __init__(self, trainer: ChunkTrainer) -> None:
        self.slots: dict[str, StateSlot] = {}
        self.owners: dict[str, Any] = {}
        self._seen: dict[int, object] = {}  # by identity, and held: no other object may get it
        self._packages: set[str] = set()
        self._ahead = False
        self._depth = 0
        callbacks = [each for each in trainer.callback_handler.callbacks if not isinstance(each, state.STATELESS)]
        named = {name: getattr(trainer, name, None) for name in HOOKS}
        roots = [each for value in (*named.values(), callbacks) for each in _parts(value)]
        self._packages = {_top(each) for each in roots} - LIBRARIES - sys.stdlib_module_names
        roots += [
            each
            for name, value in vars(trainer).items()
            if name not in HOOKS and name not in ROWS
            for each in _parts(value)
            if self._has_places(each) and not _has_state_dict(each)
        ]
        kinds = [each for each in type(trainer).__mro__ if self._is_own(each.__module__)]
        others = (kind for kind in type(trainer).__mro__ if kinds and kind not in kinds)
        stored = {name for kind in kinds for name in _stored(kind)}.difference(*map(_stored, others))
        self._foreign = _foreign(trainer, {id(each) for each in roots}, stored)
        # First: code that is called ahead refers to no state of a step, whoever else refers to the same place.
        self._ahead = True
        self._visit(named[AHEAD], _label(named[AHEAD]))
        self._ahead = False
        for each in (*roots, *kinds):
            self._visit(each, _label(each))
        if stored:
            self.owners[f"{_label(kinds[0])}()"] = trainer
        for key in sorted(stored & vars(trainer).keys()):
            self._place(f"{_label(kinds[0])}.{key}", StateSlot(f"{_label(kinds[0])}()", "attribute", key, trainer))

    def values(self) -> dict[str, Encoded]:
        return {name: Encoded(slot.get(), self._foreign, self._seen) for name, slot in self.slots.items()}

    def _is_own(self, module: str | None) -> bool:
        return is_own(module) or str(module).partition(".")[0] in self._packages

    def _has_places(self, value: Any) -> bool:
        if isinstance(value, CALLABLE):
            return True
        kind = value if isinstance(value, type) else type(value)
        return self._is_own(kind.__module__) or (kind is type(value) and _has_state_dict(value))

    def _place(self, name: str, slot: StateSlot) -> None:
        try:
            value = slot.get()
        except (AttributeError, KeyError, ValueError):
            return
        if id(value) in self._foreign or isinstance(value, types.ModuleType):
            return
        while name in self.slots:
            if self.slots[name].holder is slot.holder and self.slots[name].key == slot.key:
                return
            name += "'"
        self.slots[name] = StateSlot(slot.owner, slot.kind, slot.key, slot.holder, self._ahead)
        if slot.kind != "state_dict":
            self._follow(value, name)

    def _follow(self, value: Any, name: str) -> None:
        """Visits a value, or values in it, that have places of their own."""
        if self._depth > DEEPEST:
            return
        self._depth += 1
        if self._has_places(value):
            self._visit(value, _label(value) if isinstance(value, type | types.FunctionType) else name)
        if isinstance(value, list | tuple | set | frozenset | collections.deque | Mapping):
            items: list[tuple[Any, Any]] = list(value.items() if isinstance(value, Mapping) else enumerate(value))
            for number, (key, each) in enumerate(items):
                if not isinstance(each, CONSTANT):
                    self._follow(each, f"{name}[{key if isinstance(key, CONSTANT) else number!r}]")
        self._depth -= 1

    def _visit(self, value: Any, name: str) -> None:
        if value is None or id(value) in self._seen or id(value) in self._foreign:
            return
        self._seen[id(value)] = value
        if getattr(value, "stateless", False) is True:
            return
        if isinstance(value, SeededCollator):
            self._visit(value.collator, _label(value.collator))
        elif isinstance(value, functools.partial):
            self._visit(value.func, _label(value.func))
            for key, each in (*enumerate(value.args), *value.keywords.items()):
                self._argument(_label(value.func), str(key), each)
        elif isinstance(value, functools._lru_cache_wrapper):
            self._visit(value.__wrapped__, _label(value.__wrapped__))
        elif isinstance(value, types.MethodType):
            self._visit(value.__self__, name)
            self._visit(value.__func__, _label(value.__func__))
        elif isinstance(value, types.FunctionType):
            self._function(value, name)
        elif isinstance(value, type):
            self._class(value)
        elif self._has_places(value) or isinstance(value, TrainerCallback):
            self._instance(value, name)

    def _own(self, name: str, value: Any) -> str:
        while self.owners.get(name, value) is not value:
            name += "'"
        self.owners[name] = value
        return name

    def _function(self, function: types.FunctionType, name: str) -> None:
        is_own = self._is_own(function.__module__)
        for key, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if is_own:
                self._place(f"{name}.{key}", StateSlot(self._own(f"{name}.{key}", cell), "cell", key, cell))
            elif cell != types.CellType():  # a library's function around one of the user's
                self._follow(cell.cell_contents, name)
        self._follow(vars(function).get("__wrapped__"), name)
        if not is_own:
            return
        self._names(function.__code__, function.__globals__)
        self._mapping(vars(function), name)
        defaults = function.__defaults__ or ()
        first = function.__code__.co_argcount - len(defaults)
        for key, each in zip(function.__code__.co_varnames[first:], defaults, strict=False):
            self._argument(name, key, each)
        self._mapping(function.__kwdefaults__ or {}, f"{name}()")

    def _argument(self, name: str, key: str, value: Any) -> None:
        # A default is always the same object, which may change in place.
        if not isinstance(value, CONSTANT):
            holder = {key: value}
            self._place(f"{name}({key})", StateSlot(self._own(f"{name}({key})", holder), "item", key, holder))

    def _names(self, code: types.CodeType, scope: dict[str, Any]) -> None:
        names = list(dict.fromkeys(_names_in(code)))
        if DYNAMIC.intersection(names):
            names += sorted(scope.keys() - set(names))
        self._scope(names, scope, set())
        for name in names:  # modules imported as the code runs
            for path in (name, f"{scope.get('__package__')}.{name}"):
                if path in sys.modules and name not in scope:
                    self._scope(names, vars(sys.modules[path]), set())

    def _scope(self, names: list[str], scope: dict[str, Any], seen: set[int]) -> None:
        if id(scope) in seen or not self._is_own(scope.get("__name__")):
            return
        seen.add(id(scope))
        file = _file(scope)
        for name in names:
            if isinstance(scope.get(name), types.ModuleType):
                self._scope(names, vars(scope[name]), seen)
            elif name in scope and not name.startswith("__"):
                self._place(f"{file}:{name}", StateSlot(self._own(file, scope), "item", name, scope))

    def _class(self, kind: type) -> None:
        if not self._is_own(kind.__module__):
            return
        name = _label(kind)
        for key, value in list(vars(kind).items()):
            wraps = value.func if isinstance(value, functools.cached_property | functools.partialmethod) else value
            inner = getattr(wraps, "__func__", None) or getattr(wraps, "fget", None) or wraps
            if isinstance(inner, types.FunctionType | functools._lru_cache_wrapper):
                self._visit(inner, _label(inner))
            elif not key.startswith(("__", "_abc_")) and not hasattr(type(value), "__get__"):
                self._place(f"{name}.{key}", StateSlot(self._own(name, kind), "attribute", key, kind))
        for base in kind.__bases__:
            self._visit(base, _label(base))

    def _instance(self, value: Any, name: str) -> None:
        self._visit(type(value), _label(type(value)))
        owner = self._own(f"{name}()" if name == _label(type(value)) else name, value)
        if _has_state_dict(value):
            if not isinstance(value, TrainerCallback):  # else part of `callbacks`
                self._place(f"{name}.state_dict()", StateSlot(owner, "state_dict", "", value))
        elif not isinstance(value, ExportableState):
            kept = getattr(value, "__dict__", {})
            slotted = [each for kind in type(value).__mro__ for each in getattr(kind, "__slots__", ())]
            for key in (*slotted, *kept):
                if not key.startswith("__"):
                    self._place(f"{name}.{key}", StateSlot(owner, "attribute", key, value))

    def _mapping(self, values: dict[str, Any], name: str) -> None:
        owner = self._own(name, values)
        for key in list(values):
            if not key.startswith("__"):
                self._place(f"{name}.{key}", StateSlot(owner, "item", key, values))


class Encoded:
    """A value as JSON, its arrays by their digests.

    `foreign` objects are not the user's; each place of a `visited` one is compared by itself. Both are by identity.
    """

    def __init__(self, value: Any, foreign: Mapping[int, object], visited: Mapping[int, object]) -> None:
        self._foreign, self._visited = foreign, visited
        self.arrays: dict[str, torch.Tensor] = {}  # by digest
        self.inside: dict[int, object] = {}  # its mutable objects, by identity
        self.opaque = False  # whether it holds something that JSON and arrays cannot
        self.tree = self._tree(value, 0)  # nested lists, each with its kind first
        self.identity = id(value) if id(value) in self.inside else None  # where it is mutable itself

    @functools.cached_property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self.tree).encode()).hexdigest()

    def _tree(self, value: Any, depth: int) -> Any:
        kind: Any = type(value)
        if kind in (type(None), bool, int, str):
            return value
        if kind is float:
            return value if np.isfinite(value) else ["float", repr(value)]
        if kind is complex:
            return ["complex", value.real, value.imag]
        if kind in (bytes, bytearray):
            if kind is bytearray:
                self.inside[id(value)] = value
            return [kind.__name__, base64.b64encode(value).decode()]
        if id(value) in self._foreign or depth > NESTED or id(value) in self.inside:
            self.opaque = True
            return [_label(value)]
        if isinstance(value, (*MUTABLE, *RANDOM, itertools.count)):
            self.inside[id(value)] = value
        if isinstance(value, np.ndarray | np.generic | torch.Tensor):
            return self._array(value)
        if (parts := self._container(value, depth)) is not None:
            return parts
        base = next((each for each in RANDOM if isinstance(value, each)), None)
        if base and kind is not random.SystemRandom:  # which has no state
            self.opaque |= kind is not base  # of a class of its own
            device = [str(value.device)] if base is torch.Generator else []
            name = "torch.Generator" if kind is torch.Generator else kind.__qualname__
            return [name, self._tree(RANDOM[base][0](value), depth + 1), *device]
        if kind is itertools.count:
            return ["count", *(self._tree(each, depth) for each in value.__reduce__()[1])]
        self.opaque = True
        return self._unknown(value, depth)

    def _container(self, value: Any, depth: int) -> list[Any] | None:
        kind, name = type(value), type(value).__name__
        if isinstance(value, dict):
            pairs = [[self._tree(key, depth + 1), self._tree(each, depth + 1)] for key, each in list(value.items())]
            if kind in (dict, collections.OrderedDict, collections.Counter):
                return [name, pairs]
            factory = getattr(value, "default_factory", None)
            if kind is collections.defaultdict and (factory is None or FACTORIES.get(factory.__name__) is factory):
                return [name, pairs, factory and factory.__name__]
        elif isinstance(value, list | tuple | set | frozenset | collections.deque):
            items = [self._tree(each, depth + 1) for each in list(value)]
            if isinstance(value, set | frozenset):  # their order is that of this process
                items.sort(key=json.dumps)
            if kind in (list, tuple, set, frozenset):
                return [name, items]
            if kind is collections.deque and isinstance(value, collections.deque):
                return [name, items, value.maxlen]
            pairs = items
        else:
            return None
        self.opaque = True  # of a class of its own
        return [f"{kind.__module__}.{kind.__qualname__}", pairs]

    def _array(self, value: Any) -> list[Any]:
        if isinstance(value, torch.Tensor):
            plain = type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided
            if not plain or value.is_quantized or value.is_meta:
                self.opaque = True
                return [str(type(value)), list(value.shape)]
            self.opaque |= value.is_complex()  # safetensors has not all of them
            tensor = value.detach().resolve_conj()
            return ["torch", self._kept(tensor), str(value.device), value.requires_grad]
        array = np.asarray(value)
        if array.dtype.hasobject or array.dtype.fields:
            self.opaque = True
            return [array.dtype.str, repr(array.tolist())]
        raw = torch.frombuffer(bytearray(array.tobytes()), dtype=torch.uint8) if array.nbytes else torch.empty(0)
        kind = "scalar" if isinstance(value, np.generic) else "numpy"
        return [kind, self._kept(raw), array.dtype.str, list(array.shape)]

    def _kept(self, tensor: torch.Tensor) -> str:
        found = hashlib.sha256(f"{tensor.dtype}{list(tensor.shape)}".encode())
        flat = tensor.contiguous().reshape(-1).view(torch.uint8)
        if flat.numel() > LARGE:
            whole = flat[: flat.numel() // 8 * 8].view(torch.int64)
            sums = torch.stack([piece.sum() for piece in whole.split(2**17)])
            found.update(sums.cpu().numpy().tobytes())
            flat = flat[flat.numel() // 8 * 8 :]
        found.update(flat.cpu().numpy().tobytes())
        self.arrays[found.hexdigest()] = tensor
        return found.hexdigest()

    def _unknown(self, value: Any, depth: int) -> list[Any]:
        """Returns the comparable part of an object that cannot be carried."""
        kind = type(value)
        name = f"{kind.__module__}.{kind.__qualname__}"
        top = kind.__module__.partition(".")[0]
        if isinstance(value, type | types.ModuleType) or inspect.isroutine(value):
            return [name, _label(value)]
        if id(value) in self._visited:
            return [name]
        self.inside[id(value)] = value  # before its parts: it may hold itself
        if inspect.isgenerator(value):
            frame = value.gi_frame
            return [name, frame and [frame.f_lasti, self._tree(frame.f_locals, depth + 1)]]
        if isinstance(value, io.IOBase):
            try:
                return [name, value.tell() if value.readable() else None]
            except (OSError, ValueError):
                return [name, uuid.uuid4().hex if not value.closed else None]
        if top in LIBRARIES or kind.__module__ in SILENT or depth > DEEPEST:
            return [name]
        if not callable(getattr(value, "__next__", None)) and hasattr(value, "__dict__"):
            return [name, {str(key): self._tree(each, depth + 1) for key, each in list(vars(value).items())}]
        try:
            reduced = value.__reduce_ex__(2)
        except Exception:
            # An iterator's position is unknown: it counts as changed each time.
            return [name, uuid.uuid4().hex if hasattr(value, "__next__") else ""]
        return [name, reduced if isinstance(reduced, str) else [self._tree(each, depth + 1) for each in reduced[1:3]]]


def _decoded(tree: Any, arrays: Mapping[str, torch.Tensor]) -> Any:
    if not isinstance(tree, list):
        return tree
    kind, *rest = tree
    many = [_decoded(each, arrays) for each in rest[0]] if kind in SEQUENCES else []
    pairs = [(_decoded(key, arrays), _decoded(each, arrays)) for key, each in rest[0]] if kind in MAPPINGS else []
    made: dict[str, Callable[[], Any]] = {
        "float": lambda: float(rest[0]),
        "complex": lambda: complex(*rest),
        "bytes": lambda: base64.b64decode(rest[0]),
        "bytearray": lambda: bytearray(base64.b64decode(rest[0])),
        "list": lambda: many,
        "tuple": lambda: tuple(many),
        "set": lambda: set(many),
        "frozenset": lambda: frozenset(many),
        "deque": lambda: collections.deque(many, rest[1]),
        "dict": lambda: dict(pairs),
        "OrderedDict": lambda: collections.OrderedDict(pairs),
        "Counter": lambda: collections.Counter(dict(pairs)),
        "defaultdict": lambda: collections.defaultdict(FACTORIES.get(rest[1]), pairs),
        "count": lambda: itertools.count(*(_decoded(each, arrays) for each in rest)),
        "torch": lambda: arrays[rest[0]].to(rest[1]).requires_grad_(rest[2]),
        "numpy": lambda: _as_numpy(arrays[rest[0]], rest[1], rest[2]),
        "scalar": lambda: _as_numpy(arrays[rest[0]], rest[1], rest[2])[()],
    }
    if kind in made:
        return made[kind]()
    state = _decoded(rest[0], arrays)
    generator: Any = {
        "Random": lambda: random.Random(),
        "RandomState": lambda: np.random.RandomState(),
        "torch.Generator": lambda: torch.Generator(rest[1]),
        "Generator": lambda: np.random.Generator(BIT_GENERATORS[state["bit_generator"]]()),
    }[kind]()
    RANDOM[type(generator)][1](generator, state)
    return generator


def _as_numpy(raw: torch.Tensor, dtype: str, shape: list[int]) -> Any:
    return np.frombuffer(raw.numpy().tobytes(), dtype=np.dtype(dtype)).reshape(shape).copy()


def _put_in_place(now: Any, value: Any) -> bool:
    """Gives an object the content of another of its kind, where that is possible."""
    if type(now) is not type(value):
        return False
    if isinstance(now, list | bytearray):
        now[:] = value
    elif isinstance(now, dict | set):
        now.clear()
        now.update(value)
    elif isinstance(now, collections.deque) and now.maxlen == value.maxlen:
        now.clear()
        now.extend(value)
    elif isinstance(now, np.ndarray) and now.flags.writeable and (now.dtype, now.shape) == (value.dtype, value.shape):
        now[...] = value
    elif isinstance(now, torch.Tensor) and (now.dtype, now.shape) == (value.dtype, value.shape):
        with torch.no_grad():
            now.copy_(value)
    elif type(now) in RANDOM and type(getattr(now, "bit_generator", None)) is type(
        getattr(value, "bit_generator", None)
    ):
        get, put = RANDOM[type(now)]
        put(now, get(value))
    else:
        return False
    return True


def _foreign(trainer: ChunkTrainer, roots: set[int], stored: set[str]) -> dict[int, object]:
    """Returns by identity a trainer's contents except hooks: their state belongs to other parts."""
    held = [value for name, value in vars(trainer).items() if name not in stored]
    held += [trainer, *vars(trainer.state).values(), *vars(trainer.callback_handler).values()]
    for model in [each for each in held if isinstance(each, torch.nn.Module)]:
        held += [*model.modules(), *model.parameters(), *model.buffers()]
    # Python has one object for equal constants, which may be the user's too.
    return {id(each): each for each in held if id(each) not in roots and not isinstance(each, (*CONSTANT, tuple, type))}


def _parts(value: Any) -> list[Any]:
    values = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
    return [each for each in values if not isinstance(each, (*CONSTANT, torch.nn.Module))]


@functools.cache
def _stored(kind: type) -> frozenset[str]:
    """Returns the names of attributes that the code of a class sets."""
    functions = [each for each in vars(kind).values() if isinstance(each, types.FunctionType)]
    lines = [line for function in functions for line in dis.get_instructions(function)]
    return frozenset(str(line.argval) for line in lines if line.opname == "STORE_ATTR")


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from _names_in(each)


def _has_state_dict(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def _top(value: Any) -> str:
    while isinstance(value, functools.partial | SeededCollator):
        value = value.func if isinstance(value, functools.partial) else value.collator
    module = getattr(value, "__module__", None) or type(value).__module__
    return str(module).partition(".")[0]


def _label(value: Any) -> str:
    """Returns the file and name of a function or class; of an object, those of its class."""
    if isinstance(value, functools.partial):
        return _label(value.func)
    if isinstance(value, types.ModuleType):
        return value.__name__
    named = value if hasattr(value, "__qualname__") else type(value)
    module = str(named.__module__)
    scope = getattr(named, "__globals__", None) or vars(sys.modules.get(module, object))
    return f"{_file(scope) if '__name__' in scope else module}:{named.__qualname__}"


def _file(scope: Mapping[str, Any]) -> str:
    return os.path.basename(scope.get("__file__") or "") or str(scope.get("__name__"))
