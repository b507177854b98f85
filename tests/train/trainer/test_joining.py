"""One process restores what several have written, and proves by the digests that they took that it is all of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

from baton.checkpoint import sharded, zero_format
from baton.checkpoint.digest import tree_digest
from baton.errors import UserError
from baton.recipe import load
from baton.train import reshard, state
from baton.train.distributed import Ranks, Watchdog
from baton.train.protocol import Resumption
from baton.train.reshard import with_all, with_weights
from baton.train.sharding import MASTERS, OPTIMIZER_STATES, Partitioning, WeightSegment, weight_sizes
from tests.support import tiny

ROWS = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in tiny.PAIRS]
KINDS = ("exp_avg", "exp_avg_sq")


@pytest.fixture(scope="module")
def make(tiny_base: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Returns what builds a trainer, after some steps."""

    def made(steps: int, **model: Any) -> Any:
        settings = {"optimizer": "adamw_torch", "max_steps": 2, "learning_rate": 0.01, "weight_decay": 0.1}
        given = tiny.recipe(tiny_base, training=settings, model=model, evaluation={"samples": 0})
        trainer = tiny.trainer(given, tiny.tokens(given, ROWS), tmp_path_factory.mktemp("out"))
        if steps:
            trainer.train()
        else:
            trainer.create_optimizer_and_scheduler(2)
        return trainer

    return made


@pytest.fixture(scope="module")
def trained(make: Callable[..., Any]) -> Any:
    """A trainer that has taken two steps."""
    return make(2)


def begin(trainer: Any, resumption: Resumption) -> None:
    """Begins a chunk of one process that saves nothing."""
    trainer.begin_chunk(Ranks(), Watchdog(), resumption, lambda: iter(()))


def rows_of(values: list[torch.Tensor], pieces: list[WeightSegment], *, lean: bool = False) -> torch.Tensor:
    """Returns a process's row, laid out weight by weight."""
    row: list[torch.Tensor] = []
    for piece in pieces:
        row += [values[piece.weight].flatten()[piece.start : piece.stop], torch.zeros(0 if lean else piece.padding)]
    return torch.cat(row)


def write_partitions(trainer: Any, stage: int, ranks: int, folder: Path) -> list[str]:
    """Writes what so many processes would have under DeepSpeed; returns the digests of each one's optimizer."""
    groups, own = trainer.trained(), trainer.optimizer.state_dict()
    weights = [weight for group in groups for weight in group]
    of_weight = [trainer.optimizer.state[weight] for weight in weights]
    cut = Partitioning(stage, weight_sizes(groups), ranks)
    settings = [{**group, "params": [0]} for group in own["param_groups"] if group["params"]]
    digests = []
    for rank, rows in enumerate(cut.rows):
        entries = {
            number: {
                "step": of_weight[pieces[0].weight]["step"],
                **{kind: rows_of([each[kind] for each in of_weight], pieces) for kind in KINDS},
            }
            for number, pieces in enumerate(rows)
        }
        part = {
            MASTERS[stage]: [rows_of([weight.data for weight in weights], row, lean=stage == 2) for row in rows],
            OPTIMIZER_STATES[stage]: {
                "state": entries,
                "param_groups": [{**group, "params": [number]} for number, group in enumerate(settings)],
            },
            "partition_count": ranks,
        }
        zero_format.write(str(folder / zero_format.file_name(rank)), part)
        digests.append(tree_digest(part))
    torch.save(with_weights(trainer.lr_scheduler.state_dict(), own["param_groups"]), folder / "scheduler.pt")
    return digests


