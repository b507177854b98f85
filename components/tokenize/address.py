"""The address of a tokenized split: what its tokens are made from, and by which libraries."""

from __future__ import annotations

import hashlib
import json
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, NamedTuple

from baton.components.shared.core.errors import FormatError, UserError
from baton.components.shared.models import conversing, own_tokenizer, prompting, today
from baton.components.shared.recipe import Recipe
from baton.components.shared.runs.documents.data import RunHead, Tokens
from baton.components.shared.runs.formats import FORMATS, release
from baton.components.shared.runs.run import Run
from baton.components.shared.store import bundles
from baton.components.tokenize import segments

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Address(NamedTuple):
    """Where a run's tokens are, and what decided it beside its recipe and rows.

    Attributes:
        digest: The address.
        turned: In words, which turns rows get; see `turned`.
        today: Day that the chat template is told, None where it does not ask.
    """

    digest: str
    turned: str
    today: str | None

    def tell_day(self) -> None:
        """Lets chat templates that this process and those that it begins render be told the run's day."""
        today.tell(self.today)


def of(run: Run, recipe: Recipe, split: str, base: str | None, base_digest: str | None) -> Address:
    """Returns the address of a run's tokens.

    A run that has tokens keeps them, where Baton or its libraries would make others by now.

    Raises:
        FormatError: it would, and the run's are gone or not made yet.
    """
    own = run.read(Tokens)
    tokenizer = None if is_learned(recipe) else own_tokenizer.make(recipe, base)
    words = turned(run, recipe, split, tokenizer)
    day = _day(run, recipe, split, tokenizer, own)
    other = own_tokenizer.other_identity(recipe)
    number = run.need(RunHead).made.number("tokens")
    digest = tokens_digest(recipe, split, base_digest, other, turned=bool(words), today=day, number=number)
    if own and own.digest == digest:
        return Address(digest, words, day)
    # Recipe, rows and base model of a run are held to what they were; what is left are the libraries and Baton itself.
    if own and bundles.usable_manifest(run.storage, own.prefix):
        where = run.storage.uri(own.prefix)
        run.warn(f"run {run.name!r} keeps its tokens, {where}; a new run would get others by now")
        return Address(own.digest, own.rendered, own.today)
    if own and bool(own.rendered) != bool(words):
        raise FormatError(
            f"run {run.name!r} was begun by another release, its tokens, {run.storage.uri(own.prefix)}, are gone, and "
            f"this Baton, {release()}, makes other ones.",
            remedy="Start the run under another name, or run its tokenize stage with the release that began it.",
        )
    return Address(digest, words, day)


def tokens_digest(
    recipe: Recipe,
    split: str,
    base_digest: str | None,
    other_digest: str | None,
    *,
    turned: bool = False,
    today: str | None = None,
    number: int = FORMATS["tokens"].number,
) -> str:
    """Returns the address of a tokenized split.

    Args:
        recipe: The recipe.
        split: Digest of the split.
        base_digest: Identity of the base model's files.
        other_digest: Identity of the files of `model.tokenizer.base`.
        turned: Whether rows are rendered in another way than they were before `data.render_as` and `data.system`.
        today: Day that the chat template is told, where it asks.
        number: Of the format of tokens.
    """
    data = recipe.data
    made_from: dict[str, object] = {
        "split": split,
        "base": base_digest,
        "other": other_digest,
        "tokenizer": recipe.model.tokenizer.model_dump() if recipe.model.tokenizer else None,
        "template": conversing.own_template(recipe),
        "settings": [
            data.max_length,
            data.packing,
            *data.older_train_on.values(),
            data.separator,
            data.extra_columns,
            data.quality.truncation == "fix",
        ],
        "method": recipe.training.method,
        # Another release may make other tokens: those then lie beside these.
        "libraries": [version("tokenizers"), version("transformers"), version("trl") if data.packing else None],
        # Where a file is cut decides what is packed together, and what the parts are called.
        "segments": [segments.LEAST, segments.MOST, segments.SHARE],
    }
    if number > 1:
        made_from["format"] = number
    if turned:
        made_from["turns"] = {"system": data.system}
    if today:
        made_from["today"] = today
    return hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()


def turned(run: Run, recipe: Recipe, split: str, tokenizer: PreTrainedTokenizerBase | None) -> str:
    """Returns in words which turns or system message rows get that the split does not give them, nothing for none.

    The split's rows are of one shape, so that the first stands for all.

    Args:
        run: The run.
        recipe: Its recipe.
        split: Digest of its split.
        tokenizer: Its tokenizer, None for one that is learned from its rows.

    Raises:
        UserError: they should, and there is no template for it, or no conversation to put the message into.
    """
    is_chat = recipe.data.render_as == "chat"
    if tokenizer and (recipe.model.base or is_chat):
        conversing.require_template(recipe, tokenizer)
        is_chat = conversing.applies(recipe, tokenizer)
    if not is_chat and recipe.data.system is None:
        return ""
    return conversing.changes(_first_row(run, split), recipe, chat=is_chat)


def is_learned(recipe: Recipe) -> bool:
    """Tells whether the tokenizer is learned from the rows."""
    return bool(recipe.model.tokenizer and recipe.model.tokenizer.train)


def _day(
    run: Run, recipe: Recipe, split: str, tokenizer: PreTrainedTokenizerBase | None, own: Tokens | None
) -> str | None:
    """Returns the day that the chat template is told, None where it does not ask, or no row goes through it.

    A run that has tokens, a fork's among them, keeps the day that they were made with.
    """
    template = tokenizer.chat_template if tokenizer else conversing.own_template(recipe)
    if not today.is_asked_for(template):
        return None
    if tokenizer and not prompting.of_row(_first_row(run, split), recipe, tokenizer).is_chat:
        return None
    if own and own.today:
        return own.today
    return str(recipe.data.today or run.need(RunHead).created[: len("2026-11-24")])


def split_manifest(run: Run, split: str) -> bundles.Manifest:
    """Returns what is committed of a run's split.

    Raises:
        UserError: it is gone.
    """
    manifest = bundles.read_manifest(run.storage, f"data/{split}/split")
    if manifest is None:
        uri = run.storage.uri(f"data/{split}/split")
        raise UserError(f"{uri} is gone.", remedy="Start the run again from its first stage.")
    return manifest


def _first_row(run: Run, split: str) -> dict[str, Any]:
    manifest = split_manifest(run, split)
    path = manifest.path(f"data/{split}/split", "train.jsonl")
    with run.storage.translated(path), run.storage.fs.open(run.storage.key(path), "rb") as file:
        line = file.readline()
    return json.loads(line) if line else {"text": ""}
