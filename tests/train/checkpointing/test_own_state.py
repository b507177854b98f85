"""State of the user's own code: every kind of place, for every kind of hook, is carried or named."""

# ruff: noqa: E501, SIM115 - code of users, a line each; files stay open as theirs do

from __future__ import annotations

import array
import collections
import csv
import hashlib
import importlib.util
import io
import itertools
import json
import logging
import os
import random
import re
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from baton import errors
from baton.errors import ExactnessError
from baton.models import hooks
from baton.recipe.run import Hooks
from baton.runs.documents import OwnState
from baton.train import state, user_state
from baton.train.user_state import OwnStates

IMPORTS = "import collections, itertools, random, types\nimport numpy as np\nimport torch\n"
CARRIED = {
    "module counter": ("own.py:n", "n = 0\ndef touch():\n    global n\n    n += 1\n    return n\n"),
    "module counter made late": (
        "own.py:n",
        "def touch():\n    global n\n    n = globals().get('n', 0) + 1\n    return n\n",
    ),
    "dictionary": ("own.py:seen", "seen = {}\ndef touch():\n    seen[len(seen), 'x'] = 0.5\n    return len(seen)\n"),
    "list": ("own.py:seen", "seen = []\ndef touch():\n    seen.append((1, None, -0.0))\n    return len(seen)\n"),
    "set": ("own.py:seen", "seen = set()\ndef touch():\n    seen.add(f'{len(seen)}')\n    return len(seen)\n"),
    "nested": ("own.py:a", "a = {'b': [0, {'c': 0}]}\ndef touch():\n    a['b'][1]['c'] += 1\n    return a['b'][1]['c']\n"),
    "deque": (
        "own.py:last",
        "last = collections.deque(maxlen=3)\ndef touch():\n    last.append(sum(last) + 1)\n    return sum(last)\n",
    ),
    "defaultdict": (
        "own.py:by",
        "by = collections.defaultdict(list)\ndef touch():\n    by['a'].append(1)\n    return len(by['a'] + by['b'])\n",
    ),
    "Counter": ("own.py:by", "by = collections.Counter()\ndef touch():\n    by['a'] += 1\n    return by['a']\n"),
    "bytes and numbers": (
        "own.py:kept",
        "kept = [b'', 1j, 10**30]\ndef touch():\n    kept[:] = [kept[0] + b'a', kept[1] * 2, kept[2] + 1]\n"
        "    return len(kept[0]) + kept[1].imag + kept[2] % 97\n",
    ),
    "not finite": (
        "own.py:kept",
        "kept = [float('inf')]\ndef touch():\n    kept.append(kept[-1] * (-1) ** len(kept) if len(kept) < 4 else float('nan'))\n"
        "    return repr(kept)\n",
    ),
    "instance counter": (
        "own.py:tracker.n",
        "class Tracker:\n    def __init__(self):\n        self.n = 0\n    def __call__(self):\n        self.n += 1\n"
        "        return self.n\ntracker = Tracker()\ndef touch():\n    return tracker()\n",
    ),
    "instance with slots, in a list": (
        "own.py:trackers[0].n",
        "class Tracker:\n    __slots__ = ('n',)\n    def __init__(self):\n        self.n = 0\n"
        "trackers = [Tracker()]\ndef touch():\n    trackers[0].n += 1\n    return trackers[0].n\n",
    ),
    "attribute made late": (
        "own.py:kept.n",
        "class Kept:\n    pass\nkept = Kept()\ndef touch():\n    kept.n = getattr(kept, 'n', 0) + 1\n    return kept.n\n",
    ),
    "class attribute": (
        "own.py:Kept.n",
        "class Kept:\n    n = 0\n    @classmethod\n    def more(cls):\n        cls.n += 1\n        return cls.n\n"
        "def touch():\n    return Kept.more()\n",
    ),
    "closure": (
        "own.py:make.<locals>.touch.n",
        "def make():\n    n = 0\n    def touch():\n        nonlocal n\n        n += 1\n        return n\n"
        "    return touch\ntouch = make()\n",
    ),
    "function attribute": (
        "own.py:touch.n",
        "def touch():\n    touch.n = getattr(touch, 'n', 0) + 1\n    return touch.n\n",
    ),
    "default of an argument": (
        "own.py:touch(seen)",
        "def touch(seen=[]):\n    seen.append(1)\n    return len(seen)\n",
    ),
    "helper's global": (
        "own.py:n",
        "n = 0\ndef more():\n    global n\n    n += 1\n    return n\ndef touch():\n    return [more() for _ in 'a'][0]\n",
    ),
    "two names of one list": (
        "own.py:seen",
        "seen = []\nclass Kept:\n    seen = seen\ndef touch():\n    seen.append(1)\n    return len(Kept.seen)\n",
    ),
    "numpy array": ("own.py:a", "a = np.zeros(3, np.float16)\ndef touch():\n    a[1] += 1\n    return float(a.sum())\n"),
    "numpy scalar": ("own.py:n", "n = np.float32(0)\ndef touch():\n    global n\n    n = n + np.float32(0.1)\n    return float(n)\n"),
    "empty array that grows": (
        "own.py:a",
        "a = np.empty((0, 2))\ndef touch():\n    global a\n    a = np.concatenate([a, np.ones((1, 2))])\n"
        "    return float(a.sum())\n",
    ),
    "torch tensor": (
        "own.py:a",
        "a = torch.zeros(2, dtype=torch.bfloat16)\ndef touch():\n    a.add_(1)\n    return float(a.sum())\n",
    ),
    "tensor whose version does not move": (
        "own.py:a",
        "a = torch.zeros(2)\ndef touch():\n    a.data += 1\n    return float(a.sum())\n",
    ),
    "random.Random": ("own.py:rng", "rng = random.Random(1)\ndef touch():\n    return rng.random()\n"),
    "numpy generator": ("own.py:rng", "rng = np.random.default_rng(1)\ndef touch():\n    return float(rng.random())\n"),
    "numpy RandomState": ("own.py:rng", "rng = np.random.RandomState(1)\ndef touch():\n    return float(rng.rand())\n"),
    "torch generator": (
        "own.py:rng",
        "rng = torch.Generator().manual_seed(1)\ndef touch():\n    return float(torch.rand((), generator=rng))\n",
    ),
    "itertools.count": ("own.py:n", "n = itertools.count(3, 2)\ndef touch():\n    return next(n)\n"),
    "object with state_dict": (
        "own.py:head.state_dict()",
        "head = torch.nn.Linear(1, 1)\ntorch.nn.init.zeros_(head.weight)\ntorch.nn.init.zeros_(head.bias)\ndef touch():\n"
        "    with torch.no_grad():\n        head.weight += 1\n    return float(head.weight)\n",
    ),
}  # fmt: skip
"""Kind of state → the place that is named, and code whose `touch` changes it and tells where it is."""
MORE = "it holds more than numbers, texts, lists, dictionaries and arrays"
LOST = {
    "generator": ("own.py:it", "it = (n for n in range(99))\ndef touch():\n    return next(it)\n"),
    "random numbers of a class of its own": (
        "own.py:rng",
        "class Rng(random.Random):\n    pass\nrng = Rng(1)\ndef touch():\n    return rng.random()\n",
    ),
    "numpy's random numbers of a class of its own": (
        "own.py:rng",
        "class Rng(np.random.RandomState):\n    pass\nrng = Rng(1)\ndef touch():\n    return float(rng.rand())\n",
    ),
    "torch's random numbers of a class of its own": (
        "own.py:rng",
        "class Rng(torch.Generator):\n    pass\nrng = Rng()\ndef touch():\n    return float(torch.rand((), generator=rng))\n",
    ),
    "complex tensor": (
        "own.py:a",
        "a = torch.zeros(2, dtype=torch.complex64)\ndef touch():\n    a.add_(1j)\n    return float(a.imag.sum())\n",
    ),
    "array of objects": (
        "own.py:a",
        "a = np.array([None, 0])\ndef touch():\n    a[1] += 1\n    return a[1]\n",
    ),
    "deque of a class of its own": (
        "own.py:last",
        "class Last(collections.deque):\n    pass\nlast = Last()\ndef touch():\n    last.append(1)\n    return len(last)\n",
    ),
    "iterator": ("own.py:it", "it = iter(range(99))\ndef touch():\n    return next(it)\n"),
    "iterator that nobody can look into": (
        "own.py:it",
        "it = map(int, (str(n) for n in range(99)))\ndef touch():\n    return next(it)\n",
    ),
    "file that is read": ("own.py:file", "file = open(__file__)\ndef touch():\n    return file.read(1)\n"),
    "objects that it makes": (
        "own.py:made",
        "class Row:\n    pass\nmade = []\ndef touch():\n    made.append(Row())\n    return len(made)\n",
    ),
    "object made late": (
        "own.py:kept",
        "class Kept:\n    n = 0\nkept = None\ndef touch():\n    global kept\n    kept = kept or Kept()\n"
        "    kept.n += 1\n    return kept.n\n",
    ),
    "dictionary of a class of its own": (
        "own.py:seen",
        "class Seen(dict):\n    pass\nseen = Seen()\ndef touch():\n    seen[len(seen)] = 1\n    return len(seen)\n",
    ),
    "list that two share later": (
        "own.py:kept.seen",
        "class Kept:\n    seen = None\nkept = Kept()\nseen = []\ndef touch():\n    kept.seen = seen\n    seen.append(1)\n"
        "    return len(kept.seen)\n",
    ),
    "function that takes the place of another": (
        "own.py:now",
        "def a():\n    return 1\ndef b():\n    return 2\nnow = a\ndef touch():\n    global now\n    now = b if now is a else a\n"
        "    return now()\n",
    ),
    "list that is twice in another": (
        "own.py:seen",
        "inner = [0]\nseen = [inner, inner]\ndel inner\ndef touch():\n    seen[0].append(1)\n    return len(seen[1])\n",
    ),
    "list that two get later": (
        "own.py:a",
        "a = b = None\ndef touch():\n    global a, b\n    a = b = [1]\n    return len(a)\n",
    ),
    "a global that goes": (
        "own.py:first",
        "first = True\ndef touch():\n    return 1 if globals().pop('first', False) else 0\n",
    ),
    "a simple object of a library": (
        "own.py:kept",
        "kept = types.SimpleNamespace(n=0)\ndef touch():\n    kept.n += 1\n    return kept.n\n",
    ),
}  # fmt: skip
"""Kind of state that is not carried → the place that is named, and code."""
REASONS = {
    "objects that it makes": MORE,
    "object made late": MORE,
    "list that two share later": "it shares an object with `own.py:seen`",
    "list that two get later": "it shares an object with `own.py:b`",
    "a global that goes": "it was removed",
}
"""Kind of state that is not carried → the reason, where it is not its content."""
STILL = {
    "constants": "LIMIT = 3\nTABLE = {'a': [1, 2]}\ndef touch():\n    return LIMIT + TABLE['a'][0]\n",
    "a logger and a lock": (
        "import logging, threading\nlog = logging.getLogger('own')\nlock = threading.Lock()\ndef touch():\n"
        "    with lock:\n        log.debug('x')\n    return 0\n"
    ),
    "a file that is written": (
        "import os\nfile = open(os.devnull, 'w')\ndef touch():\n    file.write('x')\n    return 0\n"
    ),
    "random numbers of the system": "rng = random.SystemRandom()\ndef touch():\n    return rng.random() * 0\n",
    "a class that says it has none": (
        "class Kept:\n    stateless = True\n    def __init__(self):\n        self.n = 0\nkept = Kept()\ndef touch():\n"
        "    kept.n += 1\n    return 0\n"
    ),
}
HOOKS: dict[str, str] = {
    "loss": "def hook(outputs, labels, num_items_in_batch=None):\n    return touch()\n",
    "reward": "def hook(completions, **_):\n    return touch()\n",
    "callback": (
        "from transformers import TrainerCallback\nclass hook(TrainerCallback):\n"
        "    def on_step_end(self, *_, **__):\n        return touch()\n"
    ),
    "metric": "def hook(prediction):\n    return touch()\n",
    "compute_loss of a trainer": (
        "from transformers import Trainer\nclass hook(Trainer):\n    def compute_loss(self, *_, **__):\n"
        "        return touch()\n"
    ),
}


