"""Each setting of `chunks` under `attach`: it takes effect, or it is refused with the reason."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from transformers import Trainer

import baton
from baton import signing
from baton.checkpoint.proof import Verification
from baton.checkpoint.store import CheckpointStore
from baton.errors import BatonError, ExactnessError
from baton.recipe.base import Section
from baton.recipe.run import Chunks
from baton.runs.run import Run
from baton.signing import SIGNATURE, SignatureError, Signer
from tests.support.tiny import make_base
from tests.train.attach import own


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny base model."""
    return make_base(tmp_path_factory.mktemp("base") / "model")


@dataclass
class Script:
    """A script with a trainer of its own."""

    base: str
    folder: Path
    uri: str

    def trainer(self, **settings: Any) -> Trainer:
        return own.trainer(
            self.base, self.folder, own.FixedRows(), own.padded, gradient_accumulation_steps=1, max_steps=6, **settings
        )

    def train(self, chunks: dict[str, Any], target: int = 6, every: int | None = None, **settings: Any) -> list[int]:
        """Trains, and returns the steps of the checkpoints that stay."""
        trainer = self.trainer(**settings)
        baton.attach(trainer, self.uri, target, chunks=chunks, checkpoint_every=every).train()
        return CheckpointStore(Run.open(self.uri)).steps()

    def manifest(self, step: int) -> Path:
        return self.folder / f"runs/mine/checkpoints/step-{step:08d}/manifest.json"


@pytest.fixture
def script(base: str, tmp_path: Path) -> Script:
    """One without a run yet."""
    return Script(base, tmp_path, str(tmp_path / "runs" / "mine"))


@pytest.fixture
def signer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Signer:
    """The key of this process."""
    signer = Signer.new("ed25519")
    (tmp_path / "key").write_bytes(signer.pem())
    monkeypatch.setenv(signing.KEY_FILE, str(tmp_path / "key"))
    return signer


@pytest.fixture
def notice_address() -> Iterator[str]:
    """An address whose answer is the notice."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()


def _paths(section: type[Section], prefix: str = "") -> set[str]:
    """Returns the paths of a section's settings, those of the sections inside it in their place."""
    found = set()
    for name, field in section.model_fields.items():
        inner = [kind for kind in (field.annotation, *getattr(field.annotation, "__args__", ())) if _is_section(kind)]
        found |= _paths(inner[0], f"{prefix}{name}.") if inner else {f"{prefix}{name}"}
    return found


def _is_section(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, Section)


KEEPS_ALL = {"last": 9}
STAYING: dict[str, tuple[dict[str, Any], dict[str, Any], list[int]]] = {
    "checkpoint_every": ({"checkpoint_every": 2, "wait_for_commit": True, "keep": KEEPS_ALL}, {}, [2, 4, 6]),
    "checkpoints_per_epoch": (
        {"checkpoints_per_epoch": 1, "keep": KEEPS_ALL}, {"save_strategy": "steps", "save_steps": 1}, [6],
    ),
    "wait_for_commit": ({"checkpoint_every": 1, "wait_for_commit": True, "keep": KEEPS_ALL}, {}, [1, 2, 3, 4, 5, 6]),
    "keep.last": (
        {"checkpoint_every": 1, "wait_for_commit": True, "keep": {"last": 3}}, {"save_total_limit": 1}, [4, 5, 6],
    ),
    "keep.every": (
        # What the trainer's arguments say of the newest ones stays in force beside it.
        {"checkpoint_every": 1, "wait_for_commit": True, "keep": {"every": 2}}, {"save_total_limit": 4},
        [2, 3, 4, 5, 6],
    ),
}  # fmt: skip
"""Setting → the section, the trainer's arguments, and the steps whose checkpoints stay."""

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "count": ({"count": 4}, r"chunks\.count has no effect here: the target ends"),
    "spare": ({"spare": 1}, r"chunks\.spare has no effect here"),
    "retries": ({"retries": 0}, r"chunks\.retries has no effect here"),
    "keep.audit": ({"keep": {"audit": True}}, r"chunks\.keep\.audit has no effect here"),
    "signing.secret": ({"signing": {"public_key": "x", "secret": "a/b"}}, r"chunks\.signing\.secret has no effect"),
}


def _signs(script: Script, signer: Signer, *_: Any) -> None:
    chunks = {"signing": {"public_key": signer.public.line}}
    assert script.train(chunks, target=2) == [2]
    assert SIGNATURE in json.loads(script.manifest(2).read_bytes())["meta"]
    verdict = Verification(CheckpointStore(Run.open(script.uri)), signer.public).verdict()
    assert (verdict["ok"], verdict["problems"], verdict["notes"]) == (True, [], [])
    # Another digest of the state than was signed is not restored.
    manifest = json.loads(script.manifest(2).read_bytes())
    manifest["meta"]["digest"] = "0" * 64
    script.manifest(2).write_text(json.dumps(manifest))
    with pytest.raises(SignatureError):
        script.train(chunks, target=4)


