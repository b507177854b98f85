"""TRL's own scripts, three lines added, train in four processes to the bits that they have in one, and as they are."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.numpy import load_file

import baton
from tests.exactness import scripts
from tests.exactness.scripts import Leg
from tests.support.tiny import make_base

REWARDS = '''
def few(completion_ids, **_):
    """Few different tokens."""
    return [len(set(ids)) / 10 for ids in completion_ids]
'''
WRITES = {"max_completion_length": 6, "reward_funcs": ["rewards.few"], "num_generations": 2}
SETTINGS: dict[str, dict[str, Any]] = {
    "sft": {"max_length": 48, "eval_strategy": "steps", "eval_steps": 3},
    "dpo": {"max_length": 48},
    "kto": {"max_length": 48},
    "reward": {"max_length": 48},
    "grpo": {**WRITES, "num_iterations": 2, "steps_per_generation": 4},
    "rloo": {**WRITES, "num_iterations": 2},
    "distillation": {"max_completion_length": 6},
}
"""Script → its own settings; completions outlive a chunk's end."""
COLUMNS = {
    "sft": ("prompt", "completion"),
    "dpo": ("prompt", "chosen", "rejected"),
    "kto": ("prompt", "completion", "label"),
    "reward": ("prompt", "chosen", "rejected"),
    "grpo": ("prompt",),
    "rloo": ("prompt",),
    "distillation": ("prompt",),
}