class Process:
    """A process that has just imported the code: its module, and a trainer that calls it."""

    def __init__(self, folder: Path, source: str, hook: str) -> None:
        path = folder / "own.py"
        path.write_text(IMPORTS + source + HOOKS.get(hook, hook))
        spec = importlib.util.spec_from_file_location("own", path)
        assert spec
        assert spec.loader
        self.module = importlib.util.module_from_spec(spec)
        sys.modules["own"] = self.module
        spec.loader.exec_module(self.module)
        made, arguments = self.module.hook, TrainingArguments(str(folder), report_to="none")
        kind = made if isinstance(made, type) and issubclass(made, Trainer) else Trainer
        self.trainer: Any = kind(torch.nn.Sequential(torch.nn.BatchNorm1d(1)), arguments, train_dataset=[{}])
        self.trainer.compute_loss_func = made if hook == "loss" else None
        self.trainer.compute_metrics = (
            hooks.metrics(Hooks(metrics=["own:hook"])) if hook == "metric" else None  # type: ignore[list-item]
        )
        if hook == "reward":
            self.trainer.reward_funcs = [made]
        if isinstance(made, type) and issubclass(made, TrainerCallback):
            self.trainer.add_callback(made())
        calls: dict[str, Callable[[], Any]] = {
            "loss": lambda: self.trainer.compute_loss_func(None, None),
            "reward": lambda: self.trainer.reward_funcs[0]([]),
            "metric": lambda: self.module.hook(None),
            "compute_loss of a trainer": lambda: self.trainer.compute_loss(None, None),
        }
        self.call = calls.get(hook, lambda: self.trainer.callback_handler.callbacks[-1].on_step_end())
        self.states = OwnStates(self.trainer)


