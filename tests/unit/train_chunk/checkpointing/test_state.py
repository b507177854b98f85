"""State that `Trainer` forgets: callbacks by instance, and sums of values that are logged later."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    EarlyStoppingCallback,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from baton.components.train_chunk.checkpointing import state


class Counting(TrainerCallback):
    """A user's callback with state of its own."""

    def __init__(self, start: int) -> None:
        self.count = torch.tensor(start)

    def state_dict(self) -> dict[str, Any]:
        """Returns the count."""
        return {"count": self.count}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Takes the count."""
        self.count = saved["count"]


class Forgetful(TrainerCallback):
    """A callback with no way to save what it keeps."""


def _trainer(tmp_path: Any, *callbacks: TrainerCallback) -> Trainer:
    config = LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, bos_token_id=None
    )
    arguments = TrainingArguments(str(tmp_path), report_to="none", eval_strategy="steps", eval_steps=1)
    rows = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}]
    return Trainer(
        LlamaForCausalLM(config), arguments, train_dataset=rows, eval_dataset=rows, callbacks=list(callbacks)
    )


def test_two_callbacks_of_one_class_keep_their_own_state(tmp_path: Any) -> None:
    early = EarlyStoppingCallback(3)
    early.early_stopping_patience_counter = 2
    saved = state.callback_states(_trainer(tmp_path, Counting(1), Counting(2), early))
    counting = Counting(0), Counting(0)
    fresh_early = EarlyStoppingCallback(3)
    fresh = _trainer(tmp_path, *counting, fresh_early)
    state.restore_callbacks(fresh, saved)
    assert [int(callback.count) for callback in counting] == [1, 2]
    assert fresh_early.early_stopping_patience_counter == 2
    assert state.tree_digest(state.callback_states(fresh)) == state.tree_digest(saved)


def test_callbacks_that_do_not_fit_the_checkpoint_are_an_error(tmp_path: Any) -> None:
    saved = state.callback_states(_trainer(tmp_path, Counting(1)))
    with pytest.raises(KeyError, match="Counting#0"):
        state.restore_callbacks(_trainer(tmp_path), saved)


def test_a_callback_without_state_dict_is_named(tmp_path: Any) -> None:
    assert state.without_state(_trainer(tmp_path, Counting(1), Forgetful())) == ["Forgetful"]


def test_logged_values_do_not_count_the_clock() -> None:
    history = [{"step": 1, "loss": 2.0, "eval_runtime": 0.3, "eval_samples_per_second": 9.0}]
    assert state.values_logged(history) == [{"step": 1, "loss": 2.0}]


def test_frozen_weights_do_not_count_and_buffers_of_a_full_model_do(tmp_path: Any) -> None:
    model = _trainer(tmp_path).model
    everything = set(state.trained_weights(model))
    assert {name for name, _ in model.named_parameters()} < everything
    model.lm_head.weight.requires_grad_(False)
    assert set(state.trained_weights(model)) == {name for name, _ in model.named_parameters()} - {"lm_head.weight"}
