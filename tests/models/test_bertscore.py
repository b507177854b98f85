"""BERTScore: that of the package's own scorer, on a tiny encoder, and what the package cannot do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, BertModel, BertTokenizer

from baton.errors import UserError
from baton.models.metrics import BertScore

WORDS = (
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    "the",
    "cat",
    "sat",
    "on",
    "mat",
    "dog",
    "a",
    "is",
    "##s",
    "##at",
)
WRITTEN = ["the cat sat", "a dog", "the cat sat on the mat", "", "a cat"]
TRUTH = ["the cat sat on the mat", "a cat is the dog", "the cat sat on the mat", "a dog", ""]


def save_encoder(folder: Path, kind: Any = BertModel, seed: int = 0) -> str:
    """Saves a BERT of three blocks with random weights and its tokenizer."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32, "max_position_embeddings": 32}
    kind(BertConfig(vocab_size=len(WORDS), num_hidden_layers=3, **sizes)).save_pretrained(folder)
    BertTokenizer(vocab={word: at for at, word in enumerate(WORDS)}).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("batch_size", [1, 64])
def test_scores_are_those_of_the_package(batch_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bert_score = pytest.importorskip("bert_score")
    encoder = save_encoder(tmp_path / "encoder")
    (tmp_path / "encoder/tokenizer_config.json").write_text(
        '{"tokenizer_class": "BertTokenizer", "model_max_length": 32}', encoding="utf-8"
    )
    rows = [0, 1, 2]
    monkeypatch.chdir(tmp_path)  # a path with "t5" in it is a T5 to the package
    said, truth = [WRITTEN[at] for at in rows], [TRUTH[at] for at in rows]
    (_, _, theirs), signature = bert_score.score(said, truth, model_type="encoder", num_layers=3, return_hash=True)
    scored = BertScore(encoder, batch_size)(WRITTEN, TRUTH)
    each = scored.figures["bertscore"].each
    assert [each[at] for at in rows] == pytest.approx(theirs.tolist(), abs=1e-5)
    assert each[2] == pytest.approx(1.0), "the same text"
    assert each[3:] == [0.0, None], "nothing written, and nothing to compare with"
    assert scored.signatures == {"bertscore": signature}


def test_the_layer_is_the_one_recommended_for_an_encoder_by_its_name(tmp_path: Path) -> None:
    """The package takes the first of this encoder's two layers; here three blocks are cut to one."""
    bert_score = pytest.importorskip("bert_score")
    encoder = save_encoder(tmp_path / "bert_uncased_L-2_H-512_A-8")
    known = bert_score.utils.model2layers["google/bert_uncased_L-2_H-512_A-8"]
    scorer = BertScore(encoder, 4)
    assert scorer.layers == known == 1
    assert scorer._model.config.num_hidden_layers == 1
    weights = {at: float(word not in ("[CLS]", "[SEP]")) for at, word in enumerate(WORDS)}
    cut = bert_score.utils.get_model(save_encoder(tmp_path / "whole"), 1)
    theirs = bert_score.utils.bert_cos_score_idf(cut, TRUTH[:1], WRITTEN[:1], scorer._tokenizer, weights, device="cpu")
    assert scorer(WRITTEN[:1], TRUTH[:1]).figures["bertscore"].value == pytest.approx(float(theirs[0, 2]), abs=1e-5)


def test_a_long_text_is_cut_where_the_encoder_ends(tmp_path: Path) -> None:
    """The encoder has 32 positions; from there on the texts do not differ for it."""
    scorer = BertScore(save_encoder(tmp_path / "encoder"), 4)
    scored = scorer(["the cat " * 100 + "sat"], ["the cat " * 100 + "is a dog"])
    assert scored.figures["bertscore"].value == pytest.approx(1.0)


def test_any_model_with_a_hidden_state_will_do_and_a_folder_without_one_will_not(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"evaluation.bertscore_model .*empty' cannot be used"):
        BertScore(str(tmp_path / "empty"), 4)
    classifier = save_encoder(tmp_path / "classifier", BertForSequenceClassification)
    assert BertScore(classifier, 4)(["a dog"], ["a dog"]).figures["bertscore"].value == pytest.approx(1.0)
