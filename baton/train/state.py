"""The whole state of a trainer between two steps: its parts, their digests, and those that upstream does not save."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence

import torch
from transformers import DefaultFlowCallback, PrinterCallback, ProgressCallback, TrainerCallback
from transformers.integrations.integration_utils import KubeflowCallback
from transformers.trainer_callback import ExportableState

from baton.checkpoint.digest import tree_digest
from baton.checkpoint.store import LogEntry, combined
from baton.errors import ExactnessError
from baton.models import rng
from baton.runs.documents import PARTS
from baton.train.protocol import PER_RANK_PARTS, ChunkTrainer, StateDict

# State that `Trainer` does not save: running sums of logged values, and state of callbacks and method.
EXTRA_FILE = "baton_state.pt"
TIMED = ("step_time",)  # logged values that depend on the clock
# Transformers adds the last one where Kubeflow Trainer tracks progress: it remembers when it began.
STATELESS = (DefaultFlowCallback, PrinterCallback, ProgressCallback, KubeflowCallback)


def digests_of(trainer: ChunkTrainer) -> dict[str, str]:
    """Returns the digest of each part of the state in memory, and of all parts as `state`."""
    scaler = getattr(trainer.accelerator, "scaler", None)
    parts = {
        "weights": trained_weights(trainer.model),
        "optimizer": trainer.optimizer_state(),
        "scheduler": trainer.lr_scheduler.state_dict(),
        "scaler": None if scaler is None else dict(scaler.state_dict()),
        "rng": rng.capture(),
        "position": [trainer.state.global_step, trainer.state.epoch, trainer.state.max_steps, *trainer.skipped],
        "callbacks": callback_states(trainer),
        "log": [untimed(log_window(trainer)), values_logged(trainer.state.log_history)],
        "method": trainer.method_state(),
    }
    digests = {name: tree_digest(parts[name]) for name in PARTS}
    return {**digests, "state": combined(digests)}


def merge_rank_digests(
    rows: Sequence[Mapping[str, str]], *, replicated: bool, per_rank_parts: Sequence[str] = PER_RANK_PARTS
) -> dict[str, str]:
    """Joins the digests of each rank, in rank order; a part that is equal in all ranks counts once.

    `ExactnessError` if the state is replicated, and a part differs that is not one of `per_rank_parts`.
    """
    digests = {}
    for name in PARTS:
        values = [row[name] for row in rows]
        same = len(set(values)) == 1
        if not same and replicated and name not in per_rank_parts:
            other = next(rank for rank, value in enumerate(values) if value != values[0])
            raise ExactnessError(
                f"rank {other} has other {name} than rank 0; with training.parallel.strategy ddp all have the same.",
                remedy="A kernel, a callback or a hook computes something else in each process; leave it out.",
            )
        digests[name] = combine_ranks(values)
    return {**digests, "state": combined(digests)}


def combine_ranks(values: Sequence[str]) -> str:
    """Returns one digest for a part from those of all ranks; equal ones count once."""
    if len(set(values)) == 1:
        return values[0]
    split = "".join(f"{rank}={value};" for rank, value in enumerate(values))
    return hashlib.sha256(split.encode()).hexdigest()


def extra_file(rank: int) -> str:
    """Returns the name of a rank's `EXTRA_FILE`."""
    return EXTRA_FILE if rank == 0 else EXTRA_FILE.replace(".pt", f"_{rank}.pt")


def trained_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Returns the adapter's parameters, or every parameter and buffer of a model that is trained whole."""
    trained: dict[str, torch.Tensor] = {name: value for name, value in model.named_parameters() if value.requires_grad}
    frozen = any(not value.requires_grad for value in model.parameters())
    return trained if frozen else {**trained, **dict(model.named_buffers())}


def num_bytes(trainer: ChunkTrainer) -> int:
    """Returns a checkpoint's approximate bytes: saved weights, state of optimizer and method."""

    def size(value: object) -> int:  # for a tensor in ZeRO's partitions, that of the whole
        return sum(getattr(x, "ds_numel", x.numel()) * x.element_size() for x in _tensors(value))

    # If too low, the write fails for want of room and goes to the next place.
    whole = size([trained_weights(trainer.model), trainer.method_state()])
    return whole + trainer.num_parts() * size(trainer.optimizer_state()) + 2**20


def _tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(part)


def log_window(trainer: ChunkTrainer) -> StateDict:
    """Returns the running sums of values to be logged at a later step."""
    return {
        # Neither `Trainer` nor TRL saves these: without them the first average logged after a resume lacks the steps
        # before it, and the count of tokens begins at 0.
        "tr_loss": trainer._tr_loss.detach().cpu(),
        "globalstep_last_logged": trainer._globalstep_last_logged,
        "metrics": {mode: dict(values) for mode, values in trainer.windows.items()},
        "total_train_tokens": getattr(trainer, "_total_train_tokens", 0),
    }


def restore_log_window(trainer: ChunkTrainer, saved: StateDict) -> None:
    trainer._tr_loss = saved["tr_loss"].to(trainer.args.device)
    trainer._globalstep_last_logged = saved["globalstep_last_logged"]
    for mode, values in saved["metrics"].items():
        trainer.windows[mode].update({name: list(items) for name, items in values.items()})
    if hasattr(trainer, "_total_train_tokens"):
        trainer._total_train_tokens = saved["total_train_tokens"]


def untimed(window: StateDict) -> StateDict:
    metrics = {
        mode: {name: value for name, value in values.items() if name not in TIMED}
        for mode, values in window["metrics"].items()
    }
    return {**window, "metrics": metrics}


def values_logged(history: list[LogEntry]) -> list[LogEntry]:
    """Returns logged values without those that depend on the clock."""
    timed = ("_runtime", "_per_second", *TIMED)
    return [{key: value for key, value in entry.items() if not key.endswith(timed)} for entry in history]


def callback_states(trainer: ChunkTrainer) -> StateDict:
    return {
        key: callback.state_dict() if hasattr(callback, "state_dict") else callback.state()["attributes"]
        for key, callback in _stateful(trainer).items()
    }


def restore_callbacks(trainer: ChunkTrainer, saved: StateDict) -> None:
    """Restores the state of each callback in place; `KeyError` if the callbacks are not those of the checkpoint."""
    callbacks = _stateful(trainer)
    if callbacks.keys() != saved.keys():
        raise KeyError(f"callbacks with state are {sorted(callbacks)}, the checkpoint has {sorted(saved)}")
    for key, callback in callbacks.items():
        if hasattr(callback, "load_state_dict"):
            callback.load_state_dict(saved[key])
        else:
            vars(callback).update(saved[key])


def _stateful(trainer: ChunkTrainer) -> dict[str, TrainerCallback]:
    """Returns the callbacks with state, by class and position among its class."""
    stateful: dict[str, TrainerCallback] = {}
    for callback in trainer.callback_handler.callbacks:
        has_own = hasattr(callback, "state_dict") and hasattr(callback, "load_state_dict")
        if isinstance(callback, ExportableState) or has_own:
            name = type(callback).__name__
            # With the position: upstream's keys are classes alone, and two callbacks of one class overwrite each other.
            stateful[f"{name}#{sum(key.startswith(f'{name}#') for key in stateful)}"] = callback
    return stateful
