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

from baton.checkpoint.digest import tree_digest
from baton.errors import ExactnessError
from baton.runs.documents import PARTS
from baton.train import state


class Counting(TrainerCallback):
    """A user's callback with state of its own."""

    def __init__(self, start: int) -> None:
        self.count = torch.tensor(start)

    def state_dict(self) -> dict[str, Any]:
        """Returns the count."""
        return {"counted": self.count}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Takes the count."""
        self.count = saved["counted"]


class Told(TrainerCallback):
    """A user's callback whose state is told and never restored: none of a checkpoint's."""

    def state_dict(self) -> dict[str, Any]:
        """Returns what it is told for."""
        return {"told": 1}


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
    saved = state.callback_states(_trainer(tmp_path, Counting(1), Told(), Counting(2), early))
    assert {name: set(kept) for name, kept in saved.items() if name.startswith(("Count", "Told", "Early"))} == {
        "Counting#0": {"counted"},
        "Counting#1": {"counted"},
        "EarlyStoppingCallback#0": {"early_stopping_patience_counter"},
    }
    counting = Counting(0), Counting(0)
    fresh_early = EarlyStoppingCallback(3)
    fresh = _trainer(tmp_path, *counting, fresh_early)
    state.restore_callbacks(fresh, saved)
    assert [int(callback.count) for callback in counting] == [1, 2]
    assert fresh_early.early_stopping_patience_counter == 2
    assert tree_digest(state.callback_states(fresh)) == tree_digest(saved)


def test_callbacks_that_do_not_fit_the_checkpoint_are_an_error(tmp_path: Any) -> None:
    saved = state.callback_states(_trainer(tmp_path, Counting(1)))
    with pytest.raises(KeyError, match="Counting#0"):
        state.restore_callbacks(_trainer(tmp_path), saved)


def test_logged_values_do_not_count_the_clock() -> None:
    history = [{"step": 1, "loss": 2.0, "eval_runtime": 0.3, "eval_samples_per_second": 9.0}]
    assert state.values_logged(history) == [{"step": 1, "loss": 2.0}]


def test_frozen_weights_do_not_count_and_buffers_of_a_full_model_do(tmp_path: Any) -> None:
    model = _trainer(tmp_path).model
    everything = set(state.trained_weights(model))
    assert {name for name, _ in model.named_parameters()} < everything
    model.lm_head.weight.requires_grad_(False)
    assert set(state.trained_weights(model)) == {name for name, _ in model.named_parameters()} - {"lm_head.weight"}


def test_the_digest_of_all_parts_is_that_of_all_releases() -> None:
    """Checkpoints of older releases are compared with it."""
    letters = {name: name[0] for name in reversed(PARTS)}
    assert state.combined(letters) == "08212cb97f5888b3488955388be09a8e5e6cd533af2611000e593630f05edf80"
    assert state.combine_ranks(["a", "b", "a"]) == "444b4e02d66232f49d6834bd781d9811ee45973c34f4a5566c5a2b269be3dcb3"
    assert state.combine_ranks(["a", "a"]) == "a"


def _rows(**other: str) -> list[dict[str, str]]:
    """Returns the digests of two ranks, of which the second has some others."""
    first = dict.fromkeys(PARTS, "d")
    return [first, {**first, **other}]


def test_digests_of_ranks_are_joined_part_by_part() -> None:
    assert state.merge_rank_digests(_rows(), replicated=True) == {**_rows()[0], "state": state.combined(_rows()[0])}
    joined = state.merge_rank_digests(_rows(rng="e"), replicated=True)
    assert joined["rng"] == state.combine_ranks(["d", "e"])
    assert joined["weights"] == "d"
    assert joined["state"] == state.combined({name: joined[name] for name in PARTS})
    with pytest.raises(ExactnessError, match=r"rank 1 has other weights than rank 0"):
        state.merge_rank_digests(_rows(weights="e"), replicated=True)
    assert state.merge_rank_digests(_rows(weights="e"), replicated=False)["weights"] == state.combine_ranks(["d", "e"])
    with pytest.raises(ExactnessError, match=r"rank 1 has other rng than rank 0"):
        state.merge_rank_digests(_rows(rng="e"), replicated=True, per_rank_parts=())


def test_each_rank_but_the_first_has_a_file_of_its_own() -> None:
    assert [state.extra_file(rank) for rank in range(3)] == ["baton_state.pt", "baton_state_1.pt", "baton_state_2.pt"]


def test_a_log_window_is_restored_as_it_was(tmp_path: Any) -> None:
    trainer, fresh = _trainer(tmp_path), _trainer(tmp_path)
    for each, loss in ((trainer, 3.0), (fresh, 0.0)):
        each._tr_loss, each._globalstep_last_logged = torch.tensor(loss), int(loss)
        each._metrics = {"train": {"entropy": [loss], "step_time": [0.5]}, "eval": {}}
        each._total_train_tokens = int(loss)
        each.windows = each._metrics
    saved = state.log_window(trainer)
    assert saved == {
        "tr_loss": torch.tensor(3.0),
        "globalstep_last_logged": 3,
        "metrics": {"train": {"entropy": [3.0], "step_time": [0.5]}, "eval": {}},
        "total_train_tokens": 3,
    }
    state.restore_log_window(fresh, saved)
    assert state.log_window(fresh) == saved
    fresh.windows["train"]["entropy"].append(1.0)
    assert saved["metrics"]["train"]["entropy"] == [3.0], "a list of its own"
    assert state.untimed(saved)["metrics"] == {"train": {"entropy": [3.0]}, "eval": {}}
    del fresh._total_train_tokens
    assert state.log_window(fresh)["total_train_tokens"] == 0
    state.restore_log_window(fresh, saved)
    assert not hasattr(fresh, "_total_train_tokens")


def test_the_bytes_of_a_checkpoint_are_about_those_of_its_tensors() -> None:
    class Trainer:
        model = torch.nn.Linear(10, 10)

        def method_state(self) -> dict[str, Any]:
            return {"kept": [torch.zeros(7, dtype=torch.float64), {"more": torch.zeros(3)}], "number": 3}

        def optimizer_state(self) -> dict[str, Any]:
            return {"state": ({"exp_avg": torch.zeros(110)},)}

        def num_parts(self) -> int:
            return 2

    assert state.num_bytes(Trainer()) == 110 * 4 + 7 * 8 + 3 * 4 + 2 * 110 * 4 + 2**20