@pytest.fixture(autouse=True)
def _module() -> Iterator[None]:
    yield
    sys.modules.pop("own", None)


def _saved(process: Process, folder: Path) -> OwnState:
    document, arrays, own = process.states.capture()
    user_state.save(str(folder), 0, document, arrays)
    return own


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("kind", CARRIED)
def test_a_chunk_goes_on_where_the_state_was(kind: str, hook: str, tmp_path: Path) -> None:
    name, source = CARRIED[kind]
    whole = Process(tmp_path, source, hook)
    whole.states.begin(None, 0)
    expected = [whole.call() for _ in range(5)]

    first = Process(tmp_path, source, hook)
    first.states.begin(None, 0)
    found = [first.call() for _ in range(2)]
    own = _saved(first, tmp_path)
    assert not own.lost
    assert name in own.carried

    rest = [Process(tmp_path, source, hook) for _ in range(2)]
    rest[0].states.begin(str(tmp_path), 0)
    assert rest[0].states.restore() == own.carried
    found += [rest[0].call() for _ in range(3)]
    assert found == expected
    # What is carried at the end does not depend on where chunks ended.
    assert _saved(rest[0], tmp_path) == _saved(whole, tmp_path)
    # Without the restore it begins again.
    rest[1].states.begin(str(tmp_path), 0)
    assert [rest[1].call() for _ in range(3)] != expected[2:]


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("kind", LOST)
def test_a_state_that_cannot_be_carried_is_named(kind: str, hook: str, tmp_path: Path) -> None:
    name, source = LOST[kind]
    process = Process(tmp_path, source, hook)
    process.states.begin(None, 0)
    process.call()
    own = process.states.capture()[2]
    assert own.lost[name] == REASONS.get(kind, MORE)
    assert name not in own.carried


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("kind", STILL)
def test_code_without_a_state_leaves_a_checkpoint_as_it_was(kind: str, hook: str, tmp_path: Path) -> None:
    process = Process(tmp_path, STILL[kind], hook)
    process.states.begin(None, 0)
    process.call()
    (tmp_path / "checkpoint").mkdir()
    assert _saved(process, tmp_path / "checkpoint") == OwnState()
    assert not list((tmp_path / "checkpoint").iterdir())


ONES_OWN = """from transformers import TrainerCallback
class hook(TrainerCallback):
    def __init__(self):
        self.n = 0
    def on_train_begin(self, *_, **__):
        self.file, self.begun = iter(range(9)), 0
    def on_step_end(self, *_, **__):
        self.n += 1
        return self.n
"""


def test_an_object_that_each_chunk_makes_as_it_begins_is_not_missed(tmp_path: Path) -> None:
    process = Process(tmp_path, "", ONES_OWN)
    process.trainer.callback_handler.callbacks[-1].on_train_begin()
    process.states.begin(None, 0)
    process.call()
    own = process.states.capture()[2]
    assert (own.carried.keys(), own.lost) == ({"own.py:hook.n", "own.py:hook.begun"}, {})
    next(process.trainer.callback_handler.callbacks[-1].file)
    assert own.lost != process.states.capture()[2].lost


def test_the_state_of_what_is_called_ahead_of_a_step_is_named(tmp_path: Path) -> None:
    process = Process(tmp_path, "n = 0\ndef touch():\n    global n\n    n += 1\n    return n\n", "loss")
    process.trainer.data_collator = hooks.SeededCollator(process.module.touch, 1)
    states = OwnStates(process.trainer)
    states.begin(None, 0)
    process.call()
    assert states.capture()[2].lost.keys() == {"own.py:n"}


OWN_TRAINER = """from transformers import Trainer
class hook(Trainer):
    def compute_loss(self, *_, **__):
        self.calls = getattr(self, 'calls', 0) + self.pace
        self.kept = [*getattr(self, 'kept', ()), 1]
        self.last = 'compute_loss'
        self.state.global_step += 1
"""