class Scripts:
    """A script, its model and its rows in a folder.

    Args:
        name: The script's name.
        folder: An empty folder.
        settings: Settings of this test.
    """

    def __init__(self, name: str, folder: Path, **settings: Any) -> None:
        self.name, self.folder = name, folder
        base = make_base(folder / "model")
        config = folder / "model" / "config.json"
        # Else nothing is drawn after the order of rows.
        config.write_text(json.dumps({**json.loads(config.read_text()), "attention_dropout": 0.3}))
        (folder / "rewards.py").write_text(REWARDS)
        rows = folder / "rows"
        rows.mkdir()
        for side in ("train", "test"):
            (rows / f"{side}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in _rows(name, side)))
        self.settings = {
            **scripts.COMMON,
            "model_name_or_path": base,
            "dataset_name": str(rows),
            **SETTINGS[name],
            **({"teacher_model_name_or_path": make_base(folder / "teacher")} if name == "distillation" else {}),
            **settings,
        }
        self.legs: list[Leg] = []

    def uri(self, run: str) -> str:
        """Returns the address of a run."""
        return str(self.folder / "store" / "runs" / run)

    def plain(self, output: str, **settings: Any) -> None:
        """Adds the script as it is."""
        self._add(scripts.plain(self.name, self.folder), output, settings)

    def chunk(
        self, run: str, target: object, *, leave_out: tuple[str, ...] = (), fresh: bool = False, **more: Any
    ) -> None:
        """Adds a chunk."""
        path = scripts.patched(self.name, self.folder, self.uri(run), target, leave_out)
        self._add(path, run, more, fresh=fresh)

    def run(self) -> list[str]:
        """Runs what was added, and returns what each has printed."""
        ended = scripts.run(self.legs, self.folder)
        self.legs = []
        assert [code for code, _ in ended] == [0] * len(ended), ended[[code != 0 for code, _ in ended].index(True)][1]
        return [printed for _, printed in ended]

    def _add(self, path: str, output: str, settings: dict[str, Any], *, fresh: bool = False) -> None:
        line = scripts.command_line(**{**self.settings, **settings}, output_dir=str(self.folder / output))
        log = str(self.folder / f"{len(self.legs)}-{output}.log")
        self.legs.append(Leg(path, line, log, fresh))


def _rows(name: str, side: str) -> list[dict[str, Any]]:
    drawn, rows = random.Random(side), []
    for number in range(22 if side == "train" else 4):
        good = f"the value of {number + number % 7}" + " is here" * drawn.randrange(3)
        bad = f"the fox {number}" + " jumps" * drawn.randrange(1, 5)
        row: dict[str, Any] = {
            "prompt": f"What is {number} and {number % 7}?" + " Think." * drawn.randrange(4),
            "completion": bad if name == "kto" and number % 2 else good,
            "label": not number % 2,
            "chosen": good,
            "rejected": bad,
        }
        rows.append({column: row[column] for column in COLUMNS[name]})
    return rows


def _state(folder: Path) -> Any:
    """Returns weights, optimizer and random state that a script of its own has saved at its end."""
    loaded = [torch.load(folder / name, weights_only=False) for name in ("optimizer.pt", "rng_state.pth")]
    return load_file(folder / "model.safetensors"), *loaded


def _same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(_same(ours[key], theirs[key]) for key in ours)
    if isinstance(ours, list | tuple):
        return len(ours) == len(theirs) and all(map(_same, ours, theirs))
    return bool((ours == theirs).all()) if hasattr(ours, "all") else bool(ours == theirs)


def _losses(history: Any) -> list[tuple[int, float]]:
    return [(entry["step"], entry[key]) for entry in history for key in ("loss", "eval_loss") if key in entry]


@pytest.mark.parametrize("name", ["sft", *(pytest.param(name, marks=pytest.mark.slow) for name in list(SETTINGS)[1:])])
@pytest.mark.slow
def test_a_script_in_four_processes_ends_on_the_bits_that_it_has_in_one(name: str, tmp_path: Path) -> None:
    script = Scripts(name, tmp_path)
    script.plain("plain", save_strategy="steps", save_steps=8)
    script.chunk("whole", None)
    for index in (1, 2, 3, 4):
        script.chunk("parts", f"{index}/4")
    script.chunk("control", 5)
    script.chunk("control", None, leave_out=("rng",))
    script.run()

    whole, parts, control = (baton.checkpoints(script.uri(run)) for run in ("whole", "parts", "control"))
    assert [row["step"] for row in whole] == [8]
    assert [(row["chunk"], row["step"], row["parent"]) for row in parts][-2:] == [(3, 6, 4), (4, 8, 6)]
    assert parts.open().meta.state == whole.open().meta.state
    assert set(parts.open().meta.restored.checked.values()) <= {"match", "absent"}
    assert all(row["ok"] for row in parts.verify())
    assert control.open().meta.restored.checked["rng"] == "left out"
    assert control.open().meta.state["weights"] != whole.open().meta.state["weights"]

    history = json.loads((tmp_path / "plain" / "checkpoint-8" / "trainer_state.json").read_text())["log_history"]
    assert len(_losses(history)) >= 2
    assert _losses(parts.history()) == _losses(whole.history()) == _losses(history)
    theirs = _state(tmp_path / "plain" / "checkpoint-8")
    assert _same(_state(Path(parts[-1]["uri"])), theirs)
    # The script's own last line saves what its last process has in memory.
    assert _same(
        load_file(tmp_path / "parts" / "model.safetensors"), load_file(tmp_path / "plain" / "model.safetensors")
    )


@pytest.mark.slow
def test_interpreters_of_their_own_are_no_other(tmp_path: Path) -> None:
    script = Scripts("sft", tmp_path)
    script.chunk("forked", None)
    for index in (1, 2):
        script.chunk("fresh", f"{index}/2", fresh=True)
    script.run()
    forked, fresh = (baton.checkpoints(script.uri(run)) for run in ("forked", "fresh"))
    assert fresh.open().meta.state == forked.open().meta.state


@pytest.mark.slow
@pytest.mark.s3
def test_a_bucket_and_an_adapter(tmp_path: Path, s3_store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    script = Scripts("sft", tmp_path, use_peft=True, lora_dropout=0.2, lora_target_modules=["q_proj", "v_proj"])
    monkeypatch.setattr(script, "uri", lambda run: f"{s3_store}/runs/{run}")
    script.chunk("whole", None)
    for target in (3, None):
        script.chunk("parts", target, save_strategy="steps", save_steps=2)
    script.run()
    whole, parts = (baton.checkpoints(script.uri(run)) for run in ("whole", "parts"))
    assert parts.open().meta.state == whole.open().meta.state
    assert all(row["ok"] for row in parts.verify())
    assert {"adapter_model.safetensors", "optimizer.pt", "baton_state.pt"} <= set(parts.open().manifest.files)
