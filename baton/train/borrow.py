"""Borrows a trainer for one chunk: class, samplers, arguments and torch's modes, given back at its end.

Rows and batches are drawn by seed and epoch alone, wherever upstream has no rule.
"""

import contextlib
import functools
import hashlib
from collections.abc import Callable, Iterator
from typing import Any, cast

import datasets
import torch
import transformers
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, Sampler, SequentialSampler
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainerState
from transformers.trainer_utils import SaveStrategy
from trl.trainer.utils import RepeatSampler

from baton.errors import ExactnessError
from baton.models import hooks
from baton.recipe.recipe import Recipe
from baton.train import imports
from baton.train.generation import ResumableGeneration
from baton.train.methods import AllCounted
from baton.train.protocol import ChunkTrainer, StateDict
from baton.train.references import MovingReference
from baton.train.trainer import ExactResume, exact_class

FIXED = (SequentialSampler, RepeatSampler)  # samplers that draw nothing, and TRL's, which `ResumableGeneration` seeks


class EpochSeededSampler(Sampler[int]):
    """A sampler whose order in an epoch depends on seed and epoch alone."""

    def __init__(self, sampler: Sampler[int], seed: int) -> None:
        self.sampler, self.seed = sampler, seed
        self.epoch = self._drawn = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.sampler)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[int]:
        order: list[int] = []
        # A sampler with a generator of its own must be where an uninterrupted process has it: draw and drop the orders
        # of earlier epochs. So it must be fresh.
        while self._drawn <= self.epoch:
            with hooks.seeded(_number(self.seed, "order", self._drawn)):
                order = list(self.sampler)
            self._drawn += 1
        return iter(order)


def exact_sampler(sampler: Sampler[int] | None, seed: int, *, seedable: bool) -> Sampler[int] | None:
    """Returns a sampler whose order does not depend on earlier draws of this process; the same one if it is such."""
    if sampler is None or isinstance(sampler, FIXED) or hasattr(sampler, "set_epoch"):
        return sampler
    if type(sampler) is RandomSampler and seedable and sampler.generator is None:
        return sampler  # Accelerate puts its own in its place, whose order is a function of the epoch
    if isinstance(sampler, BatchSampler):
        raise ExactnessError(f"{type(sampler).__name__} has no set_epoch: its order cannot be resumed.")
    return EpochSeededSampler(sampler, seed)


class SeededRows(Dataset[Any]):
    """Rows of a dataset that may draw random numbers, each drawn from seed, epoch and index."""

    def __init__(self, rows: Any, seed: int) -> None:
        self.rows, self.seed, self.epoch = rows, seed, 0

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int) -> Any:
        with hooks.seeded(_number(self.seed, "row", self.epoch, index)):
            return self.rows[index]


class SeededTransform:
    """A transform of rows that may draw random numbers, drawn from seed, epoch and the rows' content."""

    def __init__(self, transform: Callable[[Any], Any], seed: int) -> None:
        self.transform, self.seed, self.epoch = transform, seed, 0

    def __call__(self, rows: Any) -> Any:
        with hooks.seeded(_number(self.seed, "rows", self.epoch, rows)):
            return self.transform(rows)


Seeded = SeededRows | SeededTransform  # draws for rows, and must be told the epoch


def seeded_rows(rows: Any, seed: int) -> tuple[Any, Seeded | None]:
    """Returns rows whose draws follow from seed and epoch, and the object that must be told the epoch, if any."""
    if isinstance(rows, datasets.Dataset):
        if rows.format["type"] != "custom":
            return rows, None
        transform = SeededTransform(rows.format["format_kwargs"]["transform"], seed)
        return rows.with_transform(transform, columns=rows.format["columns"]), transform
    wrapped = SeededRows(rows, seed)
    return wrapped, wrapped


class OnePass(TrainerCallback):
    """Ends training where a stream is begun once more: its place cannot be told from the number of steps any more."""

    stateless = True

    def __init__(self) -> None:
        self._passes = 0

    def on_epoch_begin(self, args: object, state: TrainerState, *_: object, **__: object) -> None:
        self._passes += 1
        if self._passes > 1:
            raise ExactnessError(
                f"the stream of rows ended at step {state.global_step} of {state.max_steps}, and a "
                "second pass over it cannot be resumed exactly.",
                remedy="Let the stream itself repeat: train_dataset.repeat(n), or a lower max_steps.",
            )


