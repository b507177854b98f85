"""GGUF: every architecture gives its model back, the layout and the quantized bytes are those written down here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from baton.errors import BatonError, UserError
from baton.export import exportable, formats, parity
from baton.export.parity import ParityInputs, Reading
from baton.models import loading
from tests.support import tiny

INPUTS = ParityInputs([[5, 6, 7], list(range(9, 40))], 4)
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def _model(architecture: str, **changed: Any) -> Any:
    settings: dict[str, Any] = {
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "initializer_range": 0.3,
        "max_position_embeddings": 256,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": 1,
    }
    if architecture != "gpt2":
        settings |= {"num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": False}
    if architecture.startswith("gemma"):
        settings |= {"query_pre_attn_scalar": 16, "sliding_window": 8, "tie_word_embeddings": True}
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **(settings | changed)))
    for parameter in model.parameters():
        if parameter.ndim == 1:  # norms and biases that make a difference
            torch.nn.init.normal_(parameter.data, 0.0 if architecture.startswith("gemma") else 1.0, 0.2)
    return model.eval()


def _write(model: Any, base: str, folder: Path, kind: str) -> dict[str, str]:
    tokenizer = loading.load_tokenizer(base)
    return formats.write_gguf(model, tokenizer, base, str(folder / "m.gguf"), kind, name="m", license="mit")


def _read_back(model: Any, folder: Path) -> Any:
    config = AutoConfig.for_model(**formats.plain_config(model.config))
    return AutoModelForCausalLM.from_pretrained(folder, gguf_file="m.gguf", config=config, dtype=torch.float32)


def _require_same(found: Any, expected: Any) -> None:
    """Holds a model that was read back against one with just its weights, as the export's check does."""
    said = parity.make_reference(expected, INPUTS)
    parity.require_weights("m.gguf", parity.weight_digests(found), said.weights)
    followed = ParityInputs(INPUTS.prompts, INPUTS.num_tokens, [answer.tokens for answer in said.answers])
    reading = Reading(parity.ask_model(found, followed), {"library": "gguf"})
    parity.compare("gguf", reading, said, said.rounding)


@pytest.mark.parametrize("architecture", exportable.GGUF_NAMES)
def test_weights_come_back_bit_for_bit(architecture: str, tiny_base: str, tmp_path: Path) -> None:
    model = _model(architecture)
    _write(model, tiny_base, tmp_path, "f32")
    found, expected = _read_back(model, tmp_path), formats.dequantized(model, "f32")
    _require_same(found, expected)
    if architecture.startswith("gemma"):  # 1 is added to its norms in the file, and taken off again
        for name, value in model.state_dict().items():
            torch.testing.assert_close(found.state_dict()[name], value, rtol=0, atol=2**-22, msg=name)
    else:
        assert parity.weight_digests(found) == parity.weight_digests(model)
    found.get_input_embeddings().weight.data[5, 0] += 2**-20
    with pytest.raises(BatonError, match="the trained weights in"):
        _require_same(found, expected)


@pytest.mark.parametrize("kind", ["f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0"])
def test_fewer_bits_give_the_model_with_the_rounded_weights(kind: str, tiny_base: str, tmp_path: Path) -> None:
    model = _model("llama", hidden_size=80, head_dim=20)  # rows of 80 are no whole number of blocks
    hashes = _write(model, tiny_base, tmp_path, kind)
    types = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    assert types["blk.0.ffn_down.weight"] == kind.upper()  # 96 columns
    assert types["blk.0.attn_q.weight"] == ("F16" if kind.startswith("q") else kind.upper())
    assert types["output_norm.weight"] == "F32"
    assert hashes.keys() == types.keys()
    found = _read_back(model, tmp_path)
    _require_same(found, formats.dequantized(model, kind))
    with pytest.raises(BatonError, match="the trained weights in"):
        _require_same(found, model)


def test_a_block_of_eight_bits_by_hand(tiny_base: str, tmp_path: Path) -> None:
    model = _model("llama")
    row = torch.zeros(96)
    row[0], row[1], row[2] = 127.0, -127.0, 63.4  # the largest is 127, so the scale is 1
    model.model.layers[0].mlp.down_proj.weight.data[0] = row
    _write(model, tiny_base, tmp_path, "q8_0")
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    first = tensors["blk.0.ffn_down.weight"].data[0].tobytes()
    assert first[:34] == bytes.fromhex("003c7f813f") + bytes(29)  # 1.0 in half precision, 127, -127, 63
    assert first[34:102] == bytes(68)


def test_rows_of_a_rotary_projection_by_hand() -> None:
    there, back = formats._rotary(2)
    values = np.arange(8.0)[:, None]  # two heads of four: row i turns with row i + 2
    assert there(values)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert np.array_equal(back(there(values)), values)