@pytest.mark.parametrize("is_hook", [False, True], ids=["overridden", "also as a hook"])
def test_attributes_of_ones_own_trainer_are_carried_and_those_of_transformers_are_not(
    is_hook: bool, tmp_path: Path
) -> None:
    process = Process(tmp_path, "", OWN_TRAINER)
    process.trainer.calls, process.trainer.last, process.trainer.pace, process.trainer.kept = 0, "", 1, []
    process.trainer.compute_loss_func = process.trainer.compute_loss if is_hook else None
    states = OwnStates(process.trainer)
    states.begin(None, 0)
    process.trainer.compute_loss()
    process.trainer._globalstep_last_logged = 1
    process.trainer.pace = 2  # set by no code of the class
    own = states.capture()[2]
    assert (own.carried.keys(), own.lost) == ({"own.py:hook.calls", "own.py:hook.last", "own.py:hook.kept"}, {})


TRAINERS = {
    name: f"TRAINER.{name}"
    for name in (
        *("model", "model[0]", "model[0].weight", "model[0].running_mean", "args", "state", "state.log_history"),
        *("control", "callback_handler", "optimizer", "lr_scheduler", "accelerator", "train_dataset"),
    )
} | {"itself": "TRAINER"}


@pytest.mark.parametrize("held", TRAINERS.values(), ids=TRAINERS)
def test_what_belongs_to_the_trainer_is_no_state_of_a_callback(held: str, tmp_path: Path) -> None:
    hook = (
        "from transformers import TrainerCallback\nclass hook(TrainerCallback):\n"
        f"    def on_step_end(self, *_, **__):\n        self.held = {held}\n"
    )
    process = Process(tmp_path, "TRAINER = None\n", hook)
    process.module.TRAINER = process.trainer
    process.trainer.create_optimizer_and_scheduler(1)
    states = OwnStates(process.trainer)
    states.begin(None, 0)
    process.call()
    assert states.capture()[2] == OwnState()
    process.call = None  # a value of the callback's own is a state of it
    process.trainer.callback_handler.callbacks[-1].held = [0.5]
    assert states.capture()[2].carried.keys() == {"own.py:hook.held"}


def test_a_place_whose_object_is_gone_is_an_error(tmp_path: Path) -> None:
    name, source = CARRIED["instance counter"]
    first = Process(tmp_path, source, "loss")
    first.states.begin(None, 0)
    first.call()
    assert name in _saved(first, tmp_path).carried
    other = Process(tmp_path, "def touch():\n    return 1\n", "loss")
    other.states.begin(str(tmp_path), 0)
    with pytest.raises(ExactnessError, match=r"state of `own.py:tracker.n` cannot be restored"):
        other.states.restore()
    assert other.states.restore(partly=True) == {}


def _encoded(value: Any) -> user_state.Encoded:
    return user_state.Encoded(value, {}, {})


def _plain_generator(name: str) -> np.random.Generator:
    generator = np.random.Generator(getattr(np.random, name)(3))
    generator.integers(9, size=3, dtype=np.uint32)
    return generator


VALUES: dict[str, tuple[Callable[[], Any], str]] = {
    "nothing": (lambda: None, "74234e98"),
    "truth": (lambda: True, "b5bea41b"),
    "number": (lambda: -(10**30), "aa4a487e"),
    "fraction": (lambda: 0.1, "14be4b45"),
    "infinite": (lambda: float("-inf"), "97a5b3a3"),
    "no number": (lambda: float("nan"), "f3d5c8df"),
    "complex": (lambda: complex(1.5, -2), "8009accf"),
    "text": (lambda: "\u00e4\n", "ce21c9f1"),
    "bytes": (lambda: b"\x00\xff", "705fe299"),
    "bytearray": (lambda: bytearray(b"\x00\xff"), "8b583d07"),
    "list": (lambda: [1, [2, []]], "f6a10c85"),
    "tuple": (lambda: (1, (2, ())), "4b95efd0"),
    "set": (lambda: {"b", 3, "a", (1,)}, "2c7ac899"),
    "frozenset": (lambda: frozenset({"b", "a", 3.5}), "e53d3bfa"),
    "deque": (lambda: collections.deque([2, 1]), "9cb085df"),
    "deque with an end": (lambda: collections.deque([2, 1], maxlen=2), "3f663402"),
    "dict": (lambda: {"b": 1, 2: {}, (None, False): [0.5]}, "0fdd0564"),
    "OrderedDict": (lambda: collections.OrderedDict([("b", 1), ("a", 2)]), "a60f33e0"),
    "Counter": (lambda: collections.Counter("abba"), "0c9af7af"),
    "defaultdict of none": (lambda: collections.defaultdict(None, {1: 2}), "b0884907"),
    **{
        f"defaultdict of {kind.__name__}": (lambda kind=kind: collections.defaultdict(kind, {1: kind()}), digest)
        for kind, digest in (
            *((int, "07e50173"), (float, "5ae41e71"), (str, "bc08bf07")),
            *((list, "3600f375"), (dict, "7ebf7245"), (set, "e985792c")),
        )
    },
    "count": (lambda: itertools.count(3), "cde379e9"),
    "count in steps": (lambda: itertools.count(0.5, 2), "d683fd67"),
    "array": (lambda: np.arange(6, dtype=np.int16).reshape(2, 3), "f914ef1e"),
    "array in another order": (lambda: np.asfortranarray(np.arange(6, dtype=np.float64).reshape(2, 3)), "6e582a56"),
    "array of texts": (lambda: np.array(["a", "bc"]), "0658526e"),
    "array of complex numbers": (lambda: np.array([1j, 2]), "802c0136"),
    "array of one": (lambda: np.array(1.5), "61c36043"),
    "array of none": (lambda: np.empty((0, 2), np.float32), "f2764d20"),
    "numpy's number": (lambda: np.float16(1.5), "cddd4aa0"),
    "numpy's truth": (lambda: np.bool_(True), "5c21c939"),
    "tensor": (lambda: torch.arange(6.0).reshape(2, 3), "bf3b6c45"),
    "tensor in another order": (lambda: torch.arange(6).reshape(2, 3).T, "673cc030"),
    "tensor in few bits": (lambda: torch.tensor([1.5, -2], dtype=torch.bfloat16), "2a9e6b0b"),
    "tensor of truths": (lambda: torch.tensor([True, False]), "3d69e994"),
    "tensor of one": (lambda: torch.tensor(1.5), "5f8b032c"),
    "tensor of none": (lambda: torch.empty(0, 2), "4644f751"),
    "tensor with a gradient": (lambda: torch.ones(2, requires_grad=True), "b9c76a01"),
    "random.Random": (lambda: random.Random(3), "06a04ec0"),
    "RandomState": (lambda: np.random.RandomState(3), "f92f1422"),
    **{
        f"Generator of {name}": (lambda name=name: _plain_generator(name), digest)
        for name, digest in (
            *(("PCG64", "3a1b86e0"), ("PCG64DXSM", "345772f0"), ("MT19937", "9006ae44")),
            *(("Philox", "b141fa80"), ("SFC64", "01b65e64")),
        )
    },
    "torch.Generator": (lambda: torch.Generator().manual_seed(3), "ee0d338a"),
}
"""Kind of value → what makes it, and the beginning of its digest, by which every release knows it."""


