"""The rendezvous of a chunk's ranks: on one machine by themselves, in a TrainJob by Trainer's variables."""

from __future__ import annotations

import logging
import os
from typing import TypedDict

from baton.components.shared.core import events
from baton.components.shared.core.errors import BatonError, NodeError
from baton.components.shared.recipe import Recipe
from baton.components.train_chunk.distributed import devices
from baton.components.train_chunk.distributed.ranks import Ranks

NODES = "PET_NNODES"
"""Environment variable with the number of machines, which Kubeflow Trainer sets in each pod of a job."""


class Settings(TypedDict, total=False):
    """The part of torch's `LaunchConfig` that says where processes meet."""

    min_nodes: int
    max_nodes: int
    run_id: str
    rdzv_backend: str
    rdzv_endpoint: str
    rdzv_configs: dict[str, int]
    local_addr: str


def is_node() -> bool:
    """Tells whether this process is one of the machines of a job."""
    return NODES in os.environ


def settings(run_id: str) -> Settings:
    """Returns what torch's `LaunchConfig` takes: this machine alone, or its place among those of a job.

    Args:
        run_id: Name of the rendezvous, the same on all machines.
    """
    if not is_node():
        return {
            "min_nodes": 1,
            "max_nodes": 1,
            # Several chunks may train on one machine: the name is this process's own, and torch takes a free port.
            "run_id": f"{run_id}-{os.getpid()}",
            "rdzv_backend": "c10d",
            "rdzv_endpoint": "127.0.0.1:0",
            "local_addr": "127.0.0.1",
        }
    nodes, rank = int(os.environ[NODES]), int(os.environ["PET_NODE_RANK"])
    return {
        "min_nodes": nodes,
        "max_nodes": nodes,
        "run_id": run_id,
        "rdzv_backend": "static",
        "rdzv_endpoint": f"{os.environ['PET_MASTER_ADDR']}:{os.environ['PET_MASTER_PORT']}",
        "rdzv_configs": {"rank": rank},
    }


def join(ranks: Ranks, recipe: Recipe) -> None:
    """Joins the other ranks; those other than the first log nothing but warnings, under their number.

    Raises:
        NodeError: there are fewer than the recipe asks for.
        BatonError: there are more.
    """
    workers = recipe.parallel.virtual_workers
    if ranks.size != recipe.world_size and (not workers or workers % ranks.size):
        told = f"{ranks.size} processes were started, and the recipe asks for {recipe.world_size}"
        told += f": on {ranks.nodes} of {recipe.max_nodes} machines, {recipe.processes} on each."
        if ranks.size < recipe.world_size:
            raise NodeError(told, remedy="Look at the job's pods: a machine or a GPU is missing.")
        raise BatonError(told, remedy="Let resources.nodes and resources.gpus be what the job has.")
    import torch

    threads = os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // recipe.processes)))
    torch.set_num_threads(int(threads))  # a forked process has imported torch before it could read the variable
    devices.pin(recipe, ranks)
    ranks.join(on_gpu=recipe.resources.gpus > 0)
    if ranks.is_first:
        return
    events.mute()
    logging.getLogger("baton").setLevel(logging.WARNING)
    for handler in logging.getLogger().handlers:
        handler.setFormatter(logging.Formatter(f"%(asctime)s rank {ranks.rank} %(levelname)s %(name)s: %(message)s"))
