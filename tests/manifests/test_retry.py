"""`components/retry-lost-pods`, put over the controller of a Kubeflow Pipelines."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import yaml

from tests.manifests.building import K8S, require

STOCK = """
apiVersion: v1
kind: ConfigMap
metadata: {name: workflow-controller-configmap}
data:
  executor: "imagePullPolicy: IfNotPresent"
  workflowDefaults: |
    spec: {templateDefaults: {retryStrategy: {limit: "2", retryPolicy: OnError}}}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: workflow-controller}
spec:
  template:
    spec:
      containers:
        - name: workflow-controller
          image: quay.io/argoproj/workflow-controller:v4.0.5
          env: [{name: LEADER_ELECTION_IDENTITY, value: me}, {name: DEFAULT_REQUEUE_TIME, value: 6s}]
"""
OVERLAY = "resources: [stock.yaml]\ncomponents: [retry-lost-pods]\n"


def test_the_controller_starts_lost_pods_again(tmp_path: Path) -> None:
    kubectl = require("kubectl", "https://kubernetes.io/docs/tasks/tools")
    shutil.copytree(K8S / "components" / "retry-lost-pods", tmp_path / "retry-lost-pods")
    (tmp_path / "stock.yaml").write_text(STOCK)
    (tmp_path / "kustomization.yaml").write_text(OVERLAY)
    done = subprocess.run([kubectl, "kustomize", str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    parts: dict[str, Any] = {part["kind"]: part for part in yaml.safe_load_all(done.stdout)}
    data = parts["ConfigMap"]["data"]
    assert data["executor"] == "imagePullPolicy: IfNotPresent"
    retry = yaml.safe_load(data["workflowDefaults"])["spec"]["templateDefaults"]["retryStrategy"]
    assert (retry["limit"], retry["retryPolicy"]) == ("2", "Always")
    for words in ('lastRetry.status == "Error"', "in [137, 143]", 'contains "OOMKilled"', "(?i)(evict|preempt"):
        assert words in retry["expression"]
    assert "\n" not in retry["expression"]
    (container,) = parts["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert {"name": "DEFAULT_REQUEUE_TIME", "value": "1s"} in container["env"]
    assert {"name": "LEADER_ELECTION_IDENTITY", "value": "me"} in container["env"]
    assert len(container["env"]) == 2