@pytest.mark.parametrize("kind", VALUES)
def test_a_value_goes_through_json_and_its_digest_is_that_of_all_releases(kind: str) -> None:
    """A digest is kept in checkpoints: a chunk with a newer release compares its state with it."""
    make, digest = VALUES[kind]
    encoded = _encoded(make())
    assert encoded.digest[:8] == digest
    assert not encoded.opaque
    back = user_state._decoded(json.loads(json.dumps(encoded.tree)), encoded.arrays)
    assert type(back) is type(make())
    assert _encoded(back).digest == encoded.digest
    immutable = (type(None), bool, int, float, complex, str, bytes, tuple, frozenset, np.generic)
    assert (encoded.identity is None) == isinstance(make(), immutable)


READ_ONLY = np.zeros(2)
READ_ONLY.flags.writeable = False
PUT: dict[str, tuple[Any, Any, bool]] = {
    "list": ([1], [2, 3], True),
    "bytearray": (bytearray(b"a"), bytearray(b"bc"), True),
    "dict": ({1: 2, 3: 4}, {5: 6}, True),
    "defaultdict": (collections.defaultdict(list, {1: [2]}), collections.defaultdict(list), True),
    "set": ({1, 2}, {3}, True),
    "deque": (collections.deque([1], 3), collections.deque([2, 4], 3), True),
    "deque with another end": (collections.deque([1], 3), collections.deque([2], 4), False),
    "array": (np.zeros(2), np.ones(2), True),
    "array of another type": (np.zeros(2, np.float32), np.ones(2), False),
    "array of another shape": (np.zeros(3), np.ones(2), False),
    "array that cannot be written": (READ_ONLY, np.ones(2), False),
    "tensor": (torch.zeros(2), torch.ones(2), True),
    "tensor with a gradient": (torch.zeros(2, requires_grad=True), torch.ones(2, requires_grad=True), True),
    "tensor of another type": (torch.zeros(2), torch.ones(2, dtype=torch.float64), False),
    "tensor of another shape": (torch.zeros(3), torch.ones(2), False),
    "random.Random": (random.Random(1), random.Random(2), True),
    "RandomState": (np.random.RandomState(1), np.random.RandomState(2), True),
    "torch.Generator": (torch.Generator().manual_seed(1), torch.Generator().manual_seed(2), True),
    "Generator": (np.random.default_rng(1), np.random.default_rng(2), True),
    "Generator of another kind": (np.random.default_rng(1), np.random.Generator(np.random.MT19937(2)), False),
    "tuple": ((1,), (2,), False),
    "frozenset": (frozenset({1}), frozenset({2}), False),
    "number": (1, 2, False),
    "another kind": ([1], (1, 2), False),
    "nothing yet": (None, [1], False),
}
"""Kind → a value, the saved one, and whether the same object then has its content."""


@pytest.mark.parametrize("kind", PUT)
def test_a_value_is_put_back_in_place_where_that_is_possible(kind: str) -> None:
    now, saved, in_place = PUT[kind]
    before, expected = _encoded(now).digest, _encoded(saved).digest
    holder = {"key": now}
    user_state.StateSlot("own.py", "item", "key", holder).put(saved)
    assert _encoded(holder["key"]).digest == expected
    assert (holder["key"] is now) == in_place
    assert in_place or _encoded(now).digest == before


def test_each_kind_of_place_is_read_and_written() -> None:
    class Kind:
        value: Any = (1,)

    @dataclass(frozen=True)
    class Frozen:
        value: Any = (1,)

    head, frozen, cell = torch.nn.Linear(1, 1), Frozen(), types.CellType((1,))
    places = [("attribute", "value", Kind), ("attribute", "value", frozen), ("cell", "", cell), ("item", "value", {})]
    slots = [user_state.StateSlot("own.py", kind, key, holder) for kind, key, holder in places]
    with pytest.raises(KeyError):
        slots[-1].get()
    for slot in slots:
        slot.put((2,))
        assert slot.get() == (2,)
    assert (Kind.value, frozen.value, cell.cell_contents, slots[-1].holder) == ((2,), (2,), (2,), {"value": (2,)})
    state_dict = user_state.StateSlot("own.py", "state_dict", "", head)
    state_dict.put({"weight": torch.tensor([[2.0]]), "bias": torch.tensor([3.0])})
    assert [float(each) for each in state_dict.get().values()] == [2.0, 3.0]


def test_large_arrays_are_known_by_every_byte_of_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_state, "LARGE", 64)
    first = torch.arange(101, dtype=torch.uint8)
    digests = {_encoded(first).digest}
    for at in (0, 50, 95, 96, 100):
        other = first.clone()
        other[at] += 1
        digests.add(_encoded(other).digest)
    assert len(digests) == 6
    assert _encoded(first.clone()).digest in digests
    # Every release knows them by the same sums.
    several = torch.arange(2**18 + 3, dtype=torch.float64)
    at_most = first[:64]
    found = [_encoded(each).digest[:8] for each in (first, several, at_most)]
    assert found == ["7ef81b79", "b652923a", "eb057da6"]
    monkeypatch.undo()
    assert _encoded(at_most).digest[:8] == found[2], "as small as this, by its bytes"
    zeros = torch.zeros(2**26 + 1, dtype=torch.uint8)
    assert [_encoded(each).digest[:8] for each in (zeros[:-1], zeros)] == ["e58202f0", "c7db8057"]


