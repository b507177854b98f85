"""The pages in a real browser: curves that grow, buttons, and what a person meanwhile has zoomed, opened or hidden."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from baton.runs.documents import Progress
from baton.runs.run import Run, Sweep, now
from tests.support.browser import Page
from tests.sweep.swept import STEPS, Swept
from tests.watch.conftest import TOKEN, Serve

ONE = {"training.learning_rate": {"min": 1e-5, "max": 1e-2, "log": True}}
RECIPE = {"name": "swept", "model": {"base": "org/model"}, "data": {"source": "rows.jsonl"}, "training": {"epochs": 1}}
REACHED = "JSON.parse(document.querySelectorAll('figure[data-plot]')[{at}].dataset.plot).curves.map(c => c.xs.at(-1))"
DRAWN = "document.querySelectorAll('.u-over').length"


@pytest.fixture
def made(tmp_path: Path) -> Swept:
    """Four trials after the first of three rungs, which kept two."""
    made = Swept(tmp_path, 4, ONE, [(1, 2), (2, 1), (4, 1)])
    made.go(1)
    return made


def _row(trial: str) -> str:
    return f"tr[data-key={trial}]"


def test_curves_grow_and_all_that_a_person_has_set_stays(made: Swept, serve: Serve, page: Page) -> None:
    page.go(f"{serve(made.sweep)}/#{TOKEN}")
    page.until(f"{DRAWN} === 2")
    assert page.js("document.title") == "sweep"
    assert set(page.js(REACHED.format(at=1))) == {STEPS}
    assert page.js("getComputedStyle(document.querySelector('.acts button')).cursor") == "pointer"
    # A person closes the rung's reasons, hides a curve and zooms.
    page.click(".rungs summary")
    page.click(".u-legend tr:nth-child(2) .u-marker + *")
    hidden = page.js("document.querySelector('.u-legend tr.u-off').textContent.split(':')[0]")
    page.js("window.row = document.querySelector('tr[data-key]')")
    kept = made.sweep.rungs()[0].kept
    trial = next(trial for trial in made.trials if trial["id"] == kept[0])
    made.train(trial, 2)
    page.until(f"Math.max(...{REACHED.format(at=1)}) > {1.9 * STEPS}")  # a moving mean ends before its last step
    assert page.js(f"{DRAWN} === 2")
    assert page.js(
        "[...document.querySelectorAll('.u-legend tr.u-off')].map(row => row.textContent.split(':')[0])"
    ) == [hidden]
    assert not page.js("document.querySelector('.rungs details').open")
    assert page.js("window.row.isConnected"), "a row that stays is the same element"
    # The next rung's verdict is shown with its reasons.
    made.sweep.write(made.sweep.rungs()[0].model_copy(update={"rung": 2, "chunk": 2, "kept": kept[:1]}), 2)
    page.until("document.querySelectorAll('.rungs > li').length === 2")
    assert page.messages == []


BUTTONS = {"stop": ("stop", "too dear"), "promote": ("go", "")}


@pytest.mark.parametrize(("act", "state", "why"), [(act, *rest) for act, rest in BUTTONS.items()], ids=BUTTONS)
def test_a_button_asks_and_the_row_tells(act: str, state: str, why: str, made: Swept, serve: Serve, page: Page) -> None:
    trial = made.sweep.rungs()[0].kept[1]
    page.go(f"{serve(made.sweep)}/#{TOKEN}")
    page.click(f"{_row(trial)} [data-act={act}]")
    page.until("document.querySelector('dialog').open")
    assert f"{act.capitalize()} {trial}" in page.text()
    if why:
        page.write("dialog [name=why]", why)
    page.click("#steer-go")
    page.until("!document.querySelector('dialog').open")
    request = made.sweep.request(trial)
    assert request
    assert (request.state, request.why) == (state, why or "asked by hand")
    page.until(f"!document.querySelector('{_row(trial)} [data-act={act}]')")
    assert page.js("document.getElementById('told').innerText").startswith(f"{trial}: ")


def test_a_request_that_is_refused_keeps_its_words(made: Swept, serve: Serve, page: Page) -> None:
    page.go(f"{serve(made.sweep)}/#{TOKEN}")
    page.click(f"{_row('t000')} [data-act=clone]")
    page.until("document.querySelector('dialog').open")
    given = page.js("document.querySelector('dialog [name=changes]').value")
    assert given == f"training.learning_rate={json.dumps(made.trials[0]['values']['training.learning_rate'])}"
    page.write("dialog [name=changes]", "training.learning_rat=1")
    page.click("#steer-go")
    page.until("!document.getElementById('steer-error').hidden")
    assert page.js("document.querySelector('dialog').open")
    page.click("#steer-cancel")
    assert page.js("!document.querySelector('dialog').open")
    assert made.sweep.requests() == {}


@pytest.mark.parametrize("fragment", ["", "#another"], ids=["no token", "a wrong one"])
def test_without_the_token_the_page_stays_empty(fragment: str, made: Swept, serve: Serve, page: Page) -> None:
    page.go("about:blank")
    page.go(f"{serve(made.sweep)}/{fragment}")
    page.until("!document.getElementById('notice').hidden")
    assert "This address has no valid token" in page.text()
    assert "t000" not in page.js("document.documentElement.outerHTML")
    page.messages.clear()


def test_another_site_can_read_and_steer_nothing(made: Swept, serve: Serve, page: Page) -> None:
    """Not even one on another port of this machine, in the browser that has the page open."""
    address, other = serve(made.sweep), serve(made.sweep)
    page.go(f"{address}/#{TOKEN}")
    page.until(f"{DRAWN} === 2")
    page.go("about:blank")
    page.go(other.replace("127.0.0.1", "localhost"))
    order = json.dumps({"trial": "t001", "action": "stop", "why": ""})
    page.call("Page.setBypassCSP", enabled=True)  # its own policy would not let it ask at all
    page.go(other.replace("127.0.0.1", "localhost"))
    for options in (
        {},
        {"mode": "no-cors", "credentials": "include"},
        {"headers": {"Authorization": f"Bearer {TOKEN}"}},
    ):
        asked = json.dumps({"method": "POST", "body": order, **options})
        sent = page.js(
            f"fetch('{address}/steer', {asked}).then(answer => answer.type + answer.status, () => 'refused')"
        )
        assert sent in ("refused", "opaque0")
    assert made.sweep.requests() == {}
    page.call("Page.setBypassCSP", enabled=False)
    page.messages.clear()


def test_text_of_a_recipe_is_no_markup(tmp_path: Path, serve: Serve, page: Page) -> None:
    hostile = "<img src=x onerror=\"document.title='pwned'\"><script>document.title='pwned'</script>"
    made = Swept(tmp_path, 2, {"hooks.loss": [hostile]}, [(1, 1), (2, 1)])
    page.go(f"{serve(made.go(1))}/#{TOKEN}")
    page.until("document.querySelector('[data-act=clone]')")
    page.click("[data-act=clone]")
    assert "onerror" in page.js("document.querySelector('dialog [name=changes]').value")
    assert not page.js("document.querySelector('img')")
    assert page.js("document.title") == "sweep"
    assert page.messages == []


def test_a_trials_own_page_grows_from_note_to_note(made: Swept, serve: Serve, page: Page) -> None:
    """Its lines for MLflow, held back, are the curve beyond the checkpoint."""
    run = Run(made.sweep.storage, "sweep-t000")
    run.put("recipe.json", {"recipe": RECIPE, "created": "2026-11-21T10:00:00.000Z", "name": run.name})
    address = serve(made.sweep)
    page.go(f"{address}/#{TOKEN}")
    page.until("document.querySelector('a[data-run=sweep-t000]')?.href")
    run.put("tracking.json", {"mlflow": "sqlite:///absent.db", "run_id": "0"})
    lines = [json.dumps({"metrics": {"loss": 1.0}, "step": step}) + "\n" for step in range(STEPS + 1, STEPS + 8)]
    run.storage.write(run.path("unsent/1.jsonl"), "".join(lines).encode() + b'{"metr')
    run.write(Progress(step=STEPS + 7, chunk=2, seconds_per_step=0.5, at=now()))
    page.until(f"document.querySelector('{_row('t000')} .now')")
    assert max(page.js(REACHED.format(at=1))) == STEPS + 7
    page.click("a[data-run=sweep-t000]")
    page.until("document.querySelector('#live h1')?.textContent === 'sweep-t000'")
    assert f"step {STEPS + 7:,} of {4 * STEPS:,}, chunk 2 of 4" in page.text()
    # At half a second a step.
    assert f"Time left\n{(3 * STEPS - 7) / 2} s" in page.text()
    assert "Throughput\n2 steps a second" in page.text()


def test_a_run_that_is_deleted_meanwhile_is_told_and_its_page_stays(made: Swept, serve: Serve, page: Page) -> None:
    sweep = Sweep(made.storage, "sweep")
    page.go(f"{serve(sweep)}/#{TOKEN}")
    page.until(f"{DRAWN} === 2")
    for name in made.storage.find(sweep.path()):
        made.storage.remove(sweep.path(name))
    page.until("!document.getElementById('notice').hidden")
    assert "sweep.json does not exist" in page.text()
    assert page.js(f"{DRAWN} === 2")
