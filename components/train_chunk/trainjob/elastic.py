"""A chunk's job with as many nodes as the cluster gives: the most first, and where those cannot be had, fewer."""

from __future__ import annotations

from collections.abc import Callable

from baton.components.shared.core import events
from baton.components.shared.recipe import Recipe
from baton.components.shared.recipe.base import seconds
from baton.components.train_chunk.trainjob import reasons
from baton.components.train_chunk.trainjob.cluster import Cluster, NoRoomError
from baton.components.train_chunk.trainjob.job import Job, patiently
from baton.components.train_chunk.trainjob.manifest import Owner, labels, train_job
from baton.components.train_chunk.trainjob.objects import TrainJob


def run(
    cluster: Cluster, recipe: Recipe, run_uri: str, index: int, notice: Callable[[], str | None]
) -> tuple[Job, bool]:
    """Runs the job of a chunk; where the number of its nodes may vary, the first one that can be had.

    Within a job the number stays. A job of an earlier attempt that has not ended is followed, however many nodes of
    those that are possible it has.

    Args:
        cluster: Where.
        recipe: The run's recipe.
        run_uri: Address of the run.
        index: Number of the chunk, from 1.
        notice: Returns that this stage's machine will be preempted, None while it stays.

    Returns:
        The last job, and whether that ended by itself; see `Job.run`.

    Raises:
        BatonError: it failed, or does not start with the fewest nodes either.
    """
    nodes, wait, siblings = recipe.resources.nodes, seconds(recipe.resources.wait_for_nodes), labels(run_uri, index)
    documents = [train_job(recipe, run_uri, index, Owner.here(), number) for number in recipe.node_counts]
    if len(documents) > 1:
        documents = documents[_position(patiently(lambda: cluster.jobs(siblings)), documents) :]
    while True:
        document, *fewer = documents
        patience = None if isinstance(nodes, int) else seconds(nodes.patience) if fewer else wait
        job = Job(cluster, document, siblings, wait=wait, patience=patience, notice=notice)
        try:
            return job, job.run()
        except NoRoomError as error:
            if notice():
                return job, False
            if not fewer:
                raise
            less = fewer[0]["spec"]["trainer"]["numNodes"]
            why = error.message.rstrip(".")
            events.warn(f"TrainJob {job.name}: {job.nodes} nodes could not be had ({why}); going on with {less}")
            documents = fewer


def _position(jobs: list[TrainJob], documents: list[TrainJob]) -> int:
    """Returns which of a chunk's possible jobs an earlier attempt has left; the first where none has."""
    named = {document["spec"]["trainer"]["numNodes"]: place for place, document in enumerate(documents)}
    name = documents[0]["metadata"]["name"]
    left = [job for job in jobs if job["metadata"]["name"] == name and not reasons.is_over(job)]
    return next((named[number] for job in left if (number := job["spec"]["trainer"]["numNodes"]) in named), 0)
