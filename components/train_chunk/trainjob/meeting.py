"""Where the machines of a chunk meet: Trainer tells each of a job's pods by the variables of torch's launcher."""

from __future__ import annotations

import os
from typing import Any

NODES = "PET_NNODES"


def is_node() -> bool:
    """Tells whether this process is one of the machines of a job."""
    return NODES in os.environ


def settings(run_id: str) -> dict[str, Any]:
    """Returns what torch's `LaunchConfig` takes: this machine alone, or its place among those of a job.

    Args:
        run_id: Name of what they meet for, the same on all machines.
    """
    if not is_node():
        return {
            "min_nodes": 1,
            "max_nodes": 1,
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
