"""What each pod asks of Kubernetes, from `resources` in the recipe."""

from __future__ import annotations

from kfp import kubernetes
from kfp.dsl import PipelineTask

from components.shared.recipe import Recipe, Resources

CREDENTIALS = {"AWS_ACCESS_KEY_ID": "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY": "AWS_SECRET_ACCESS_KEY"}
"""Keys of the Secret → environment variables."""

BACKOFF_LIMIT = "24h"
"""Counts from the first attempt's start and kills a retried pod when it passes; the default is one hour."""


def on_every_pod(task: PipelineTask, resources: Resources, recipe_name: str) -> None:
    """Image, credentials by reference, plain environment and labels."""
    task.set_container_image(resources.image)
    task.set_caching_options(False)  # the store is the cache: it knows whether the objects are still there
    for name, value in {"PYTHONUNBUFFERED": "1", **resources.env}.items():
        task.set_env_variable(name, value)
    if resources.secret:
        kubernetes.use_secret_as_env(task, resources.secret, CREDENTIALS)
    for name, source in resources.secret_env.items():
        secret, _, key = source.partition("/")
        kubernetes.use_secret_as_env(task, secret, {key: name})
    if resources.image_pull_secret:
        kubernetes.set_image_pull_secrets(task, [resources.image_pull_secret])
    for key, value in {
        "app.kubernetes.io/part-of": "baton",
        "baton/recipe": recipe_name,
        **resources.labels,
    }.items():
        kubernetes.add_pod_label(task, key, value)


def on_compute_pod(task: PipelineTask, recipe: Recipe) -> None:
    """Accelerators, memory, the nodes that have them and the cache, for stages that run the model."""
    resources = recipe.resources
    if resources.gpus:
        task.set_accelerator_type(resources.accelerator).set_accelerator_limit(resources.gpus)
    with_memory(task, resources)
    for key, value in resources.node_selector.items():
        kubernetes.add_node_selector(task, key, value)
    for toleration in resources.tolerations:
        kubernetes.add_toleration(task, **toleration.model_dump(exclude_none=True))
    if resources.shm:
        kubernetes.empty_dir_mount(
            task, volume_name="shm", mount_path="/dev/shm", medium="Memory", size_limit=resources.shm
        )
    if resources.cache_claim and recipe.store.cache_dir:
        kubernetes.mount_pvc(task, pvc_name=resources.cache_claim, mount_path=recipe.store.cache_dir)


def with_memory(task: PipelineTask, resources: Resources) -> None:
    """Cores and memory, for stages that hold the whole model."""
    if resources.cpu:
        task.set_cpu_request(resources.cpu).set_cpu_limit(resources.cpu)
    if resources.memory:
        task.set_memory_request(resources.memory).set_memory_limit(resources.memory)


def on_chunk(task: PipelineTask, recipe: Recipe) -> None:
    """Retries of a train-chunk, which go on from the newest checkpoint, and the name of the node that it watches."""
    if recipe.resources.retries:
        task.set_retry(
            num_retries=recipe.resources.retries,
            backoff_duration="10s",
            backoff_factor=2.0,
            backoff_max_duration=BACKOFF_LIMIT,
        )
    if recipe.chunks.preemption.node_taints:
        kubernetes.use_field_path_as_env(task, env_name="NODE_NAME", field_path="spec.nodeName")