def _needs_the_key(script: Script, signer: Signer, *_: Any) -> None:
    other = Signer.new("ed25519").public
    with pytest.raises(BatonError, match="must be signed by"):
        script.train({"signing": {"public_key": other.line}}, target=2)


def _requires_the_same_machine(script: Script, *_: Any) -> None:
    script.train({}, target=2)
    manifest = json.loads(script.manifest(2).read_bytes())
    manifest["meta"]["fingerprint"]["torch"] = "1.0"
    script.manifest(2).write_text(json.dumps(manifest))
    with pytest.raises(ExactnessError, match="bitwise"):
        script.train({"exactness": "bitwise"}, target=4)
    assert script.train({"exactness": "consistent"}, target=4) == [2, 4]


def _leaves(script: Script, preemption: dict[str, Any]) -> None:
    class Waits(own.Slower):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            threading.Event().wait(1.5 if self.seen == 1 else 0)

    trainer = script.trainer(callbacks=[Waits()])
    outcome = baton.attach(trainer, script.uri, chunks={"preemption": preemption}).train()
    assert outcome.ending is baton.Ending.PARTIAL


def _leaves_for_a_file(script: Script, *_: Any) -> None:
    (script.folder / "notice").touch()
    _leaves(script, {"notice_file": str(script.folder / "notice")})


def _leaves_for_an_answer(script: Script, _: Signer, address: str, *__: Any) -> None:
    _leaves(script, {"notice_url": address})


def _looks_at_the_node(script: Script, _: Signer, __: str, caplog: pytest.LogCaptureFixture) -> None:
    script.train({"preemption": {"node_taints": ["going"]}}, target=1)
    assert "the taints of the node are not watched: this is not a pod" in caplog.text


def _keeps_the_best(script: Script, *_: Any) -> None:
    evaluates = {"eval_dataset": own.FixedRows(4), "eval_strategy": "steps", "eval_steps": 1, "learning_rate": 0.3}
    trainer = script.trainer(**evaluates)
    chunks = {"wait_for_commit": True, "keep": {"last": 1, "best": 2}}
    baton.attach(trainer, script.uri, chunks=chunks, checkpoint_every=1).train()
    losses = {row["step"]: row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row}
    assert set(CheckpointStore(Run.open(script.uri)).steps()) == {6, *sorted(losses, key=losses.__getitem__)[:2]}


def _bounds_what_is_unsaved(script: Script, *_: Any) -> None:
    chunk = baton.attach(script.trainer(), script.uri, chunks={"max_unsaved": "7s"})
    assert chunk._context.recipe.chunks.max_unsaved_seconds == 7  # where the committer of any chunk has it from


EFFECTS: dict[str, Callable[..., None]] = {
    "keep.best": _keeps_the_best,
    "signing.public_key": _signs,
    "exactness": _requires_the_same_machine,
    "preemption.notice_file": _leaves_for_a_file,
    "preemption.notice_url": _leaves_for_an_answer,
    "preemption.node_taints": _looks_at_the_node,
    "max_unsaved": _bounds_what_is_unsaved,
}
"""Setting → a look at what it does."""


def test_every_setting_has_a_row() -> None:
    assert _paths(Chunks) == {*STAYING, *REFUSED, *EFFECTS}


@pytest.mark.parametrize("setting", STAYING)
def test_which_checkpoints_stay(setting: str, script: Script) -> None:
    chunks, arguments, expected = STAYING[setting]
    assert script.train(chunks, **arguments) == expected


@pytest.mark.parametrize("setting", EFFECTS)
def test_a_setting_takes_effect(
    setting: str, script: Script, signer: Signer, notice_address: str, caplog: pytest.LogCaptureFixture
) -> None:
    EFFECTS[setting](script, signer, notice_address, caplog)


def test_a_chunk_that_cannot_sign_trains_nothing(script: Script, signer: Signer) -> None:
    _needs_the_key(script, signer)


@pytest.mark.parametrize("setting", REFUSED)
def test_a_setting_without_effect_is_refused(setting: str, script: Script) -> None:
    section, words = REFUSED[setting]
    with pytest.raises(baton.UserError, match=words) as error:
        script.train(section, target=1)
    assert error.value.remedy
    assert not Path(script.uri).exists()


@pytest.mark.parametrize("name", ["checkpoint_every", "checkpoints_per_epoch"])
def test_a_cadence_given_twice_is_refused(name: str, script: Script) -> None:
    with pytest.raises(baton.UserError, match=rf"checkpoint_every is 5, and chunks\.{name} is 2"):
        script.train({name: 2}, target=1, every=5)
