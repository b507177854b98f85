"""How many trials of a sweep a cluster has GPUs for: what the quota of their namespace says."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import yaml

from baton.components.shared.recipe import Recipe

if TYPE_CHECKING:
    from kubernetes.client import V1ResourceQuota

KUBECONFIG = "KUBECONFIG"
NAMESPACE = "kubeflow"
"""Where runs take place on a Kubeflow without users."""
TIMEOUT = (3.0, 10.0)
"""Seconds to connect, and to wait for the answer."""


def fitted(recipe: Recipe, namespace: str | None, tell: Callable[[str], None]) -> Recipe:
    """Returns a recipe whose sweep trains as many trials at once as there are GPUs for.

    It stays as it is where it says how many itself, asks for no GPU, or nobody can say: without KUBECONFIG, or without
    a quota that counts GPUs.

    Args:
        recipe: The recipe.
        namespace: Where its pods will be; the one of KUBECONFIG's context when left out.
        tell: Called with what was decided, or why nothing could be.
    """
    search, wanted = recipe.sweep, recipe.resources.gpus * recipe.max_nodes
    if search is None or search.parallel or not wanted or not os.environ.get(KUBECONFIG):
        return recipe
    free = _gpus(recipe, namespace, tell)
    if free is None:
        return recipe
    gpus, where = free
    parallel = max(gpus // wanted, 1)
    short = "" if gpus >= wanted else f", and a trial asks for {wanted}: it will wait until there are more"
    tell(f"{parallel} trial(s) at once: the quota of namespace {where} has {gpus} GPU(s){short}")
    return recipe.model_copy(update={"sweep": search.model_copy(update={"parallel": parallel})})


def _gpus(recipe: Recipe, namespace: str | None, tell: Callable[[str], None]) -> tuple[int, str] | None:
    """Returns the GPUs that a recipe's pods may have together, and in which namespace."""
    from kubernetes import client, config
    from kubernetes.utils import parse_quantity
    from urllib3.exceptions import HTTPError

    settings = client.Configuration()
    settings.retries = 0
    try:
        path = os.environ[KUBECONFIG]  # the client reads it once, when it is imported
        config.load_kube_config(path, client_configuration=settings)
        context = config.list_kube_config_contexts(path)[1]["context"]
        where = namespace or context.get("namespace") or NAMESPACE
        with client.ApiClient(settings) as connected:
            quotas = client.CoreV1Api(connected).list_namespaced_resource_quota(where, _request_timeout=TIMEOUT).items
    except (config.ConfigException, client.ApiException, HTTPError, OSError, yaml.YAMLError) as error:
        reason = getattr(error, "reason", None) or error
        tell(f"note: the quota cannot be read ({reason}); sweep.parallel says how many at once")
        return None
    name = f"requests.{recipe.resources.accelerator}"
    hard = [quota.spec.hard or {} for quota in quotas if _counts(quota, recipe)]
    counted = [int(parse_quantity(limits[name])) for limits in hard if name in limits]
    return (min(counted), where) if counted else None


def _counts(quota: V1ResourceQuota, recipe: Recipe) -> bool:
    """Tells whether a quota counts the pods that train: all do but those for other classes, see `k8s/overlays/spot`."""
    if quota.spec.scopes:
        return False
    priority_class = f"baton-{recipe.resources.capacity}"
    scopes = quota.spec.scope_selector.match_expressions if quota.spec.scope_selector else []
    return all(
        x.scope_name == "PriorityClass" and x.operator == "In" and priority_class in (x.values or []) for x in scopes
    )