PLACES: dict[str, tuple[str, str]] = {
    "a partial and its arguments": (
        "f(0) f(c)",
        "import functools\ndef f(a, b, c=None):\n    return a\ntouch = functools.partial(f, [0], 1, c=[1])\n",
    ),
    "defaults by position and by name": (
        "touch().c touch().d touch(b)",
        "def touch(a=1, b=[2], *, c=[3], d='x'):\n    return 0\n",
    ),
    "a method of an object": (
        "Kept.more OTHER touch.n",
        "class Kept:\n    more = 0\n    def __init__(self):\n        self.n = 0\n    def add(self):\n        return OTHER\nOTHER = 1\nkept = Kept()\ntouch = kept.add\n",
    ),
    "a decorated function": (
        "seen touch.f",
        "import functools\nseen = []\ndef wrap(f):\n    @functools.wraps(f)\n    def g():\n        return f()\n    return g\n@wrap\ndef touch():\n    return seen\n",
    ),
    "a function of a library around it": (
        "seen",
        "import functools\nseen = []\n@functools.lru_cache\ndef touch():\n    return seen\n",
    ),
    "a cached function": (
        "seen",
        "import functools\nseen = []\n@functools.cache\ndef touch():\n    return seen\n",
    ),
    "cached parts of a class": (
        "A B C D Kept",
        "import functools\nA = B = C = D = 1\nclass Kept:\n    @functools.cached_property\n    def a(self):\n        return A\n    def b(self, n):\n        return B\n    c = functools.partialmethod(b, 2)\n    @functools.cache\n    def d(self):\n        return D\n    @property\n    @functools.cache\n    def e(self):\n        return C\ndef touch():\n    return Kept()\n",
    ),
    "properties and methods of a class": (
        "A B Base.of_base C Kept Kept.n",
        "A = B = C = 1\nclass Base:\n    of_base = 1\nclass Kept(Base):\n    @property\n    def a(self):\n        return A\n    @classmethod\n    def b(cls):\n        return B\n    @staticmethod\n    def c():\n        return C\n    n = 0\ndef touch():\n    return Kept()\n",
    ),
    "slots": (
        "kept kept.a kept.b",
        "class Base:\n    __slots__ = ('a',)\nclass Kept(Base):\n    __slots__ = ('b', '__weakref__')\n    def __init__(self):\n        self.a = self.b = 0\nkept = Kept()\ndef touch():\n    return kept\n",
    ),
    "objects in containers": (
        "all all['a'][0].n all[2][0].n all[None][3].n",
        "class Kept:\n    def __init__(self):\n        self.n = 0\nall = {'a': [Kept()], 2: (Kept(),), None: {3: Kept()}}\ndef touch():\n    return all\n",
    ),
    "two of one name": (
        "first first[0].n first[1].n",
        "class Kept:\n    def __init__(self):\n        self.n = 0\n    def __call__(self):\n        return 0\nfirst, second = [Kept(), Kept()], None\ndef touch():\n    return [each() for each in first]\n",
    ),
    "names of code within code": (
        "k m n",
        "n = m = k = 0\nunused = 1\ndef touch():\n    def inner():\n        return [m for _ in (lambda: k)()]\n    return n\n",
    ),
    **{
        f"any name, by {name.partition('(')[0]}": ("hook n other", f"import sys\nn = 0\nother = 1\ndef touch():\n    return {name}\n")
        for name in ("globals()['n']", "vars(sys)", "eval('n')", "exec('n')", "sys.modules['own'].n")
    },
    "a list in itself": ("kept", "kept = []\nkept.append(kept)\ndef touch():\n    return kept\n"),
    "objects as deep as is searched": (
        "all all[0][0][0][0][0].n",
        "class Kept:\n    def __init__(self):\n        self.n = 0\nall = [[[[[Kept()]]]]]\ndef touch():\n    return all\n",
    ),
    "objects too deep": (
        "all",
        "class Kept:\n    def __init__(self):\n        self.n = 0\nall = [[[[[[Kept()]]]]]]\ndef touch():\n    return all\n",
    ),
    "a constant of another module": (
        "",
        "import math, os.path\ndef touch():\n    return math.pi + len(os.sep)\n",
    ),
    "a nested class": (
        "Kept Kept.Inner Kept.Inner.n",
        "class Kept:\n    class Inner:\n        n = 0\ndef touch():\n    return Kept.Inner.n\n",
    ),
    "a cell that is empty": (
        "",
        "def make():\n    def touch():\n        return late\n    return touch\n    late = 1\ntouch = make()\n",
    ),
    "attributes of a function": (
        "touch.n",
        "def touch():\n    return 0\ntouch.n = 1\n",
    ),
    "a metaclass's": (
        "Kept Kept._Kept__hidden Kept._own Kept.n",
        "import abc\nclass Kept(abc.ABC):\n    n = 0\n    __hidden = 1\n    _own = 2\ndef touch():\n    return Kept\n",
    ),
}  # fmt: skip
"""Kind of code → the places that a walk from `touch` finds, all of them, and the code."""


@pytest.mark.parametrize("kind", PLACES)
def test_a_walk_finds_every_place_that_code_refers_to(kind: str, tmp_path: Path) -> None:
    names, source = PLACES[kind]
    process = Process(tmp_path, source, "loss")
    found = user_state.Walk(process.trainer).slots
    assert found.keys() == {"own.py:touch", *(f"own.py:{name}" for name in names.split())}


