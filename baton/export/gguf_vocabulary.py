"""A tokenizer as GGUF knows it: byte-level BPE, or SentencePiece's BPE with single bytes to fall back on."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from baton.errors import UserError
from baton.models import vocabulary

if TYPE_CHECKING:
    from gguf import GGUFWriter
    from transformers import PreTrainedTokenizerBase

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_MODERN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {_GPT2: "gpt-2", _MODERN % r"\p{N}{1,3}": "llama-bpe", _MODERN % r"\p{N}": "qwen2"}
"""How text is split before it is encoded → the name under which llama.cpp knows that."""

_GENERATION = re.compile(r"{%(-?)\s*(?:end)?generation\s*(-?)%}")
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
LOWEST_SCORE = -1e6
"""Of a token that no merge makes."""


def add(writer: GGUFWriter, tokenizer: PreTrainedTokenizerBase, folder: str, vocab_size: int) -> None:
    """Writes the vocabulary, merges, special tokens and chat template.

    Args:
        writer: Of the file.
        tokenizer: The tokenizer.
        folder: Where its files are.
        vocab_size: Rows of the model's embedding; names are made up for those without a token.

    Raises:
        UserError: the tokenizer is of a kind that llama.cpp does not have.
    """
    import gguf

    file = Path(folder) / "tokenizer.json"
    document = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {"model": {"type": "without file"}}
    pieces = document["model"].get("byte_fallback", False)
    if document["model"]["type"] != "BPE":
        raise UserError(
            f"export.formats: gguf holds tokenizers of type BPE, not {document['model']['type']}.",
            remedy="Leave gguf out.",
        )
    writer.add_tokenizer_model("llama" if pieces else "gpt2")
    writer.add_tokenizer_pre("default" if pieces else _split_name(document))
    texts, kinds = _tokens(document, vocab_size)
    writer.add_token_list(texts)
    writer.add_token_types(kinds)
    if pieces:
        writer.add_token_scores(_scores(document, texts))
        writer.add_add_space_prefix(tokenizer.tokenize("a")[0].startswith("▁"))
    special = gguf.SpecialVocab(folder, load_merges=not pieces, n_vocab=vocab_size)
    ids = tokenizer("a")["input_ids"]
    special.add_special_token = {"bos": ids[0] == tokenizer.bos_token_id, "eos": ids[-1] == tokenizer.eos_token_id}
    if isinstance(special.chat_template, str):
        special.chat_template = _GENERATION.sub(r"{#\1 \2#}", special.chat_template)  # a tag of Transformers alone
    special.add_to_gguf(writer, quiet=True)
    if (end := vocabulary.end_of_turn(tokenizer)) is not None:
        writer.add_eot_token_id(end)


def _split_name(document: dict[str, Any]) -> str:
    """Returns llama.cpp's name for how a byte-level tokenizer splits text."""
    pre_tokenizer = document.get("pre_tokenizer") or {}
    parts = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    kinds = [part.get("type") for part in parts]
    if kinds == ["ByteLevel"] and parts[0].get("use_regex", True) and not parts[0]["add_prefix_space"]:
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and parts[0]["individual_digits"] and parts[1].get("use_regex", True):
        return "smollm"
    if kinds == ["Split", "ByteLevel"] and not parts[1].get("use_regex", True):
        name = SPLITS.get(parts[0]["pattern"].get("Regex", ""))
        if name and parts[0]["behavior"] == "Isolated" and not parts[0]["invert"]:
            return name
    raise UserError(
        "export.formats: gguf knows the ways in which GPT-2, Llama 3, Qwen 2 and SmolLM split text, not this "
        f"tokenizer's: {json.dumps(pre_tokenizer, ensure_ascii=False)[:200]}.",
        remedy="Leave gguf out.",
    )


def _tokens(document: dict[str, Any], vocab_size: int) -> tuple[list[str], list[int]]:
    """Returns text and type of each token, by id."""
    from gguf import TokenType

    texts = [f"[PAD{number}]" for number in range(vocab_size)]
    kinds = [int(TokenType.UNUSED)] * vocab_size
    unknown = document["model"].get("unk_token")
    for text, number in document["model"]["vocab"].items():
        texts[number] = text
        kinds[number] = TokenType.NORMAL
        if document["model"].get("byte_fallback") and _BYTE.fullmatch(text):
            kinds[number] = TokenType.BYTE
    for token in document.get("added_tokens", []):
        texts[token["id"]] = token["content"]
        kinds[token["id"]] = TokenType.CONTROL if token["special"] else TokenType.USER_DEFINED
        if token["content"] == unknown:
            kinds[token["id"]] = TokenType.UNKNOWN
    return texts, kinds


def _scores(document: dict[str, Any], texts: list[str]) -> list[float]:
    """Returns a score for each token: SentencePiece joins what makes the token with the highest, so earlier merges
    score higher."""
    scores: dict[str, float] = {}
    for rank, merge in enumerate(document["model"]["merges"]):
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        scores.setdefault(left + right, -float(rank))
    return [scores.get(text, LOWEST_SCORE) for text in texts]