def _number(*parts: object) -> int:
    return int.from_bytes(hashlib.sha256(":".join(map(repr, parts)).encode()).digest()[:4], "big")


# State between steps of trainers whose model generates: name in a checkpoint → attribute.
BUFFERS = {"step": "_step", "completions": "_buffered_inputs"}


class AttachedTrainer(ChunkTrainer):
    """Mixin for a `Trainer` built without Baton: draws rows exactly, and drops steps that only recipes ask for."""

    drawing: tuple[Seeded, ...] = ()
    _writing = False

    def _get_train_sampler(self, *arguments: Any, **options: Any) -> Any:
        # transformers 5.23: its samplers may draw from the global state, which a resumed process has in another place.
        sampler = super()._get_train_sampler(*arguments, **options)
        seedable = bool(getattr(self.accelerator, "use_seedable_sampler", True))
        return exact_sampler(sampler, self.args.seed, seedable=seedable)

    def _get_dataloader(self, dataset: Any, *arguments: Any, **options: Any) -> DataLoader[Any]:
        # transformers 5.23: rows may draw random numbers as they are fetched.
        if options.get("is_training") and not isinstance(dataset, torch.utils.data.IterableDataset):
            dataset, drawn = seeded_rows(dataset, self.args.seed)
            self.drawing = (drawn,) if drawn else ()
        return super()._get_dataloader(dataset, *arguments, **options)

    def _determine_best_metric(self, metrics: dict[str, float], trial: object) -> bool:
        # transformers 5.23 notes the best step only where it decides itself when to save.
        is_best: bool = super()._determine_best_metric(metrics, trial)
        if is_best:
            self.state.best_global_step = self.state.global_step
        return is_best

    def write_checkpoint(self, model: torch.nn.Module, trial: object) -> None:
        self._writing = True
        try:
            super().write_checkpoint(model, trial)
        finally:
            self._writing = False

    def create_model_card(self, *arguments: Any, **options: Any) -> None:
        """Writes none to a checkpoint, and elsewhere what TRL writes."""
        if not self._writing:
            super(ExactResume, cast(ExactResume, self)).create_model_card(*arguments, **options)

    def _prepare_dataset(self, *arguments: Any, **options: Any) -> Any:
        # As TRL 1.16 does: here no stage has done it before.
        return super(ExactResume, cast(ExactResume, self))._prepare_dataset(*arguments, **options)


class AttachedGeneration(ResumableGeneration):
    """Mixin for attached trainers whose model generates."""

    def method_state(self) -> StateDict:
        return {**super().method_state(), **{name: getattr(self, attribute) for name, attribute in BUFFERS.items()}}

    def load_method_state(self, saved: StateDict) -> None:
        super().load_method_state(saved)
        for name, attribute in BUFFERS.items():
            setattr(self, attribute, saved[name])


def features_of(trainer: Trainer) -> list[type[ChunkTrainer]]:
    # In the order in which they act: each calls the next by `super`.
    used: dict[type[ChunkTrainer], bool] = {
        MovingReference: getattr(trainer.args, "sync_ref_model", False),
        AllCounted: any(base.__name__ == "DistillationTrainer" for base in type(trainer).__mro__),
        AttachedGeneration: hasattr(trainer, "_buffered_inputs"),
        AttachedTrainer: True,
    }
    return [feature for feature, is_used in used.items() if is_used]


# Arguments during a chunk.
CHANGED: dict[str, Any] = {
    "save_strategy": SaveStrategy.NO,  # the checkpoint callback alone decides when
    "save_total_limit": None,  # retention is of the store
    "save_only_model": False,
    "push_to_hub": False,
    "restore_callback_states_from_checkpoint": False,  # it replaces callbacks; theirs is restored in place
    "dataloader_persistent_workers": False,  # restarted workers know the epoch
}
# Attributes that the next chunk must find as this one did.
PUT_BACK = (
    *("data_collator", "optimizer", "lr_scheduler", "_created_lr_scheduler"),
    *("_total_train_tokens", "_current_train_step_time"),
)
# Modules of collators that draw no random numbers, unless they mask.
DRAWS_NOTHING = ("trl.", "transformers.data.data_collator")


