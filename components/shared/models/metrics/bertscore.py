"""BERTScore (Zhang et al., arXiv:1904.09675): texts compared by an encoder's view of their tokens."""

from __future__ import annotations

import collections
import os
from collections.abc import Sequence
from typing import Any

from baton.components.shared.core.errors import UserError
from baton.components.shared.models import loading
from baton.components.shared.models.metrics.figures import mean
from baton.components.shared.models.metrics.texts import Scored

REMEDY = "Name an encoder such as FacebookAI/roberta-large, with weights as safetensors."


class BertScore:
    """The F1 of greedily matched tokens, without idf weights and without rescaling, computed by `bert-score`.

    The encoder is on the accelerator only while texts are compared.

    The layer is the one that `bert-score` recommends for the encoder, by the id or the folder's last part; the last one
    for an encoder that it does not know.

    Args:
        encoder: Hub id, folder or address in a store.
        batch_size: Texts per forward pass.

    Raises:
        UserError: the encoder cannot be had or is none.
    """

    def __init__(self, encoder: str, batch_size: int) -> None:
        from bert_score import utils

        self._utils, self._batch_size = utils, batch_size
        folder = loading.local_model(encoder)
        self._model, self.layers = self._load(encoder, folder)
        self._tokenizer = self._load_tokenizer(encoder, folder)
        self.signature = utils.get_hash(encoder.rstrip("/").rpartition("/")[2], self.layers, False, False, False, False)

    def __call__(self, completions: Sequence[str], references: Sequence[str]) -> Scored:
        """Returns the mean F1; 0 for a row where nothing was written."""
        rows = [at for at, (completion, truth) in enumerate(zip(completions, references, strict=True)) if truth.strip()]
        each: list[float | None] = [None] * len(references)
        for at in rows:
            each[at] = 0.0
        written = [at for at in rows if completions[at].strip()]
        if written:
            scores = self._scores([references[at] for at in written], [completions[at] for at in written])
            for at, value in zip(written, scores, strict=True):
                each[at] = value
        return Scored({"bertscore": mean(each)}, {"bertscore": self.signature})

    def _scores(self, references: list[str], completions: list[str]) -> list[float]:
        import torch

        weights: dict[int | None, float] = collections.defaultdict(lambda: 1.0)
        weights |= {self._tokenizer.sep_token_id: 0.0, self._tokenizer.cls_token_id: 0.0}  # as bert_score.score does
        device = "cuda" if torch.cuda.is_available() else "cpu"
        scored = self._utils.bert_cos_score_idf(
            self._model.to(device),
            references,
            completions,
            self._tokenizer,
            weights,
            batch_size=self._batch_size,
            device=device,
        )
        f1: list[float] = scored[:, 2].tolist()
        return f1

    def _load(self, encoder: str, folder: str) -> tuple[Any, int]:
        import torch
        from transformers import AutoConfig, AutoModel

        known = {name.rpartition("/")[2]: layers for name, layers in self._utils.model2layers.items()}
        try:
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
            layers = known.get(os.path.basename(encoder.rstrip("/")), config.num_hidden_layers)
            model = AutoModel.from_pretrained(
                folder,
                use_safetensors=True,
                trust_remote_code=False,
                num_hidden_layers=layers,
                dtype=torch.float32,
            )
        except (OSError, ValueError, AttributeError, KeyError) as error:
            reason = " ".join(str(error).split())[:200]
            raise UserError(
                f"evaluation.bertscore_model {encoder!r} cannot be used: {type(error).__name__}: {reason}",
                remedy=REMEDY,
            ) from None
        whole = hasattr(model, "encoder") and hasattr(model, "decoder")
        return (model.encoder if whole else model).eval(), layers

    def _load_tokenizer(self, encoder: str, folder: str) -> Any:
        tokenizer: Any = loading.load_tokenizer(folder)
        positions = getattr(self._model.config, "max_position_embeddings", None) or tokenizer.model_max_length
        reserved = 2 if getattr(self._model.config, "model_type", "") in ("roberta", "xlm-roberta", "camembert") else 0
        tokenizer.model_max_length = min(tokenizer.model_max_length, positions - reserved)
        if tokenizer.pad_token_id is None:
            raise UserError(
                f"evaluation.bertscore_model {encoder!r} has a tokenizer without padding.",
                remedy=REMEDY,
            )
        return tokenizer