@pytest.mark.parametrize(
    "name",
    [
        *("compute_loss_func", "compute_metrics", "data_collator", "preprocess_logits_for_metrics", "reward_funcs"),
        *("rollout_func", "formatting_func"),
    ],
)
def test_hooks_of_an_installed_package_have_places(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "own_packages", set())
    folder = tmp_path / "site-packages"
    folder.mkdir()
    process = Process(folder, "n = []\ndef touch():\n    return n\n", "reward")
    process.trainer.reward_funcs, process.trainer.other = None, process.module.touch
    assert user_state.Walk(process.trainer).slots == {}, "as an attribute it is no hook"
    setattr(process.trainer, name, [process.module.touch])
    assert user_state.Walk(process.trainer).slots.keys() == {"own.py:n"}
    setattr(process.trainer, name, torch.nn.functional.mse_loss)
    assert user_state.Walk(process.trainer).slots == {}


def test_two_objects_of_one_class_have_places_of_their_own(tmp_path: Path) -> None:
    processes = [Process(tmp_path, "", ONES_OWN) for _ in range(2)]
    for process in processes:
        process.trainer.add_callback(process.module.hook())
        process.first, process.second = process.trainer.callback_handler.callbacks[-2:]
        process.first.n, process.second.n = 3, 5
        process.states = OwnStates(process.trainer)
    processes[0].states.begin(None, 0)
    processes[0].first.on_step_end()
    processes[0].second.n = 7
    found = user_state.Walk(processes[0].trainer).slots
    owners = {name: slot.owner for name, slot in found.items()}
    assert owners == {"own.py:hook.n": "own.py:hook()", "own.py:hook.n'": "own.py:hook()'"}
    assert _saved(processes[0], tmp_path).carried.keys() == owners.keys()
    processes[1].states.begin(str(tmp_path), 0)
    processes[1].states.restore()
    assert (processes[1].first.n, processes[1].second.n) == (4, 7)


OWNERS = (
    "class Kept:\n    n = 0\n    def __init__(self):\n        self.m = 0\nkept = Kept()\ndef make():\n    c = 1\n    def inner(a=[]):\n"
    "        return c, kept\n    return inner\ninner = make()\ninner.x = 1\ndef touch(*, k=0):\n    return inner()\n"
)


def test_each_place_belongs_to_an_object_that_is_named(tmp_path: Path) -> None:
    """A checkpoint keeps the name, by which a chunk with a newer release finds the object."""
    found = user_state.Walk(Process(tmp_path, OWNERS, "loss").trainer).slots
    assert {name.removeprefix("own.py:"): slot.owner.removeprefix("own.py:") for name, slot in found.items()} == {
        **dict.fromkeys(("touch", "inner", "kept"), "own.py"),
        **{name: name for name in ("make.<locals>.inner.c", "make.<locals>.inner(a)")},
        "make.<locals>.inner.x": "make.<locals>.inner",
        "Kept.n": "Kept",
        "kept.m": "kept",
        "touch().k": "touch()",
    }


@pytest.mark.parametrize(("name", "is_found"), [("train_dataset", False), ("eval_dataset", False), ("own", True)])
def test_rows_are_no_state(name: str, is_found: bool, tmp_path: Path) -> None:
    source = "class Rows:\n    def __init__(self):\n        self.n = 0\ndef touch():\n    return 0\n"
    process = Process(tmp_path, source, "loss")
    setattr(process.trainer, name, process.module.Rows())
    assert ("own.py:Rows.n" in user_state.Walk(process.trainer).slots) == is_found


def test_modules_that_code_imports_as_it_runs_have_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("own_alone.py", "own_package/__init__.py", "own_package/inner.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("n = 0\nother = 0\n")
    (tmp_path / "own_package/hook.py").write_text(
        "def touch():\n    import own_alone\n    from . import inner\n    return own_alone.n + inner.n\n"
    )
    process = Process(tmp_path, "import own_package.hook\ntouch = own_package.hook.touch\n", "loss")
    assert user_state.Walk(process.trainer).slots.keys() == {"own.py:touch"}
    process.call()
    try:
        names = {"own.py:touch", "own_alone.py:n", "inner.py:n"}
        assert user_state.Walk(process.trainer).slots.keys() == names
    finally:
        for name in ("own_alone", "own_package", "own_package.inner", "own_package.hook"):
            del sys.modules[name]


class Kept:
    """A user's object."""

    n = 0


class Rows(list[int]):
    """A list of a class of its own."""


def _nested(levels: int) -> list[Any]:
    """Returns a list in a list, and so on, around a number."""
    return [_nested(levels - 1)] if levels else [0]


def _chain(number: int) -> Kept:
    """Returns an object that has another, and so on."""
    made = Kept()
    if number > 1:
        vars(made)["next"] = _chain(number - 1)
    return made


def _last(value: Any) -> Any:
    return _last(value.next) if hasattr(value, "next") else value


def _holds_itself() -> list[Any]:
    value: list[Any] = [0]
    value.append(value)
    return value


UNKNOWN: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], bool]] = {
    "object": (Kept, lambda it: vars(it).update(n=1), True),
    "list of objects": (lambda: [Kept()], lambda it: vars(it[0]).update(n=1), True),
    "list of a class of its own": (Rows, lambda it: it.append(1), True),
    "generator": (lambda: (n for n in range(9)), next, True),
    "generator that ends": (lambda: (n for n in [1]), list, True),
    "iterator": (lambda: iter([1, 2]), next, True),
    "iterator that ends": (lambda: iter({1: 2}.items()), list, True),
    "object with a position": (lambda: io.BytesIO(b"ab"), lambda it: it.read(1), True),
    "file": (lambda: open(__file__, encoding="utf-8"), lambda it: it.read(1), True),
    "file that is written": (lambda: os.fdopen(os.memfd_create("written"), "w"), lambda it: it.write("a"), False),
    "file that is closed": (lambda: open(__file__, encoding="utf-8"), lambda it: it.close(), True),
    "array of the library": (lambda: array.array("i", [1]), lambda it: it.append(2), True),
    "view of a dictionary": (lambda: types.MappingProxyType({}), lambda it: None, False),
    "object of a library": (lambda: torch.nn.ReLU(), lambda it: vars(it).update(inplace=True), False),
    "logger": (lambda: logging.Logger("a"), lambda it: it.setLevel(9), False),
    "event": (threading.Event, lambda it: it.set(), False),
    "lock": (threading.Lock, lambda it: it.acquire(), False),
    "weak dictionary": (weakref.WeakKeyDictionary, lambda it: it.update({Kept: 1}), False),
    "path and pattern": (lambda: [Path("a"), re.compile("a")], lambda it: (str(it[0]), it[1].match("a")), False),
    "another path": (lambda: [Path("a")], lambda it: it.insert(0, it.pop() / "b"), True),
    "chain of objects": (lambda: _chain(7), lambda it: vars(_last(it)).update(n=1), True),
    "chain of more objects": (lambda: _chain(8), lambda it: vars(_last(it)).update(n=1), False),
    "function": (lambda: _nested, lambda it: None, False),
    "class": (lambda: Kept, lambda it: None, False),
    "module": (lambda: os, lambda it: None, False),
    "another function": (lambda: [_nested], lambda it: it.__setitem__(0, _chain), True),
    "another class": (lambda: [Kept], lambda it: it.__setitem__(0, Rows), True),
    "another module": (lambda: [os], lambda it: it.__setitem__(0, sys), True),
    "list in itself": (_holds_itself, lambda it: it.insert(0, 1), True),
    "nested too deep to carry": (lambda: _nested(31), lambda it: None, False),
    "tensor without values": (lambda: torch.empty(2, device="meta"), lambda it: None, False),
    "tensor that is sparse": (lambda: torch.eye(2).to_sparse(), lambda it: None, False),
    "tensor that is quantized": (
        lambda: torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8),
        lambda it: None,
        False,
    ),
    "complex tensor": (lambda: torch.ones(2, dtype=torch.complex64).conj(), lambda it: it.add_(1), True),
    "array with fields": (lambda: np.zeros(2, "i4,f4"), lambda it: it["f0"].fill(1), True),
    "dictionary with a factory of its own": (lambda: collections.defaultdict(Kept), lambda it: it[1], True),
}
"""Kind of value that cannot be carried → what makes it, what changes it, and whether that can be seen."""


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("kind", UNKNOWN)
def test_a_change_of_what_cannot_be_carried_is_seen(kind: str) -> None:
    make, change, is_seen = UNKNOWN[kind]
    value = make()
    before = _encoded(value)
    assert before.opaque
    assert _encoded(value).digest == before.digest
    change(value)
    assert (_encoded(value).digest != before.digest) == is_seen


