"""Formats: what an older or a newer Baton has made is continued, or refused with what to do."""

from __future__ import annotations

import pytest

from baton.errors import FormatError
from baton.runs.versions import (
    CHECKPOINT_FORMATS,
    FORMATS,
    RUN_FORMATS,
    FormatVersions,
    OlderFormat,
    VersionedFormat,
    release,
)

TABLE = {
    **FORMATS,
    "tokens": VersionedFormat(
        2, "how rows become tokens", "start the run under another name", {1: OlderFormat("0.1.0", True)}
    ),
    "draws": VersionedFormat(
        3,
        "every random number",
        "fork the run",
        {1: OlderFormat("0.1.0", False), 2: OlderFormat("0.4.0", True)},
    ),
}
"""A table of some later release."""
FUTURE = {
    "a newer number": (
        {"tokens": 3},
        "run 'r' has tokens of format 3, made by Baton 9.0; this Baton, {here}, knows format 2 and those before it. "
        "Use baton-llm==9.0 or a newer one, in the image of the pods too.",
    ),
    "a format of which nothing is known": (
        {"rounds": 2},
        "run 'r' has rounds of format 2, made by Baton 9.0; this Baton, {here}, knows format 1. "
        "Use baton-llm==9.0 or a newer one, in the image of the pods too.",
    ),
}


def test_each_is_part_of_a_run_or_of_a_checkpoint() -> None:
    assert sorted((*RUN_FORMATS, *CHECKPOINT_FORMATS)) == sorted(FORMATS)


def test_every_number_before_is_in_the_table() -> None:
    for name, entry in FORMATS.items():
        assert sorted(entry.older) == list(range(1, entry.number)), name


def test_what_is_made_here_is_continued_here() -> None:
    made = FormatVersions.here(FORMATS)
    assert made.to_json() == {
        "baton": release(),
        "formats": {"rows": 2, "tokens": 2, "draws": 1, "loss": 2, "digest": 1, "checkpoint": 1},
    }
    made.require_continued("it", FORMATS)


def test_data_of_another_run_stays_what_it_is() -> None:
    made = FormatVersions.here(
        RUN_FORMATS, data=FormatVersions(baton="0.0.9", formats={"rows": 0, "tokens": 0, "draws": 0, "loss": 0})
    )
    assert made.formats == {"rows": 0, "tokens": 0, **{name: FORMATS[name].number for name in ("draws", "loss")}}


def test_what_is_not_stated_is_the_first() -> None:
    FormatVersions().require_continued("it", FORMATS)
    FormatVersions(formats={"draws": 2}).require_continued("it", RUN_FORMATS, TABLE)
    with pytest.raises(FormatError, match="it has draws of format 1 "):
        FormatVersions().require_continued("it", RUN_FORMATS, TABLE)


@pytest.mark.parametrize(("formats", "message"), FUTURE.values(), ids=FUTURE)
def test_what_a_newer_one_made_is_refused_whatever_it_is_for(formats: dict[str, int], message: str) -> None:
    made = FormatVersions(baton="9.0", formats=formats)
    with pytest.raises(FormatError) as caught:
        made.require_known("run 'r'", TABLE)
    assert str(caught.value) == message.format(here=release())
    assert caught.value.exit_code == 2
    with pytest.raises(FormatError):
        made.require_continued("run 'r'", (), TABLE)


def test_a_format_that_came_later_is_known_by_its_first_number() -> None:
    FormatVersions(baton="9.0", formats={"rounds": 1}).require_continued("it", FORMATS)
    with pytest.raises(FormatError, match="rounds of format 2"):
        FormatVersions(baton="9.0", formats={"rounds": 2}).require_continued("it", FORMATS)


def test_an_older_number_is_continued_or_refused_as_the_table_says() -> None:
    FormatVersions(formats={"tokens": 1, "draws": 2}).require_continued("it", RUN_FORMATS, TABLE)
    old = FormatVersions(baton="0.1.0", formats={"tokens": 1, "draws": 1})
    old.require_continued("it", ("rows", "tokens", "digest"), TABLE)
    with pytest.raises(FormatError) as caught:
        old.require_continued("run 'r'", RUN_FORMATS, TABLE)
    assert str(caught.value) == (
        f"run 'r' has draws of format 1 (every random number), which this Baton, {release()}, does not continue; it "
        "makes format 3. Resume with baton-llm==0.1.0, in the image of the pods too, or fork the run."
    )


def test_a_number_before_the_table_names_the_release_that_said_so() -> None:
    with pytest.raises(FormatError, match=r"Resume with baton-llm==0\.0\.9, in the image"):
        FormatVersions(baton="0.0.9", formats={"draws": 0}).require_continued("it", RUN_FORMATS)
    with pytest.raises(FormatError, match="Resume with the baton-llm that made it, in the image"):
        FormatVersions(formats={"draws": 0}).require_continued("it", RUN_FORMATS)
