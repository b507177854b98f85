"""What the tests of DeepSpeed change in a chunk's processes, which are forked from the one that changes it."""

from __future__ import annotations

from typing import Any


def offloaded(run_uri: str, index: int) -> None:
    """Runs a chunk that holds on the host what is split, as it would with GPUs; a recipe without any is refused."""
    from baton.recipe.recipe import Recipe
    from baton.train import sharding
    from baton.train.chunk import run_chunk

    plain = sharding.deepspeed_arguments

    def arguments(recipe: Recipe) -> dict[str, Any]:
        parallel = recipe.parallel.model_copy(update={"offload": "cpu"})
        training = recipe.training.model_copy(update={"parallel": parallel})
        return plain(recipe.model_copy(update={"training": training}))

    sharding.deepspeed_arguments = arguments
    run_chunk(run_uri, index)


def without_the_optimizer_of(run_uri: str, index: int, rank: int) -> None:
    """Runs a chunk of which one process goes on with an optimizer that has not begun; all else is restored."""
    import os

    from baton.train import inputs
    from baton.train.chunk import run_chunk
    from baton.train.sharding import Zero

    load = Zero._load_part

    def load_part(self: Any, checkpoint: str) -> None:
        optimizer = self.deepspeed.optimizer
        if os.environ["RANK"] == str(rank):
            restore = optimizer.load_state_dict

            def weights_alone(parts: Any, **named: Any) -> None:
                restore(parts, **{**named, "load_optimizer_states": False})

            optimizer.load_state_dict = weights_alone
        load(self, checkpoint)

    Zero._load_part = load_part  # type: ignore[method-assign]
    inputs.CONTROLS["optimizer"] = lambda folder: None  # of the others it is there; and it is not compared
    run_chunk(run_uri, index, ("optimizer",))


def without_package(run_uri: str, index: int) -> None:
    """Runs a chunk where DeepSpeed is not installed."""
    import importlib.util

    from baton.train.chunk import run_chunk

    find = importlib.util.find_spec
    importlib.util.find_spec = lambda name, *given: None if name == "deepspeed" else find(name, *given)
    run_chunk(run_uri, index)
