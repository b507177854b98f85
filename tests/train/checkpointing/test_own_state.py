"""State of the user's own code: every kind of place, for every kind of hook, is carried or named."""

# ruff: noqa: E501 - code of users, a line each

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from baton.errors import ExactnessError
from baton.models import hooks
from baton.recipe.run import Hooks
from baton.runs.documents import OwnState
from baton.train import user_state
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
LOST = {
    "generator": ("own.py:it", "it = (n for n in range(99))\ndef touch():\n    return next(it)\n"),
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
STILL = {
    "constants": "LIMIT = 3\nTABLE = {'a': [1, 2]}\ndef touch():\n    return LIMIT + TABLE['a'][0]\n",
    "a logger and a lock": (
        "import logging, threading\nlog = logging.getLogger('own')\nlock = threading.Lock()\ndef touch():\n"
        "    with lock:\n        log.debug('x')\n    return 0\n"
    ),
    "a file that is written": (
        "import os\nfile = open(os.devnull, 'w')\ndef touch():\n    file.write('x')\n    return 0\n"
    ),
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
        self.trainer: Any = kind(torch.nn.Linear(1, 1), arguments, train_dataset=[{}])
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
    assert name in own.lost
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


def test_attributes_of_ones_own_trainer_are_carried_and_those_of_transformers_are_not(tmp_path: Path) -> None:
    hook = (
        "from transformers import Trainer\nclass hook(Trainer):\n    def compute_loss(self, *_, **__):\n"
        "        self.calls = getattr(self, 'calls', 0) + 1\n        self.state.global_step += 1\n"
    )
    process = Process(tmp_path, "", hook)
    process.trainer.calls = 0
    states = OwnStates(process.trainer)
    states.begin(None, 0)
    process.trainer.compute_loss()
    assert states.capture()[2].carried.keys() == {"own.py:hook.calls"}


def test_what_belongs_to_the_trainer_is_no_state_of_a_callback(tmp_path: Path) -> None:
    hook = (
        "from transformers import TrainerCallback\nclass hook(TrainerCallback):\n"
        "    def on_step_end(self, *_, **__):\n        self.model, self.history = TRAINER.model, TRAINER.state.log_history\n"
    )
    process = Process(tmp_path, "TRAINER = None\n", hook)
    process.module.TRAINER = process.trainer
    states = OwnStates(process.trainer)
    states.begin(None, 0)
    process.call()
    assert states.capture()[2] == OwnState()


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


def test_large_arrays_are_known_by_every_byte_of_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_state, "LARGE", 64)

    def digest(tensor: torch.Tensor) -> str:
        return user_state.Encoded(tensor, {}, {}).digest

    first = torch.arange(101, dtype=torch.uint8)
    digests = {digest(first)}
    for at in (0, 50, 100):
        other = first.clone()
        other[at] += 1
        digests.add(digest(other))
    assert len(digests) == 4
    assert digest(first.clone()) in digests


def test_state_of_several_processes_is_joined() -> None:
    rows = [OwnState(carried={"a": "1", "b": "1"}), OwnState(carried={"a": "1", "b": "2"}, lost={"c": "why"})]
    assert user_state.merge_rank_states(rows).carried.keys() == {"a", "b"}
    assert user_state.merge_rank_states(rows).lost == {"c": "why"}
    one = user_state.merge_rank_states(rows, each_writes=False)
    assert (one.carried, one.lost.keys()) == ({"a": "1"}, {"b", "c"})
    assert user_state.merge_rank_states([OwnState(), OwnState()]) == OwnState()
