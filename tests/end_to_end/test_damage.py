"""Any object of a run damaged: one start repairs it with the same bits, or ends with what to do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.runs import objects
from tests.end_to_end import damage, damage_table
from tests.end_to_end.damage import Case, Subject

QUICK = 60  # one case of so many


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Subject]]:
    """Runs that are made, by name."""
    subjects: dict[str, Subject] = {}
    yield subjects
    for subject in subjects.values():
        subject.close()


def _subject(made: dict[str, Subject], name: str, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    if name not in made:
        made[name] = Subject(name, tmp_path_factory.mktemp("damaged"))
    return made[name]


def test_a_part_of_the_table(made: dict[str, Subject], tmp_path_factory: pytest.TempPathFactory) -> None:
    subject = _subject(made, "lora", tmp_path_factory)
    cases = [case for case in subject.cases() if case.state == "whole" and damage.number(case) % QUICK == 0]
    assert len(cases) > 3
    assert not damage_table.started(subject, cases)


def test_a_whole_run_is_left_as_it_is(made: dict[str, Subject], tmp_path_factory: pytest.TempPathFactory) -> None:
    subject = _subject(made, "lora", tmp_path_factory)
    word, outcome = subject.after(Case("whole", "", "none", {}))
    assert (word, outcome.told, outcome.problems) == ("repaired", [], [])
    now = damage.content_of(subject.store)
    bundles = {name for name in subject.whole if (kind := damage.kind_of(name)) and kind.is_bundle}
    assert {name: now.get(name) for name in bundles} == {name: subject.whole[name] for name in bundles}


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("part", range(damage_table.PARTS))
@pytest.mark.parametrize("name", damage.RUNS)
def test_the_whole_table(
    name: str, part: int, made: dict[str, Subject], tmp_path_factory: pytest.TempPathFactory
) -> None:
    subject = _subject(made, name, tmp_path_factory)
    unknown = [each for each in subject.whole if damage.kind_of(each) is None and not each.startswith("sweeps/")]
    assert not unknown, "objects of a run missing in baton.runs.objects"
    cases = [case for case in subject.cases() if damage.number(case) % damage_table.PARTS == part]
    assert not damage_table.started(subject, cases, part)


def test_the_page_is_of_the_last_table() -> None:
    page = Path(__file__).parents[2] / "docs/internals/damage.md"
    assert page.read_text(encoding="utf-8") == damage_table.markdown()


def test_every_kind_of_object_is_in_the_table_or_its_absence_has_a_reason() -> None:
    shown = {pattern for table in damage_table.tables().values() for pattern in table if "sweeps/" not in pattern}
    assert shown.isdisjoint(damage_table.ABSENT)
    assert shown | damage_table.ABSENT.keys() == {each.pattern for each in objects.OBJECTS}
