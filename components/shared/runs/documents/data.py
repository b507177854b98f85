"""Documents that data split and tokenize write to a run."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, JsonValue

from baton.components.shared.core.document import Document, Json, NamedDocument
from baton.components.shared.runs.formats import Made

ORIGINS = "origins.gz"
"""A run's file of where its rows come from; see `baton.components.shared.runs.origins`."""


class RunHead(NamedDocument):
    """A run's recipe, resolved, and when it was created."""

    NAME: ClassVar[str] = "recipe.json"

    recipe: Json
    created: str
    name: str = ""
    made: Made = Made()
    """What the run was begun with."""

    @property
    def recipe_name(self) -> str:
        """The recipe's name."""
        return str(self.recipe["name"])

    @property
    def base(self) -> str | None:
        """The model that training began with, None for one from scratch."""
        model = self.recipe.get("model")
        base = model.get("base") if isinstance(model, dict) else None
        return base if isinstance(base, str) else None


class SplitData(NamedDocument):
    """Which data the run has: part of what its checkpoints know each other by."""

    NAME: ClassVar[str] = "data.json"

    digest: str
    rows: int = 0

    @property
    def prefix(self) -> str:
        """Where the rows lie in the store."""
        return f"data/{self.digest}/split"


class SplitCounts(NamedDocument):
    """Counts of rows by side, and of rejected ones."""

    NAME: ClassVar[str] = "split.json"

    rows: int = 0
    train: int | None = None
    eval: int | None = None
    test: int | None = None
    rejected: int = 0
    rejected_uri: str | None = None
    """Address of the rejected rows, None where there are none."""
    source: str = ""
    columns: list[Json] = Field(default_factory=list)
    """The rows' columns, as MLflow's schema has them."""


class Tokens(NamedDocument):
    """The tokenized rows."""

    NAME: ClassVar[str] = "tokens.json"

    prefix: str
    """Where they lie in the store."""
    digest: str = ""
    train: int = 0
    tokens: int = 0
    """Training tokens."""
    truncated: int = 0
    dropped: int = 0
    refused: int = 0
    """Of those that are dropped: what the chat template does not write, or not so that what counts can be told."""
    left_out: dict[str, int] = Field(default_factory=dict)
    """What the chat template leaves out of the others, such as tool calls, and answers that it does not end."""
    lengths: JsonValue = None
    rendered: str = ""
    """How texts became turns of a conversation, in words; empty where they did not."""
    today: str | None = None
    """Day that the chat template was told, in ISO format; None where it does not ask."""


class TokensMeta(Document):
    """What the manifest of tokenized rows says of them."""

    tokens: int
    """Training tokens."""
    truncated: int
    dropped: int
    refused: int = 0
    left_out: dict[str, int] = Field(default_factory=dict)
    train: int
    eval: int
    test: int = 0
    bytes: int
    """Of the training tokens."""
    lengths: Json
    files: dict[str, list[tuple[str, int]]]
    """Side → its files in order, each with its rows."""
    first: dict[str, list[str]] = Field(default_factory=dict)
    """Side → its first sequences in words, see `tokenize.card`."""
    first_lines: list[int] = Field(default_factory=list)
    """Of each file to train on, the line of the split that its first row is looked for from; see `tokenize.origins`.
    Empty where an older Baton wrote some of them."""


class PinnedModels(NamedDocument):
    """The models that training began with: part of what the run's checkpoints know each other by.

    A method's second model has a key like the base's, `teacher_sha256`.
    """

    NAME: ClassVar[str] = "model.json"

    base_sha256: str | None
    """Digest of the files of the model that is trained; None for one from scratch."""

    def digest(self, role: str) -> str | None:
        """Returns the digest of a model's files by its role, None where it was not there."""
        value = self.to_json().get(f"{role}_sha256")
        return str(value) if value is not None else None


class OwnCode(NamedDocument):
    """The user's Python files: part of what the run's checkpoints know each other by."""

    NAME: ClassVar[str] = "code.json"

    prefix: str


class Loss(Document):
    """Something that a finished stage had left and that is gone."""

    at: str
    lost: str


class Losses(NamedDocument):
    """Losses of objects, over the life of a run."""

    NAME: ClassVar[str] = "losses.json"

    losses: list[Loss] = Field(default_factory=list)
