"""Rows as the model sees them: tokens that can be read, what is trained, what is cut, what is not used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from baton.data import encoding, preview
from baton.models import loading
from baton.recipe.model import TrainTokenizer
from baton.runs.documents import PreviewRow, SourceLocation
from tests.support import tiny

PLACE = SourceLocation(file="rows.jsonl", line=1)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer that knows few words, so that most characters are several tokens."""
    path = tmp_path_factory.mktemp("seen") / "text.jsonl"
    path.write_text(json.dumps({"text": "the model learns what the assistant says"}) + "\n", encoding="utf-8")
    return encoding.train_bpe(str(path), TrainTokenizer(vocab_size=300), 64)


def looked_at(
    row: dict[str, Any], tokenizer: Any, base: str, most: int | None = None, **sections: Any
) -> list[PreviewRow]:
    recipe = tiny.recipe(base, **sections)
    return list(preview.preview_rows([(PLACE, "train", row)], recipe, tokenizer, most))


def trained(row: PreviewRow) -> str:
    """The text that is trained."""
    return "".join(span.text for span in row.spans if span.trained)


@given(st.text())
def test_tokens_together_are_the_text(tokenizer: Any, text: str) -> None:
    ids = tokenizer(text)["input_ids"]
    data = preview.bytes_of_tokens(ids, tokenizer)
    assert len(data) == len(ids)
    assert b"".join(data) == text.encode()


def test_half_a_character_is_shown_as_bytes(tokenizer: Any) -> None:
    ids = tokenizer("a漢")["input_ids"]
    assert [preview.readable(word) for word in preview.bytes_of_tokens(ids, tokenizer)] == [
        "a",
        "\\xe6",
        "\\xbc",
        "\\xa2",
    ]


