"""The stage of a chunk that several nodes train: its own pod only sees to their job."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from components.shared import events
from components.shared.errors import BatonError
from components.shared.preemption import Watch
from components.shared.recipe import Recipe
from components.shared.recipe.base import seconds
from components.shared.store.bundles import Manifest
from components.train_chunk.trainjob import meeting
from components.train_chunk.trainjob.cluster import Cluster
from components.train_chunk.trainjob.job import Job
from components.train_chunk.trainjob.manifest import Owner, labels, train_job

if TYPE_CHECKING:
    from components.train_chunk.chunk import Chunk


def is_wanted(recipe: Recipe) -> bool:
    """Tells whether this process is to create a job; False in the pods of the job itself."""
    return recipe.resources.nodes > 1 and not meeting.is_node()


def bring(chunk: Chunk, cluster: Cluster | None = None) -> dict[str, Any]:
    """Has the nodes bring the run to the chunk's target.

    Args:
        chunk: The chunk, whose target is not committed yet.
        cluster: Where; the cluster that this process is a pod of, when left out.

    Returns:
        What `Chunk.bring` returns.

    Raises:
        BatonError: the job failed, does not start or ended before its target.
    """
    cluster = cluster or Cluster.here()
    document = train_job(chunk.recipe, chunk.run.uri, chunk.index, Owner.here())
    with Watch(chunk.recipe.chunks.preemption) as watch:
        job = Job(
            cluster,
            document,
            labels(chunk.run.uri, chunk.index),
            wait=seconds(chunk.recipe.resources.wait_for_nodes),
            notice=lambda: watch.notice,
        )
        ended = job.run()
    if (standing := chunk.restorer.standing()) and chunk.has_score(standing[0]):
        return _result(chunk, *standing, "done")
    if ended and not job.left_early:
        raise BatonError(f"the TrainJob of chunk {chunk.index} ended before its target, step {chunk.target}.")
    if not ended and watch.notice is None:
        raise BatonError(f"the TrainJob of chunk {chunk.index} was deleted before its target, step {chunk.target}.")
    return _partial(chunk, watch.notice or "the nodes were taken away")


def _partial(chunk: Chunk, notice: str) -> dict[str, Any]:
    """Returns how far the run is; the next chunk goes on from there."""
    committed = ((step, found) for step, found in chunk.store.committed() if isinstance(found, Manifest))
    step, manifest = next(committed, (0, None))
    events.emit("partial", chunk=chunk.index, step=step, of=chunk.target, notice=notice)
    if manifest is None:
        return {"uri": chunk.run.uri, "step": 0, "digest": "", "outcome": "partial"}
    return _result(chunk, step, manifest, "partial")


def _result(chunk: Chunk, step: int, manifest: Manifest, outcome: str) -> dict[str, Any]:
    """Returns what a chunk returns, with the checkpoint that the nodes have committed."""
    uri = chunk.store.uri(step, manifest)
    return {"uri": uri, "step": step, "digest": manifest.meta["digest"], "outcome": outcome}