@pytest.mark.parametrize(
    "rope",
    [
        pytest.param(LLAMA3, id="llama3"),
        pytest.param({"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}, id="linear"),
    ],
)
def test_scaled_positions_are_written(rope: dict[str, Any], tiny_base: str, tmp_path: Path) -> None:
    model = _model("llama", rope_parameters=rope)
    _write(model, tiny_base, tmp_path, "f32")
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    factors = {tensor.name: tensor.data.tolist() for tensor in reader.tensors}.get("rope_freqs.weight")
    if rope["rope_type"] == "linear":
        assert factors is None
        assert reader.fields["llama.rope.scaling.factor"].contents() == 4.0
        return
    # Wavelengths are 2π·500000^(i/8): 6.3 is below 64/4 and stays, 32 lies between 64/4 and 64, 167 and more above.
    assert factors is not None
    assert factors[0] == 1.0
    assert 1.0 < factors[1] < 8.0
    assert [round(factor, 4) for factor in factors[2:]] == [8.0] * 6


@pytest.mark.parametrize(
    ("architecture", "changed", "said"),
    [
        ("llama", {"hidden_act": "gelu"}, "the activation 'gelu', not 'silu'"),
        ("gpt2", {"activation_function": "relu"}, "the activation 'relu', not 'gelu_new'"),
        ("gemma2", {"query_pre_attn_scalar": 32}, "query_pre_attn_scalar 32"),
        ("gemma3_text", {"layer_types": ["full_attention", "sliding_attention"]}, "other places than every 6th"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}},
            "position embeddings of type 'dynamic'",
        ),
    ],
    ids=["activation", "gpt2-activation", "attention-scale", "layers", "positions"],
)
def test_what_llama_cpp_computes_otherwise_is_refused(
    architecture: str, changed: dict[str, Any], said: str, tiny_base: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=said):
        _write(_model(architecture, **changed), tiny_base, tmp_path, "f32")


def test_the_vocabulary_by_hand(tiny_base: str, tmp_path: Path) -> None:
    _write(_model("llama", vocab_size=302), tiny_base, tmp_path, "f32")
    fields = gguf.GGUFReader(tmp_path / "m.gguf").fields
    tokens, kinds = fields["tokenizer.ggml.tokens"].contents(), fields["tokenizer.ggml.token_type"].contents()
    assert fields["tokenizer.ggml.model"].contents() == "gpt2"
    assert fields["tokenizer.ggml.pre"].contents() == "gpt-2"
    assert tokens[:5] == ["<|end|>", "<|pad|>", "<|im_start|>", "<|im_end|>", "!"]
    assert tokens[300:] == ["[PAD300]", "[PAD301]"]
    assert kinds[:5] == [3, 3, 3, 3, 1]  # control, normal
    assert kinds[300:] == [5, 5]  # unused
    assert fields["tokenizer.ggml.eos_token_id"].contents() == 0
    assert fields["tokenizer.ggml.padding_token_id"].contents() == 1
    assert fields["tokenizer.ggml.add_bos_token"].contents() is False
    assert len(fields["tokenizer.ggml.merges"].contents()) == 300 - 4 - 256
    template = fields["tokenizer.chat_template"].contents()
    assert "generation %" not in template
    assert "<|im_start|>assistant" in template


def test_tokens_that_a_run_added_are_in_the_vocabulary(tiny_base: str, tmp_path: Path) -> None:
    changes = {
        "add_tokens": ["value", "<end>"],
        "special_tokens": {"bos_token": "<s>", "eos_token": "<eos>"},
        "end_of_turn": "<end>",
    }
    recipe = tiny.recipe(tiny_base, model={"base": tiny_base, "tokenizer": changes})
    loading.build_tokenizer(recipe, tiny_base).save_pretrained(tmp_path)
    tokenizer = loading.load_tokenizer(str(tmp_path))
    model = _model("llama", vocab_size=len(tokenizer))
    formats.write_gguf(model, tokenizer, str(tmp_path), str(tmp_path / "m.gguf"), "f32", name="m")
    fields = gguf.GGUFReader(tmp_path / "m.gguf").fields
    assert fields["tokenizer.ggml.tokens"].contents()[300:] == ["value", "<end>", "<s>", "<eos>"]
    assert fields["tokenizer.ggml.token_type"].contents()[300:] == [4, 3, 3, 3]  # by the user, control
    for name, number in (("eot", 301), ("bos", 302), ("eos", 303), ("padding", 1)):
        assert fields[f"tokenizer.ggml.{name}_token_id"].contents() == number


def test_sentencepiece_scores_follow_the_merges() -> None:
    document = {
        "model": {
            "byte_fallback": True,
            "unk_token": "<unk>",
            "vocab": {"<unk>": 0, "<0x0A>": 1, "▁": 2, "a": 3, "b": 4, "ab": 5, "▁ab": 6},
            "merges": [["a", "b"], "▁ ab"],
        },
        "added_tokens": [
            {"id": 0, "content": "<unk>", "special": True},
            {"id": 7, "content": "<me>", "special": False},
        ],
    }
    texts, kinds = formats._gguf_tokens(document, 8)
    assert texts == ["<unk>", "<0x0A>", "▁", "a", "b", "ab", "▁ab", "<me>"]
    assert kinds == [2, 6, 1, 1, 1, 1, 1, 4]  # unknown, byte, normal, of the user
    lowest = formats.LOWEST_SCORE
    assert formats._gguf_scores(document, texts) == [lowest] * 5 + [0.0, -1.0, lowest]


_LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)


@pytest.mark.parametrize(
    ("pattern", "name"),
    [(_LLAMA_3, "llama-bpe"), (_LLAMA_3.replace("{1,3}", ""), "qwen2"), (r"\p{L}+", None)],
    ids=["llama-3", "qwen-2", "unknown"],
)
def test_how_text_is_split_has_a_name(pattern: str, name: str | None) -> None:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    document = {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, level]}}
    if name:
        assert formats._split_name(document) == name
    else:
        with pytest.raises(UserError, match="GPT-2, Llama 3, Qwen 2 and SmolLM"):
            formats._split_name(document)


def test_a_unigram_tokenizer_is_refused(tiny_base: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"type": "Unigram"}}), encoding="utf-8")
    writer = gguf.GGUFWriter(None, "llama")
    with pytest.raises(UserError, match="BPE, not Unigram"):
        formats.add_vocabulary(writer, loading.load_tokenizer(tiny_base), str(tmp_path), 8)