def zero_shares(trainer: Any, ranks: int) -> list[dict[str, torch.Tensor]]:
    """Returns the weights as each of some processes has them in stage 3, and buffers, of which each has all."""
    shares = [dict(trainer.model.named_buffers()) for _ in range(ranks)]
    for name, weight in trainer.model.named_parameters():
        flat = weight.detach().flatten()
        size = -(-len(flat) // ranks)
        padded = torch.cat([flat, torch.zeros(size * ranks - len(flat))])
        for rank, share in enumerate(padded.split(size)):
            shares[rank][name] = share
    return shares


@pytest.mark.parametrize(("strategy", "ranks"), [("zero2", 2), ("zero2", 7), ("zero3", 2), ("zero3", 3)])
def test_partitions_are_joined_and_proven(
    strategy: str, ranks: int, trained: Any, make: Callable[..., Any], tmp_path: Path
) -> None:
    digests = write_partitions(trained, int(strategy[-1]), ranks, tmp_path)
    fresh = make(0)
    for weight in fresh.model.parameters():
        weight.data.zero_()
    begin(fresh, Resumption(folder=str(tmp_path), ranks=ranks, strategy=strategy, is_reshaped=True))
    assert isinstance(fresh, reshard.LoadFromShards)
    fresh._load_optimizer_and_scheduler(str(tmp_path))
    assert tree_digest(fresh.optimizer.state_dict()) == tree_digest(trained.optimizer.state_dict())
    assert tree_digest(fresh.lr_scheduler.state_dict()) == tree_digest(trained.lr_scheduler.state_dict())
    ours, theirs = tiny.weights(fresh), tiny.weights(trained)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)

    whole = dict(state.trained_weights(trained.model))
    of_ranks = [whole] * ranks if strategy == "zero2" else zero_shares(trained, ranks)
    schedule = with_weights(trained.lr_scheduler.state_dict(), trained.optimizer.param_groups)
    proven = reshard.digests_as_saved(fresh)
    assert proven == {
        "weights": state.combine_ranks([tree_digest(tree) for tree in of_ranks]),
        "optimizer": state.combine_ranks(digests),
        "scheduler": tree_digest(schedule),
    }
    entry = list(fresh.optimizer.state.values())[-1]["exp_avg"]
    kept = entry.clone()
    entry.flatten()[-1] += 1
    assert reshard.digests_as_saved(fresh)["optimizer"] != proven["optimizer"]
    entry.copy_(kept)
    assert reshard.digests_as_saved(fresh)["optimizer"] == proven["optimizer"]
    list(fresh.optimizer.state.values())[-1]["step"] += 1
    assert reshard.digests_as_saved(fresh)["optimizer"] != proven["optimizer"], (
        "one of a row's weights is ahead of the others"
    )
    fresh.lr_scheduler.last_epoch += 1
    assert reshard.digests_as_saved(fresh)["scheduler"] != proven["scheduler"]


def test_left_out_the_optimizer_is_not_compared(trained: Any, make: Callable[..., Any], tmp_path: Path) -> None:
    write_partitions(trained, 2, 2, tmp_path)
    fresh = make(0)
    fresh.resumption = Resumption(
        folder=str(tmp_path), ranks=2, strategy="zero2", is_reshaped=True, left_out=("optimizer",)
    )
    assert set(reshard.digests_as_saved(fresh)) == {"weights", "scheduler"}


def test_shards_are_joined_and_proven(trained: Any, make: Callable[..., Any], tmp_path: Path) -> None:
    dcp.save({"model": get_model_state_dict(trained.model)}, checkpoint_id=tmp_path / sharded.WEIGHTS, no_dist=True)
    optimizer = get_optimizer_state_dict(trained.model, trained.bare_optimizer())
    dcp.save({"optimizer": optimizer}, checkpoint_id=tmp_path / sharded.OPTIMIZER, no_dist=True)
    torch.save(trained.lr_scheduler.state_dict(), tmp_path / "scheduler.pt")
    trained.model.config.save_pretrained(tmp_path)
    fresh = make(0)
    for weight in fresh.model.parameters():
        weight.data.zero_()
    begin(fresh, Resumption(folder=str(tmp_path), ranks=3, strategy="fsdp", is_reshaped=True))
    fresh._load_from_checkpoint(str(tmp_path))
    assert not (Path(fresh.args.output_dir) / "joined").exists(), "the copy is gone"
    fresh._load_optimizer_and_scheduler(str(tmp_path))
    assert tree_digest(fresh.optimizer.state_dict()) == tree_digest(trained.optimizer.state_dict())
    assert tree_digest(fresh.lr_scheduler.state_dict()) == tree_digest(trained.lr_scheduler.state_dict())
    ours, theirs = tiny.weights(fresh), tiny.weights(trained)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)

    def cut(value: Any, rank: int) -> Any:
        if isinstance(value, torch.Tensor) and value.dim():
            chunks = [*value.detach().chunk(3), *[value[:0]] * 3]
            return chunks[rank]
        if isinstance(value, dict):
            return {key: cut(each, rank) for key, each in value.items()}
        return [cut(each, rank) for each in value] if isinstance(value, list) else value

    parameters, buffers = dict(trained.model.named_parameters()), dict(trained.model.named_buffers())
    proven = reshard.digests_as_saved(fresh)
    assert proven == {
        "weights": state.combine_ranks([tree_digest({**cut(parameters, rank), **buffers}) for rank in range(3)]),
        "optimizer": state.combine_ranks([tree_digest(cut(trained.optimizer.state_dict(), rank)) for rank in range(3)]),
    }
    next(iter(fresh.model.parameters())).data.flatten()[0] += 1
    assert reshard.digests_as_saved(fresh)["weights"] != proven["weights"]