class TellsEpoch(TrainerCallback):
    """Tells objects that draw random numbers for rows which epoch it is."""

    stateless = True

    def __init__(self, trainer: AttachedTrainer) -> None:
        self._trainer = trainer

    def on_epoch_begin(self, args: object, state: TrainerState, *_: object, **__: object) -> None:
        for drawing in (*self._trainer.drawing, self._trainer.data_collator):
            if isinstance(drawing, Seeded | hooks.SeededCollator):
                drawing.epoch = int(state.epoch or 0)  # reaches workers too: they restart with each epoch


@contextlib.contextmanager
def borrow_trainer(trainer: Trainer, recipe: Recipe, *, resumes: bool) -> Iterator[AttachedTrainer]:
    """Yields a trainer as one that trains in chunks; with a checkpoint to resume from it does not evaluate first."""
    with contextlib.ExitStack() as undoing:
        # Undone in reverse: arguments first, then class and attributes, torch's modes last.
        undoing.enter_context(_modes())
        before, args = dict(vars(trainer)), trainer.args
        undoing.callback(_put_back, trainer, type(trainer), before, trainer.callback_handler.callbacks[:])
        changed = {**CHANGED, "output_dir": args.output_dir, **({"eval_on_start": False} if resumes else {})}
        for name, value in changed.items():
            undoing.callback(setattr, args, name, getattr(args, name))
            setattr(args, name, value)
        trainer.__class__ = exact_class(type(trainer), features_of(trainer))
        attached = cast(AttachedTrainer, trainer)
        attached.recipe = recipe
        if draws_random(trainer.data_collator):
            trainer.data_collator = hooks.SeededCollator(trainer.data_collator, args.seed)
        for callback in trainer.callback_handler.callbacks:
            if type(callback).__module__.startswith(("transformers.integrations", "transformers.utils.notebook")):
                callback.stateless = True  # it shows and reports: nothing that it keeps changes training
        trainer.add_callback(TellsEpoch(attached))
        if isinstance(trainer.train_dataset, torch.utils.data.IterableDataset):
            trainer.add_callback(OnePass())
        if isinstance(trainer.model, PreTrainedModel):
            # Under the names in memory: `Trainer` loads a checkpoint without converting those of the original format.
            saved = functools.partial(trainer.model.save_pretrained, save_original_format=False)
            undoing.callback(vars(trainer.model).pop, "save_pretrained")
            vars(trainer.model)["save_pretrained"] = saved
        yield attached


def draws_random(collator: Callable[..., Any]) -> bool:
    module = getattr(collator, "__module__", type(collator).__module__)
    masks = getattr(collator, "mlm", False) or "Permutation" in type(collator).__name__
    return masks or not module.startswith(DRAWS_NOTHING)


def _put_back(trainer: Trainer, kind: type[Trainer], before: dict[str, Any], callbacks: list[TrainerCallback]) -> None:
    """Resets a trainer, except for the weights: everything else that training changed is in the checkpoint."""
    mixins = [base for base in type(trainer).__mro__ if base.__module__.startswith("baton.train.")]
    ours = {name for base in mixins for name in (*vars(base), *vars(base).get("__annotations__", ()))}
    trainer.__class__ = kind
    trainer.callback_handler.callbacks = callbacks
    for name in (*PUT_BACK, *BUFFERS.values()):
        if name in before:
            setattr(trainer, name, before[name])
    for window in getattr(trainer, "_metrics", {}).values():
        window.clear()
    # Attributes that our mixins set would otherwise be found, stale, by the next chunk.
    for name in (ours & vars(trainer).keys()) - before.keys():
        delattr(trainer, name)


@contextlib.contextmanager
def _modes() -> Iterator[None]:
    """Puts back torch's modes that decide bits in this process: a notebook goes on after its chunk."""
    threads, deterministic = torch.get_num_threads(), torch.get_deterministic_debug_mode() == 2
    fills = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    benchmarks, checks = torch.backends.cudnn.benchmark, torch.serialization.get_crc32_options()
    shows = transformers.utils.logging.is_progress_bar_enabled()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        imports.use_deterministic(deterministic)
        torch.utils.deterministic.fill_uninitialized_memory = fills  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark = benchmarks
        torch.serialization.set_crc32_options(checks)
        if shows:
            transformers.utils.logging.enable_progress_bar()
