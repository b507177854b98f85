"""What Prometheus and Grafana are asked to work out."""

from __future__ import annotations

import json
import re
from typing import Any

from tests.manifests.building import named

WORDS = {"max", "min", "sum", "by", "on", "and", "or", "abs", "changes", "offset", "min_over_time", "Inf"}
LABELS = {"namespace", "run", "chunk", "phase"}


def rules() -> list[dict[str, Any]]:
    """Returns recording and alerting rules."""
    (group,) = named("spot", "PrometheusRule", "baton")["spec"]["groups"]
    rules: list[dict[str, Any]] = group["rules"]
    return rules


def panels() -> dict[str, list[str]]:
    """Returns the dashboard's expressions by the title of their panel, its variables put in."""
    dashboard = json.loads(named("spot", "ConfigMap", "baton-dashboard")["data"]["baton.json"])
    found = {x["title"]: [target["expr"] for target in x["targets"]] for x in dashboard["panels"]}
    return {
        title: [expression.replace("$namespace", "kubeflow").replace("$run", ".+") for expression in expressions]
        for title, expressions in found.items()
    }


def metrics() -> set[str]:
    """Returns the names that rules and dashboard read and no rule records."""
    expressions = [rule["expr"] for rule in rules()] + [e for panel in panels().values() for e in panel]
    bare = [re.sub(r'"[^"]*"|\b\d+[mh]\b', "", expression) for expression in expressions]
    names = {name for text in bare for name in re.findall(r"[a-zA-Z_][\w:]*", text)}
    return names - WORDS - LABELS - {rule.get("record") for rule in rules()}
