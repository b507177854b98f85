"""Who is answered: the token, the name of the server, and the words of a request."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import requests

from baton.errors import UserError
from baton.runs.run import Run, Sweep
from baton.store.storage import Storage
from baton.watch import server
from baton.watch.views import RunView
from tests.sweep.swept import Swept
from tests.watch.conftest import TOKEN, Serve

ONE = {"training.learning_rate": {"min": 1e-5, "max": 1e-2, "log": True}}
STOP = {"trial": "t001", "action": "stop", "why": "too dear"}
SIGNED = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture
def sweep(tmp_path: Path) -> Sweep:
    """Four trials after the first of two rungs, which kept two."""
    return Swept(tmp_path, 4, ONE, [(1, 2), (2, 1)]).go(1)


def _control(sweep: Sweep) -> dict[str, str]:
    return {trial: request.state for trial, request in sweep.requests().items()}


def _first_event(answer: requests.Response) -> tuple[str, Any]:
    lines = answer.iter_lines(decode_unicode=True)
    kind, data = next(lines), next(lines)
    return kind.removeprefix("event: "), json.loads(data.removeprefix("data: "))


REFUSED: dict[str, tuple[dict[str, str], int]] = {
    "no token": ({}, 401),
    "an empty one": ({"Authorization": "Bearer "}, 401),
    "another": ({"Authorization": f"Bearer {TOKEN[:-1]}"}, 401),
    "one that is no ASCII": ({"Authorization": "Bearer \xe9"}, 401),
    "as a cookie": ({"Cookie": f"token={TOKEN}"}, 401),
    "another host": ({**SIGNED, "Host": "rebound.example:80"}, 400),
    "another host without a port": ({**SIGNED, "Host": "rebound.example"}, 400),
    "an address of the network": ({**SIGNED, "Host": "192.168.0.7"}, 400),
}


@pytest.mark.parametrize("headers", [headers for headers, _ in REFUSED.values()], ids=REFUSED)
def test_nothing_is_read_or_steered(headers: dict[str, str], sweep: Sweep, serve: Serve) -> None:
    address, status = serve(sweep), next(status for given, status in REFUSED.values() if given == headers)
    for method, path in (("POST", "/steer"), ("GET", "/events"), ("GET", "/runs/sweep-t000/events")):
        answer = requests.request(method, address + path, json=STOP, headers=headers, timeout=20)
        assert answer.status_code == status
        assert "t00" not in answer.text
    assert _control(sweep) == {}
    answer = requests.post(f"{address}/steer", json=STOP, headers=SIGNED, timeout=20)  # the control
    assert (answer.status_code, _control(sweep)) == (200, {"t001": "stop"})


def test_the_page_without_a_token_has_nothing_of_the_sweep(sweep: Sweep, serve: Serve) -> None:
    address = serve(sweep)
    for path in ("/", "/runs/sweep-t000"):
        answer = requests.get(address + path, timeout=20)
        assert answer.status_code == 200
        assert "sweep-t0" not in answer.text
        assert sweep.storage.root not in answer.text
        policy = answer.text.partition('Content-Security-Policy" content="')[2].partition('"')[0]
        assert policy.startswith("default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-")
        assert policy.endswith("'; connect-src 'self'")
        assert answer.headers["content-security-policy"] == "frame-ancestors 'none'"
        assert answer.headers["cache-control"] == "no-store"


WRITTEN: dict[str, tuple[dict[str, Any], str, str]] = {
    "stop": (STOP, "stop", "t001: stops at its next chunk boundary"),
    "resume": ({**STOP, "action": "resume"}, "go", "t001: resumes at the next rung"),
    "promote": ({**STOP, "action": "promote", "why": ""}, "go", "t001: advances at each rung, whatever its place"),
}


@pytest.mark.parametrize(("order", "state", "told"), WRITTEN.values(), ids=WRITTEN)
def test_a_request_is_what_the_command_writes(
    order: dict[str, Any], state: str, told: str, sweep: Sweep, serve: Serve
) -> None:
    answer = requests.post(f"{serve(sweep)}/steer", json=order, headers=SIGNED, timeout=20)
    assert answer.json() == {"told": told}
    request = sweep.request("t001")
    assert request
    assert (request.state, request.why) == (state, order["why"] or "asked by hand")


WRONG: dict[str, tuple[Any, str]] = {
    "no JSON": ("stop", "Input should be an object"),
    "an unknown action": ({**STOP, "action": "remove"}, "action: Input should be 'stop', 'resume', 'promote' or"),
    "an unknown field": ({**STOP, "state": "go"}, "state: Extra inputs are not permitted"),
    "an unknown trial": ({**STOP, "trial": "t009"}, "sweep 'sweep' has no trial 't009'. It has t000, t001"),
    "a path as a trial": ({**STOP, "trial": "../../runs/x"}, "has no trial '../../runs/x'"),
    "a clone without changes": ({**STOP, "action": "clone"}, "a fork needs a changed value."),
}


@pytest.mark.parametrize(("order", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_request_is_explained(order: Any, message: str, sweep: Sweep, serve: Serve) -> None:
    answer = requests.post(f"{serve(sweep)}/steer", json=order, headers=SIGNED, timeout=20)
    assert answer.status_code == 400
    assert message in answer.json()["error"]
    assert _control(sweep) == {}


def test_a_sweep_shows_the_runs_of_its_trials_alone(sweep: Sweep, serve: Serve) -> None:
    address = serve(sweep)
    Run(sweep.storage, "other").put("recipe.json", {"recipe": {"name": "other"}, "created": "now"})
    answer = requests.get(f"{address}/runs/other/events", headers=SIGNED, timeout=20)
    assert (answer.status_code, answer.json()) == (404, {"error": "sweep 'sweep' has no trial with the run 'other'."})


def test_a_run_has_nothing_to_steer(sweep: Sweep, serve: Serve) -> None:
    address = serve(Run(sweep.storage, "sweep-t000"))
    assert requests.post(f"{address}/steer", json=STOP, headers=SIGNED, timeout=20).status_code == 404


def test_what_cannot_be_read_is_told_and_read_once_it_can(tmp_path: Path, sweep: Sweep, serve: Serve) -> None:
    kept = tmp_path / "kept"
    folder = Path(sweep.storage.root)
    address = serve(sweep)
    folder.rename(kept)
    with requests.get(f"{address}/events", headers=SIGNED, stream=True, timeout=20) as answer:
        lines = answer.iter_lines(decode_unicode=True)
        assert next(lines) == "event: trouble"
        assert f"{sweep.uri}/sweep.json does not exist." in next(lines)
        kept.rename(folder)
        assert next(lines) == ""
        assert next(lines) == "event: page"
        assert "4 configurations" in next(lines)


@pytest.mark.s3
def test_a_bucket_that_may_not_be_read_is_told(tmp_path: Path, s3_store: str, s3_server: Any, serve: Serve) -> None:
    made = Swept(tmp_path, 2, ONE, [(1, 1), (2, 1)], store=s3_store)
    address = serve(made.go(1))
    s3_server.require_rights(True)
    try:
        with requests.get(f"{address}/events", headers=SIGNED, stream=True, timeout=60) as answer:
            lines = answer.iter_lines(decode_unicode=True)
            assert next(lines) == "event: trouble"
            assert f"store '{s3_store}': access denied" in next(lines)
            s3_server.require_rights(False)
            assert next(lines) == ""
            assert next(lines) == "event: page"
    finally:
        s3_server.require_rights(False)


class Counted(RunView):
    """A page that counts how often it was rendered, and is another each time."""

    rounds = 0

    def render(self) -> str:
        self.rounds += 1
        return f"<main>{self.rounds}</main>"


def test_readers_share_a_page_and_without_one_the_store_is_not_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "PAUSE_HERE_S", 0.05)
    view = Counted(Run(Storage(str(tmp_path)), "a"))

    async def look() -> None:
        feed = server.Feed(view, threading.Lock())
        assert view.rounds == 0
        first, second = feed.events(), feed.events()
        told = await anext(first)
        assert (told, await anext(second)) == ('event: page\ndata: "1"\n\n',) * 2
        await first.aclose()
        while view.rounds < 5:
            await anext(second)
        await second.aclose()
        rounds = view.rounds
        await asyncio.sleep(0.5)
        assert view.rounds <= rounds + 1, "one may have been under way"
        assert (await anext(feed.events())).startswith("event: page")

    asyncio.run(look())


def test_a_port_that_is_taken_is_an_error_with_a_remedy() -> None:
    with server.listen(0) as taken:
        number = taken.getsockname()[1]
        with pytest.raises(UserError, match=rf"port {number} of 127\.0\.0\.1 cannot be used: .*Choose another --port"):
            server.listen(number)
