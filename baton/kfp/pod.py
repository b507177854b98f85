"""Settings of each pod on Kubernetes, from `resources` in the recipe."""

from kfp import kubernetes
from kfp.dsl import PipelineConfig, PipelineTask
from kfp.dsl.pipeline_channel import PipelineChannel

from baton.recipe.base import seconds
from baton.recipe.cluster import Resources
from baton.recipe.recipe import Recipe
from baton.recipe.run import SIGNING_FOLDER
from baton.signing import KEY_FILE, SIGNED_BY
from baton.tracking.servers import KUBEFLOW_RUN

BACKOFF_LIMIT = "24h"  # from the first attempt's start; kills a retried pod when it passes; the default is one hour
TRAIN = ("train-chunk", "train-turns")  # stages that several nodes can share
TRIED_AGAIN = ("data-split", "tokenize", "tokenize-shard", "lr-find", *TRAIN, "evaluate", "export")
"""Stages that an engine starts again: those that take long. The others take seconds, and one that fails fails again."""

RUN_LABEL = "metadata.labels['pipeline/runid']"  # a pod finds the id of its Kubeflow run there


def run_config(resources: Resources) -> PipelineConfig:
    return PipelineConfig(
        active_deadline_seconds=_whole_seconds(resources.deadline),
        ttl_seconds_after_finished=_whole_seconds(resources.keep_pods),
    )


def on_every_pod(task: PipelineTask, resources: Resources, recipe_name: str, stage: str) -> None:
    """Sets image, credentials by reference, plain environment, labels and retries, and takes the right to be root."""
    task.set_container_image(resources.image)
    task.set_caching_options(False)  # see `with_cache` for those that may be
    for name, value in resources.plain_env.items():
        task.set_env_variable(name, value)
    for secret, variables in resources.secrets:
        kubernetes.use_secret_as_env(task, secret, variables)
    if resources.image_pull_secret:
        kubernetes.set_image_pull_secrets(task, [resources.image_pull_secret])
    for key, value in resources.pod_labels(recipe_name, stage).items():
        kubernetes.add_pod_label(task, key, value)
    kubernetes.use_field_path_as_env(task, env_name=KUBEFLOW_RUN, field_path=RUN_LABEL)
    if resources.run_as_non_root:
        kubernetes.set_security_context(task, run_as_non_root=True)
    if resources.retries and stage in TRIED_AGAIN:
        task.set_retry(
            num_retries=resources.retries,
            backoff_duration="10s",
            backoff_factor=2.0,
            backoff_max_duration=BACKOFF_LIMIT,
        )


def with_cache(task: PipelineTask) -> None:
    """Lets Kubeflow skip a stage by its inputs: right where the baton vouches for all its outputs."""
    task.set_caching_options(True)


def on_compute_pod(task: PipelineTask, recipe: Recipe) -> None:
    """Requests accelerators, memory, the nodes that have them and the cache, for stages that run the model."""
    resources = recipe.resources
    # The pod of a chunk on several nodes only follows a job, whose own pods have all this.
    if recipe.max_nodes > 1 and task.component_spec.name in TRAIN:
        return
    if resources.gpus:
        task.set_accelerator_type(resources.accelerator).set_accelerator_limit(resources.gpus)
    for name, value in resources.promised_env.items():
        task.set_env_variable(name, value)
    with_memory(task, resources)
    if resources.capacity:
        kubernetes.add_pod_label(task, "baton/capacity", resources.capacity)
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
    """Requests cores and memory, for stages that hold the whole model."""
    if resources.cpu:
        task.set_cpu_request(resources.cpu).set_cpu_limit(resources.cpu)
    if resources.memory:
        task.set_memory_request(resources.memory).set_memory_limit(resources.memory)


def on_chunk(task: PipelineTask, recipe: Recipe, nodes: PipelineChannel | dict[str, object] | None = None) -> None:
    """Gives a train-chunk its nodes, the name of its own node to watch, and the port of its figures."""
    if nodes is not None:
        kubernetes.add_node_selector_json(task, nodes)
    if recipe.chunks.preemption.node_taints:
        kubernetes.use_field_path_as_env(task, env_name="NODE_NAME", field_path="spec.nodeName")
    port = recipe.tracking.prometheus_port
    if port and recipe.max_nodes == 1:
        kubernetes.add_pod_annotation(task, "prometheus.io/scrape", "true")
        kubernetes.add_pod_annotation(task, "prometheus.io/port", str(port))


def with_signatures(task: PipelineTask, recipe: Recipe) -> None:
    """Gives a stage the key to seal with, and the public one to ask for, which writers to the store cannot change."""
    signing = recipe.chunks.signing
    if signing:
        task.set_env_variable(SIGNED_BY, signing.public_key)
    if signing and signing.secret:
        kubernetes.use_secret_as_volume(task, signing.secret.partition("/")[0], mount_path=SIGNING_FOLDER)
        task.set_env_variable(KEY_FILE, signing.key_file)


def _whole_seconds(time: str | None) -> int | None:
    return int(seconds(time)) if time else None
