"""What a run and its checkpoints were made with: a number for each format, and the numbers that this Baton continues.

    runs/<run>/recipe.json                         `made`: rows, tokens, draws and loss, as the run was begun
    runs/<run>/checkpoints/step-…/manifest.json    `meta.made`: digest and checkpoint, as it was written

Another release may make other rows, tokens or random numbers of the same recipe; then a run that was begun before must
not change over unnoticed. A number that is not stated is 1. `FORMATS` is the table: what is made here, which older
numbers are continued, and what to do about the others. docs/upgrading.md tells users, CONTRIBUTING.md when to raise
one.
"""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from pydantic import Field

from baton.components.shared.core.document import Document
from baton.components.shared.core.errors import FormatError

PACKAGE = "baton-llm"


@dataclass(frozen=True)
class Older:
    """An older number of a format.

    Attributes:
        release: The last release that makes it.
        is_continued: Whether this one continues what was made with it, to the same bits.
    """

    release: str
    is_continued: bool


@dataclass(frozen=True)
class Format:
    """Something that is made of a recipe, and that another release may make otherwise.

    Attributes:
        number: The number of what is made here.
        what: What it decides.
        instead: What can be done with a number that is no longer continued, beside taking the release that makes it.
        older: What is known of the numbers before.
    """

    number: int
    what: str
    instead: str
    older: Mapping[int, Older] = field(default_factory=dict)

    def is_continued(self, number: int) -> bool:
        """Whether what was made with a number is continued here."""
        return number == self.number or (number in self.older and self.older[number].is_continued)


FORMATS: Mapping[str, Format] = {
    "rows": Format(
        2, "which rows a split holds, and on which side", "start the run under another name", {1: Older("0.1.0", True)}
    ),
    "tokens": Format(
        2,
        "how rows become tokens, and which of those count in the loss",
        "start the run under another name",
        {1: Older("0.1.0", True)},
    ),
    "draws": Format(
        1,
        "the order of rows, and every random number",
        "fork the run, which from there on draws as this Baton does: `baton runs fork NAME`",
    ),
    "loss": Format(
        2,
        "how much each row and token counts in the loss of a step and of an evaluation",
        "fork the run, whose rows and tokens count as here from there on: `baton runs fork NAME`",
        # Micro-batches and evaluation batches counted alike there, whatever they held.
        {1: Older("0.1.0", is_continued=True)},
    ),
    "digest": Format(
        1, "what a state digest is taken over", "fork its weights alone: `baton runs fork NAME@STEP --cold`"
    ),
    "checkpoint": Format(1, "the files of a checkpoint, and what is in them", "export it with that release"),
}
"""The formats, by name."""

DATA = ("rows", "tokens")
"""What a warm fork and a sweep's trial take over with the data of another run."""
OF_RUN = (*DATA, "draws", "loss")
"""What every chunk of a run must have alike."""
OF_CHECKPOINT = ("digest", "checkpoint")
"""What may change from one checkpoint of a run to the next."""


class Made(Document):
    """What something was made with."""

    baton: str = ""
    """The release; empty where it did not say so yet."""
    formats: dict[str, int] = Field(default_factory=dict)
    """Format → number, 1 where left out."""

    @classmethod
    def here(cls, names: Iterable[str], data: Made | None = None) -> Made:
        """Returns what this Baton makes.

        Args:
            names: Of which formats.
            data: What the data was made with, where that is another run's.
        """
        numbers = {name: FORMATS[name].number for name in names}
        return cls(baton=release(), formats=numbers | ({name: data.number(name) for name in DATA} if data else {}))

    def number(self, name: str) -> int:
        """Returns the number of a format."""
        return self.formats.get(name, 1)

    def require_known(self, what: str, formats: Mapping[str, Format] = FORMATS) -> None:
        """Checks that nothing about it is newer than this Baton.

        Args:
            what: What it is, for the message.
            formats: The table.

        Raises:
            FormatError: something is.
        """
        for name, number in sorted(self.formats.items()):
            newest = formats[name].number if name in formats else 1
            if number > newest:
                raise FormatError(
                    f"{what} has {name} of format {number}, made by Baton {self.baton or 'of another release'}; this "
                    f"Baton, {release()}, knows format {newest}{'' if newest == 1 else ' and those before it'}.",
                    remedy=f"Use {_package(self.baton)} or a newer one, in the image of the pods too.",
                )

    def require_continued(self, what: str, names: Iterable[str], formats: Mapping[str, Format] = FORMATS) -> None:
        """Checks that this Baton works on with it as the one did that made it.

        Args:
            what: What it is, for the message.
            names: The formats that matter for the work.
            formats: The table.

        Raises:
            FormatError: it is newer than this Baton, or so old that it is no longer continued.
        """
        self.require_known(what, formats)
        for name in names:
            entry, number = formats[name], self.number(name)
            if not entry.is_continued(number):
                last = entry.older[number].release if number in entry.older else self.baton
                raise FormatError(
                    f"{what} has {name} of format {number} ({entry.what}), which this Baton, {release()}, does not "
                    f"continue; it makes format {entry.number}.",
                    remedy=f"Resume with {_package(last)}, in the image of the pods too, or {entry.instead}.",
                )


@functools.cache
def release() -> str:
    """Returns this Baton's release."""
    return importlib.metadata.version(PACKAGE)


def _package(version: str) -> str:
    """Returns a release as pip is asked for it."""
    return f"{PACKAGE}=={version}" if version else f"the {PACKAGE} that made it"
