"""The address of a tokenized split: what its tokens are made from, and by which libraries."""

from __future__ import annotations

import hashlib
import json
import logging
from importlib.metadata import version
from typing import Any

from baton.components.shared.core.errors import FormatError, UserError
from baton.components.shared.models import conversing, own_tokenizer
from baton.components.shared.recipe import Recipe
from baton.components.shared.runs.documents.data import RunHead, Tokens
from baton.components.shared.runs.formats import FORMATS, release
from baton.components.shared.runs.run import Run
from baton.components.shared.store import bundles
from baton.components.tokenize import segments

logger = logging.getLogger("baton")


def of(run: Run, recipe: Recipe, split: str, base: str | None, base_digest: str | None) -> tuple[str, str]:
    """Returns the address of a run's tokens, and in words which turns its rows get; see `turned`.

    A run that has tokens keeps them, where Baton or its libraries would make others by now.

    Raises:
        FormatError: it would, and the run's are gone or not made yet.
    """
    words = turned(run, recipe, split, base)
    other = own_tokenizer.other_identity(recipe)
    digest = tokens_digest(recipe, split, base_digest, other, turned=bool(words))
    own = run.read(Tokens)
    if own and own.digest == digest:
        return digest, words
    # Recipe, rows and base model of a run are held to what they were; what is left are the libraries and Baton itself.
    if own and bundles.usable_manifest(run.storage, own.prefix):
        where = run.storage.uri(own.prefix)
        logger.warning("run %r keeps its tokens, %s; a new run would get others by now", run.name, where)
        return own.digest, own.rendered
    is_other = run.need(RunHead).made.number("tokens") != FORMATS["tokens"].number
    if is_other or (own and bool(own.rendered) != bool(words)):
        what = f"its tokens, {run.storage.uri(own.prefix)}, are gone" if own else "it has no tokens yet"
        raise FormatError(
            f"run {run.name!r} was begun by another release, {what}, and this Baton, {release()}, makes other ones.",
            remedy="Start the run under another name, or run its tokenize stage with the release that began it.",
        )
    return digest, words


def tokens_digest(
    recipe: Recipe, split: str, base_digest: str | None, other_digest: str | None, *, turned: bool = False
) -> str:
    """Returns the address of a tokenized split.

    Args:
        recipe: The recipe.
        split: Digest of the split.
        base_digest: Identity of the base model's files.
        other_digest: Identity of the files of `model.tokenizer.base`.
        turned: Whether rows are rendered in another way than they were before `data.render_as` and `data.system`.
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
    if (number := FORMATS["tokens"].number) > 1:
        made_from["format"] = number
    if turned:
        made_from["turns"] = {"system": data.system}
    return hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()


def turned(run: Run, recipe: Recipe, split: str, base: str | None) -> str:
    """Returns in words which turns or system message rows get that the split does not give them, nothing for none.

    The split's rows are of one shape, so that the first stands for all.

    Raises:
        UserError: they should, and there is no template for it, or no conversation to put the message into.
    """
    trained = recipe.model.tokenizer and recipe.model.tokenizer.train
    is_chat = recipe.data.render_as == "chat"
    if not trained and (recipe.model.base or is_chat):
        tokenizer = own_tokenizer.make(recipe, base, None)
        conversing.require_template(recipe, tokenizer)
        is_chat = conversing.applies(recipe, tokenizer)
    if not is_chat and recipe.data.system is None:
        return ""
    return conversing.changes(_first_row(run, split), recipe, chat=is_chat)


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
    name = run.storage.key(manifest.path(f"data/{split}/split", "train.jsonl"))
    with run.storage.translated(), run.storage.fs.open(name, "rb") as file:
        line = file.readline()
    return json.loads(line) if line else {"text": ""}