def test_an_object_of_the_trainers_in_a_list_is_known_by_its_class() -> None:
    model, other = torch.nn.ReLU(), torch.nn.Tanh()
    first, second = (user_state.Encoded([each], {id(each): each}, {}) for each in (model, other))
    assert first.opaque
    assert first.digest != second.digest
    assert first.digest != _encoded([None]).digest


def test_an_iterator_without_a_position_counts_as_changed_each_time() -> None:
    value = csv.reader(["a", "b"])
    assert _encoded(value).digest != _encoded(value).digest


def _within(levels: int, wrap: Callable[[Any], Any], value: Any = 0) -> Any:
    """Returns a value in so many containers."""
    for _ in range(levels):
        value = wrap(value)
    return value


DEEP: dict[str, Callable[[int], Any]] = {
    "lists": lambda levels: _within(levels, lambda it: [it]),
    "tuples": lambda levels: _within(levels, lambda it: (it,)),
    "values": lambda levels: _within(levels, lambda it: {"a": it}),
    "keys": lambda levels: {_within(levels - 1, lambda it: (it,)): 0},
    "deques": lambda levels: _within(levels, lambda it: collections.deque([it])),
}


@pytest.mark.parametrize("kind", DEEP)
def test_values_are_carried_as_deep_as_thirty_levels(kind: str) -> None:
    """Containers in the outermost one."""
    encoded = _encoded(DEEP[kind](31))
    assert not encoded.opaque
    assert user_state._decoded(json.loads(json.dumps(encoded.tree)), {}) == DEEP[kind](31)
    assert _encoded(DEEP[kind](32)).opaque
    assert _encoded(DEEP[kind](30)).digest != encoded.digest


def test_each_process_has_a_file_of_its_own(tmp_path: Path) -> None:
    source = "a = torch.zeros(2, 2).T\nn = 0\ndef touch():\n    global n\n    a[0, 1] += 1\n    n += 1\n    return n, float(a.sum())\n"
    for rank in (0, 1):
        process = Process(tmp_path, source, "loss")
        process.states.begin(None, rank)
        found = [process.call() for _ in range(rank + 1)][-1]
        assert found == (rank + 1, rank + 1.0)
        document, arrays, own = process.states.capture()
        user_state.save(str(tmp_path), rank, document, arrays)
        assert own.carried.keys() == {"own.py:a", "own.py:n"}
    names = {"baton_state_hooks.json", "baton_state_hooks_1.json"}
    assert {path.name for path in tmp_path.glob("*hooks*.json")} == names
    assert {path.name for path in tmp_path.glob("*.safetensors")} == {
        name.replace(".json", ".safetensors") for name in names
    }
    for rank in (1, 0):
        process = Process(tmp_path, source, "loss")
        process.states.begin(str(tmp_path), rank)
        process.states.restore()
        assert process.call() == (rank + 2, rank + 2.0)


def test_state_of_several_processes_is_joined() -> None:
    rows = [OwnState(carried={"a": "1", "b": "1"}), OwnState(carried={"a": "1", "b": "2"}, lost={"c": "why"})]
    rows[1].carried["of one"] = "3"
    rows[1].lost["before c"] = "too"
    found = user_state.merge_rank_states(rows)
    assert found.carried == {
        "a": "1",
        "b": state.combine_ranks(["1", "2"]),
        "of one": state.combine_ranks(["", "3"]),
    }
    assert list(found.lost.items()) == [("before c", "too"), ("c", "why")]
    del rows[1].carried["of one"], rows[1].lost["before c"]
    one = user_state.merge_rank_states(rows, each_writes=False)
    assert (one.carried, one.lost.keys()) == ({"a": "1"}, {"b", "c"})
    assert user_state.merge_rank_states([OwnState(), OwnState()]) == OwnState()
    assert user_state.digest({"b": "2", "a": "1"}) == hashlib.sha256(b"a=1;b=2;").hexdigest()
