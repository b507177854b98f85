"""Stages that run at once on the real local engine: each event is heard whole, and one at a time."""

import logging
import threading
import time
from pathlib import Path

import pytest
from kfp import compiler, dsl

from baton import events, machine
from baton.events import Event
from baton.local import engine

STAGES, EACH = 4, 25


@dsl.component(base_image="theirs:1", install_kfp_package=False)
def prints(name: str, each: int, at_once: int, meeting: str) -> None:
    import os
    import time

    os.environ["BATON_EVENTS"] = "stdout"
    from baton import events

    open(os.path.join(meeting, name), "w").close()
    until = time.monotonic() + 60
    while len(os.listdir(meeting)) < at_once:
        assert time.monotonic() < until, "no other runs at once"
        time.sleep(0.01)
    for step in range(each):
        print("ordinary line", step, flush=True)
        events.emit(events.Warned(f"{name} {step}"))


@dsl.pipeline(name="at-once")
def at_once(meeting: str) -> None:
    with dsl.ParallelFor([f"s{number}" for number in range(STAGES)]) as name:
        prints(name=name, each=EACH, at_once=2, meeting=meeting)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The compiled pipeline, with a cache of its own."""
    monkeypatch.setenv("BATON_CACHE", str(tmp_path / "cache"))
    compiler.Compiler().compile(at_once, str(tmp_path / "pipeline.yaml"))
    return str(tmp_path / "pipeline.yaml")


@pytest.fixture
def meeting(tmp_path: Path) -> dict[str, str]:
    """Arguments: a folder in which a stage waits for another, so that they print at once."""
    folder = tmp_path / "meeting"
    folder.mkdir()
    return {"meeting": str(folder)}


def test_events_of_stages_at_once_are_whole_and_heard_one_at_a_time(package: str, meeting: dict[str, str]) -> None:
    heard: list[str] = []
    hearing = threading.Lock()

    def hear(event: Event) -> None:
        assert isinstance(event, events.Warned), event
        assert hearing.acquire(blocking=False), "another stage's event came meanwhile"
        time.sleep(0.002)
        heard.append(event.text)
        hearing.release()

    engine.run(package, "at-once", meeting, on_event=hear)
    names = [f"s{number}" for number in range(STAGES)]
    for name in names:
        assert [text for text in heard if text.startswith(name)] == [f"{name} {step}" for step in range(EACH)]
    assert len(heard) == STAGES * EACH
    log = (Path(machine.cache_dir()) / "logs/at-once.log").read_text()
    assert log.count("ordinary line") == STAGES * EACH


def _tell() -> None:
    print("printed")
    logging.getLogger("baton").warning("logged")
    events.warn("told")


def test_who_hears_an_event_may_wait_for_threads_that_print_log_and_tell(package: str, meeting: dict[str, str]) -> None:
    heard: list[str] = []

    def hear(event: Event) -> None:
        assert isinstance(event, events.Warned), event
        if event.text == "s0 0":
            thread = threading.Thread(target=_tell, daemon=True)
            thread.start()
            thread.join(20)
            assert not thread.is_alive(), "the thread waits for who hears the event"
        heard.append(event.text)

    engine.run(package, "waits", meeting, on_event=hear)
    assert heard.count("told") == 1
    assert heard.index("s0 0") < heard.index("told")
    log = (Path(machine.cache_dir()) / "logs/waits.log").read_text()
    assert log.count("printed\n") == log.count("logged\n") == 1