def sentence_piece() -> PreTrainedTokenizerFast:
    """A tokenizer as Llama 2's: spaces as ▁, and bytes for what it does not know."""
    words = ["<unk>", "</s>", "▁", "▁the", "▁fox", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary = {word: at for at, word in enumerate(words)}
    made = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>", unk_token="<unk>")


def test_vocabularies_of_sentence_piece_and_of_words_can_be_read() -> None:
    llama = sentence_piece()
    ids = [3, 4, *(5 + byte for byte in "é".encode()), 1]
    words = [preview.readable(word) for word in preview.bytes_of_tokens(ids, llama)]
    assert words == [" the", " fox", "\\xc3", "\\xa9", "</s>"]
    assert b"".join(preview.bytes_of_tokens(ids, llama)).decode() == " the foxé</s>"

    made = Tokenizer(models.WordPiece({"[UNK]": 0, "fox": 1, "##es": 2}, unk_token="[UNK]"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece()
    bert = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]")
    assert preview.bytes_of_tokens([1, 2], bert)[0] == b"fox"


def test_a_conversation_is_shown_with_what_the_assistant_says_as_trained(tiny_base: str) -> None:
    messages = [
        {"role": "user", "content": "Wer?"},
        {"role": "assistant", "content": "Ich 🌉"},
        {"role": "user", "content": "Und?"},
        {"role": "assistant", "content": "Du."},
    ]
    tokenizer = loading.load_tokenizer(tiny_base)
    data = {"train_on": "assistant", "max_length": 512}
    (row,) = looked_at({"messages": messages}, tokenizer, tiny_base, data=data)
    (encoded,) = tiny.encoder(tiny.recipe(tiny_base, data=data), tokenizer)({"messages": messages})
    assert [token.id for token in row.tokens] == encoded["input_ids"]
    assert [token.trained for token in row.tokens] == [label != -100 for label in encoded["labels"]]
    assert row.text == tokenizer.apply_chat_template(messages, tokenize=False)
    assert "Ich 🌉" in trained(row)
    assert "Wer?" not in trained(row)
    assert (row.length, row.kept, row.learned) == (
        len(row.tokens),
        len(row.tokens),
        len(tokenizer.encode(trained(row))),
    )
    assert row.source == PLACE
    assert row.rejected is None


def test_what_is_too_long_is_cut_and_not_trained(tiny_base: str) -> None:
    tokenizer = loading.load_tokenizer(tiny_base)
    row = {"prompt": "What?", "completion": "the fox jumps " * 20}
    (cut,) = looked_at(row, tokenizer, tiny_base, data={"max_length": 16})
    assert cut.kept == 16 < cut.length == len(cut.tokens)
    assert not any(token.trained for token in cut.tokens[16:])
    assert [span.cut for span in cut.spans] == [False, False, True]
    assert cut.spans[2].tokens == cut.length - 16
    assert "".join(span.text for span in cut.spans) == cut.text == "What?\n" + row["completion"] + tokenizer.eos_token

    (joined,) = looked_at(row, tokenizer, tiny_base, data={"max_length": 16, "packing": True})
    assert joined.kept == joined.length
    (dropped,) = looked_at(row, tokenizer, tiny_base, data={"max_length": 16, "quality": {"truncation": "fix"}})
    assert dropped.rejected == f"{cut.length} tokens, data.max_length is 16"
    assert not dropped.learned


def test_pairs_are_two_sequences_and_prompts_none_that_is_trained(tiny_base: str) -> None:
    tokenizer = loading.load_tokenizer(tiny_base)
    chosen, rejected = looked_at(tiny.PAIRS[0], tokenizer, tiny_base, training={"method": "dpo"})
    assert [row.part for row in (chosen, rejected)] == ["chosen", "rejected"]
    for row, side in ((chosen, "chosen"), (rejected, "rejected")):
        assert row.text == tiny.PAIRS[0]["prompt"] + "\n" + tiny.PAIRS[0][side] + tokenizer.eos_token
        assert trained(row) == tiny.PAIRS[0][side] + tokenizer.eos_token

    rated = looked_at(tiny.PAIRS[0], tokenizer, tiny_base, training={"method": "kto"})
    assert [(row.part, row.label) for row in rated] == [("completion", True), ("completion", False)]

    training = {"method": "grpo", "grpo": {"rewards": "exact"}}
    (prompt,) = looked_at({"prompt": "What?", "answer": "3"}, tokenizer, tiny_base, training=training)
    assert (prompt.text, prompt.columns, prompt.learned) == ("What?\n", {"answer": "3"}, 0)


def test_of_a_long_row_its_beginning_and_where_training_begins_are_kept(tiny_base: str) -> None:
    tokenizer = loading.load_tokenizer(tiny_base)
    row = {"prompt": "who " * 300, "completion": "the fox jumps " * 100}
    (short,) = looked_at(row, tokenizer, tiny_base, most=200, data={"max_length": 4096})
    (whole,) = looked_at(row, tokenizer, tiny_base, data={"max_length": 4096})
    assert (short.length, short.kept, short.learned) == (whole.length, whole.kept, whole.learned)
    assert len(short.tokens) == 200
    assert short.tokens[:100] == whole.tokens[:100]
    begins = [token.trained for token in whole.tokens].index(True)
    assert short.tokens[100:] == whole.tokens[begins - preview.AROUND_TRAINED : begins - preview.AROUND_TRAINED + 100]
    assert [span.left_out for span in short.spans] == [False, True, False, False, True]
    assert sum(span.tokens for span in short.spans) == short.length


def test_a_row_that_the_template_refuses_is_told(tiny_base: str) -> None:
    tokenizer = loading.load_tokenizer(tiny_base)
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    messages = [{"role": "assistant", "content": "first"}]
    (row,) = looked_at({"messages": messages}, tokenizer, tiny_base)
    assert row.rejected == "the chat template refuses it: roles must alternate"


def test_the_stage_keeps_the_first_rows_and_a_document_is_read_back(tiny_base: str, tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps({"text": f"the fox {n}"}) + "\n" for n in range(9)), encoding="utf-8")
    rows = preview.first_previews(str(path), "train", tiny.recipe(tiny_base), loading.load_tokenizer(tiny_base))
    assert [row.source.line for row in rows] == [1, 2, 3]
    assert [PreviewRow.read(row.model_dump_json().encode(), "row") for row in rows] == rows
