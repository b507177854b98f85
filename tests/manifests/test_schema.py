"""Every object is one that a current Kubernetes takes, field by field."""

from __future__ import annotations

import copy
from collections import Counter

import kubernetes_validate
import pytest
import yaml

from tests.manifests.building import CUSTOM_KINDS, K8S, OVERLAYS, named, objects

CURRENT = "1.37"
CUSTOM = {
    "local": Counter(),
    "spot": Counter(PodMonitor=1, PrometheusRule=1),
    "multi-tenant": Counter(PodMonitor=1, PrometheusRule=1, SecretStore=1, ExternalSecret=2),
}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_objects_fit_the_schema(overlay: str) -> None:
    for document in objects(overlay):
        if document["kind"] not in CUSTOM_KINDS:
            kubernetes_validate.validate(document, CURRENT, strict=True)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_nothing_else_goes_unchecked(overlay: str) -> None:
    kinds = Counter(document["kind"] for document in objects(overlay))
    assert Counter({kind: n for kind, n in kinds.items() if kind in CUSTOM_KINDS}) == CUSTOM[overlay]


def test_a_field_misspelt_is_refused() -> None:
    document = copy.deepcopy(named("local", "Deployment", "baton-mlflow"))
    document["spec"]["template"]["spec"]["automountServiceAccountTokens"] = False
    with pytest.raises(kubernetes_validate.ValidationError, match="automountServiceAccountTokens"):
        kubernetes_validate.validate(document, CURRENT, strict=True)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_names_are_one_namespace_and_unique(overlay: str) -> None:
    cluster_wide = {
        "ClusterRole",
        "ClusterRoleBinding",
        "MutatingAdmissionPolicy",
        "MutatingAdmissionPolicyBinding",
        "Namespace",
        "PriorityClass",
    }
    namespace = "team-a" if overlay == "multi-tenant" else "kubeflow"
    for document in objects(overlay):
        place = document["metadata"].get("namespace")
        assert place == (None if document["kind"] in cluster_wide else namespace), document["metadata"]["name"]
        for subject in document.get("subjects", []):
            assert subject.get("namespace") == namespace
    names = Counter((x["kind"], x["metadata"]["name"]) for x in objects(overlay))
    assert max(names.values()) == 1


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_what_is_referred_to_is_there(overlay: str) -> None:
    """Accounts, ConfigMaps, classes and claims; Secrets come from `k8s/secrets` or from the vault."""
    there = {(x["kind"], x["metadata"]["name"]) for x in objects(overlay)}
    templates = yaml.safe_load((K8S / "secrets" / "kustomization.yaml").read_text())["secretGenerator"]
    secrets = {entry["name"] for entry in templates}
    for document in objects(overlay):
        pod = document.get("spec", {}).get("template", {}).get("spec")
        if pod is None:
            continue
        assert ("ServiceAccount", pod["serviceAccountName"]) in there
        assert ("PriorityClass", pod["priorityClassName"]) in there
        for volume in pod["volumes"]:
            if claim := volume.get("persistentVolumeClaim"):
                assert ("PersistentVolumeClaim", claim["claimName"]) in there
        for container in pod["containers"]:
            for source in container.get("envFrom", []):
                assert ("ConfigMap", source["configMapRef"]["name"]) in there
            for variable in container["env"]:
                if reference := variable.get("valueFrom", {}).get("secretKeyRef"):
                    assert reference["name"] in secrets