def test_what_would_be_rounded_is_refused(trained: Any, make: Callable[..., Any], tmp_path: Path) -> None:
    write_partitions(trained, 2, 2, tmp_path)
    dcp.save({"model": get_model_state_dict(trained.model)}, checkpoint_id=tmp_path / sharded.WEIGHTS, no_dist=True)
    rounded = make(0, dtype="bfloat16")
    begin(rounded, Resumption(folder=str(tmp_path), ranks=2, strategy="fsdp", is_reshaped=True))
    with pytest.raises(UserError, match=r"weights are in float32, and one process would hold them in bfloat16"):
        rounded._load_from_checkpoint(str(tmp_path))
    (tmp_path / sharded.WEIGHTS / sharded.METADATA).unlink()
    with pytest.raises(UserError, match=r"weights are in float32, and one process would hold them in bfloat16"):
        rounded._load_optimizer_and_scheduler(str(tmp_path))


def test_of_one_number_of_processes_nothing_is_joined(trained: Any) -> None:
    for resumption in (Resumption(), Resumption(strategy="fsdp"), Resumption(strategy="ddp", is_reshaped=True)):
        begin(trained, resumption)
        assert not isinstance(trained, reshard.LoadFromShards)
        assert reshard.digests_as_saved(trained) == {} or resumption.strategy == "fsdp"


def test_groups_without_weights_are_left_out_of_a_schedule_and_put_back() -> None:
    groups: list[dict[str, Any]] = [{"params": []}, {"params": [1]}, {"params": [2, 3]}]
    schedule = {"base_lrs": [0.1, 0.2, 0.3], "last_epoch": 4, "_last_lr": [0.4, 0.5, 0.6], "other": [1, 2]}
    lean = with_weights(schedule, groups)
    assert lean == {"base_lrs": [0.2, 0.3], "last_epoch": 4, "_last_lr": [0.5, 0.6], "other": [1, 2]}
    del lean["other"]
    assert with_all(lean, groups) == {"base_lrs": [0.2, 0.2, 0.3], "last_epoch": 4, "_last_lr": [0.5, 0.5, 0.6]}


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of this process."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_weights_that_are_in_parts_in_memory_are_put_together(make: Callable[..., Any]) -> None:
    """As stage 3 has them: the parameter is empty, and each process has a part, filled up with zeros."""
    fresh = make(0)
    whole = dict(state.trained_weights(fresh.model))
    expected = state.combine_ranks([tree_digest(share) for share in zero_shares(fresh, 3)])
    shapes = {name: (weight, weight.data.clone()) for name, weight in fresh.model.named_parameters()}
    left_out = ("optimizer",)
    fresh.resumption = Resumption(ranks=3, strategy="zero3", is_reshaped=True, left_out=left_out)
    for weight, values in shapes.values():
        weight.ds_numel, weight.ds_tensor = values.numel(), torch.cat([values.flatten(), torch.full((5,), 0.0)])
        weight.data = torch.empty(0)
    assert len(whole) > len(shapes), "buffers too"
    assert reshard.digests_as_saved(fresh)["weights"] == expected
    next(iter(shapes.values()))[0].ds_tensor[0] += 1
    assert reshard.digests_as_saved(fresh)["weights"] != expected


def test_what_one_process_has_saved_is_compared_as_a_whole(trained: Any, make: Callable[..., Any]) -> None:
    fresh = make(0)
    parallel = load.with_overrides(fresh.recipe, ["training.parallel={strategy: fsdp, processes: 2}"])
    fresh.recipe, fresh.resumption = parallel, Resumption(ranks=1, strategy="ddp", is_reshaped=True)
    assert reshard.digests_as_saved(fresh) == {
        "weights": tree_digest(state.trained_weights(fresh.model)),
        "optimizer": tree_digest(fresh.optimizer.state_dict()),
    }


def test_of_frozen_weights_the_type_is_no_matter(trained: Any, make: Callable[..., Any], tmp_path: Path) -> None:
    """A base that is held in fewer bits than the adapter on it."""
    dcp.save({"model": get_model_state_dict(trained.model)}, checkpoint_id=tmp_path / sharded.WEIGHTS, no_dist=True)
    trained.model.config.save_pretrained(tmp_path)
    fresh = make(0)
    frozen = fresh.model.lm_head.weight
    frozen.requires_grad_(False)
    frozen.data = frozen.data.to(torch.bfloat16)
    begin(fresh, Resumption(folder=str(tmp_path), ranks=2, strategy="fsdp", is_reshaped=True))
    fresh._load_from_checkpoint(str(tmp_path))
    assert torch.equal(frozen, trained.model.lm_head.weight.to(torch.bfloat16))
