"""The day that chat templates are told: the same one in all stages of a run, however many days it takes.

The templates of Llama 3.2, gpt-oss and others write today's date into what a model reads, by `strftime_now`. Left to
the clock, a chunk that begins after midnight would train on another text than the one before.
"""

from __future__ import annotations

import logging
import os
import sys
from datetime import date, datetime, tzinfo
from typing import Self

logger = logging.getLogger("baton")

VARIABLE = "BATON_TODAY"
"""Set in the processes of a run's stages, those that they begin included."""
RENDERER = "transformers.utils.chat_template_utils"
"""Module that renders templates."""
FUNCTION = "strftime_now"
"""What templates ask."""


class _Told(datetime):
    """A clock that says the day that was told, at midnight; the time where none was."""

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> Self:
        day = os.environ.get(VARIABLE)
        return cls.fromisoformat(day) if day else super().now(tz)


def tell(day: date | str | None) -> None:
    """Lets templates that are rendered from here on, in this process and those that it begins, be told a day.

    Args:
        day: As text in ISO format; None for the clock's.
    """
    if day:
        if os.environ.get(VARIABLE) != str(day):
            logger.info("chat templates are told that it is %s", day)
        os.environ[VARIABLE] = str(day)
    else:
        os.environ.pop(VARIABLE, None)
    if RENDERER in sys.modules:
        hold()


def hold() -> None:
    """Lets Transformers ask here while a day is told, and the clock else.

    It has no argument for it that TRL and the evaluation harness would pass on.
    """
    if VARIABLE in os.environ or RENDERER in sys.modules:
        from transformers.utils import chat_template_utils

        chat_template_utils.datetime = _Told if VARIABLE in os.environ else datetime


def is_asked_for(template: object) -> bool:
    """Tells whether a chat template, or one of several, asks for the day."""
    return FUNCTION in str(template)
