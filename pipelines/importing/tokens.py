"""The tokenizer as other trainers change it: tokens that are added, and those with a task."""

from __future__ import annotations

from baton.components.shared.recipe.model import SpecialTokens
from baton.pipelines.importing.draft import Draft
from baton.pipelines.importing.kinds import read, text, words

ROOT = "model.tokenizer"
SPECIAL = f"{ROOT}.special_tokens"
OTHERS = "additional_special_tokens"


def settle(draft: Draft, key: str) -> None:
    """Sets what a key of either trainer says of tokens."""
    value = draft.get(key)
    if not draft.has(key):
        draft.rest(key)
    elif key in ("special_tokens", "tokens") and isinstance(value, dict):
        _tasks(draft, key, value)
    elif key == "special_tokens":
        raise draft.wrong(key, "tokens by their tasks, such as pad_token")
    elif key in ("tokens", "add_tokens"):
        draft.put(f"{ROOT}.add_tokens", read(draft, key, words), key)
    elif key == "eot_tokens":
        _end_of_turn(draft, key)
    elif key == "added_tokens_overrides":
        _others(draft, key, list(value.values()) if isinstance(value, dict) else value)
        draft.changed(key, "new tokens at the end of the vocabulary; those in reserve stay as they are")
    else:
        _others(draft, key, read(draft, key, words))


def _tasks(draft: Draft, key: str, value: dict[object, object]) -> None:
    """Sets special tokens by their tasks, which axolotl names as Transformers does."""
    for name, token in value.items():
        if name == OTHERS and token:
            _others(draft, key, token)
        elif name not in SpecialTokens.model_fields:
            draft.left(key, f"{name}: Baton knows {', '.join(SpecialTokens.model_fields)}")
        elif token:
            draft.put(f"{SPECIAL}.{name}", _text(draft, key, token), key)
    if not draft.is_handled(key):
        draft.idle.append(key)


def _others(draft: Draft, key: str, value: object) -> None:
    if not isinstance(value, list):
        raise draft.wrong(key, "a list of tokens")
    known = draft.look(f"{SPECIAL}.{OTHERS}", [])
    draft.put(f"{SPECIAL}.{OTHERS}", [*known, *(_text(draft, key, token) for token in value)], key)


def _end_of_turn(draft: Draft, key: str) -> None:
    """Sets the token that ends an assistant's turn: the first one, of which there is one nearly always."""
    ends = read(draft, key, words, [])
    draft.put(f"{ROOT}.end_of_turn", ends[0], key)
    if ends[1:]:
        draft.changed(key, f"{ends[0]} ends a turn for whoever writes; the template says which token does in the rows")


def _text(draft: Draft, key: str, token: object) -> str:
    """Returns a token's text, which axolotl's files may hold with how it takes white space."""
    try:
        return text(token.get("content") if isinstance(token, dict) else token)
    except ValueError:
        raise draft.wrong(key, "tokens as text") from None
