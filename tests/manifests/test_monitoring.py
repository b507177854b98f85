"""Alerts fire when they should, and the dashboard asks what Prometheus understands."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import yaml
from kfp import compiler

from baton.pipelines.finetune import finetune
from baton.recipe import load
from baton.train import live
from tests.manifests import expressions
from tests.manifests.building import named, require


def promtool(*arguments: str) -> str:
    """Run promtool, which has to be content."""
    program = require("promtool", "Debian's package prometheus")
    done = subprocess.run([program, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_rules_and_panels_parse(tmp_path: Path) -> None:
    asked = [e for panel in expressions.panels().values() for e in panel]
    groups = [
        *named("spot", "PrometheusRule", "baton")["spec"]["groups"],
        {"name": "panels", "rules": [{"record": f"panel:{n}", "expr": e} for n, e in enumerate(asked)]},
    ]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": groups}))
    assert "27 rules found" in promtool("check", "rules", str(tmp_path / "rules.yaml"))


def test_goodput_loss_and_chunk_time_have_panels() -> None:
    panels = expressions.panels()
    assert panels["Goodput"] == ['baton:goodput:ratio{namespace="kubeflow", run=~".+"}']
    assert panels["Loss"][0] == 'baton:loss{namespace="kubeflow", run=~".+"}'
    assert panels["Where a chunk's time goes"] == [
        'sum by (chunk, phase) (baton_chunk_phase_seconds{namespace="kubeflow", run=~".+"})'
    ]


def test_every_name_is_one_that_a_chunk_tells() -> None:
    told = {name for name, _ in (*live.LOGGED_GAUGES.values(), *live.LIVE_GAUGES.values(), live.PHASE_GAUGE)}
    assert expressions.metrics() <= told
    assert told - expressions.metrics() == {"baton_samples_per_second", "baton_budget_spent", "baton_budget_predicted"}


ONE = 'namespace="kubeflow",run="r",chunk="2"'
HEALTHY = {
    f"baton_step{{{ONE}}}": "0+10x240",
    f"baton_target_step{{{ONE}}}": "5000x240",
    f"baton_loss{{{ONE}}}": "3-0.01x240",
    f"baton_unsaved_seconds{{{ONE}}}": "60x240",
    f"baton_goodput_ratio{{{ONE}}}": "0.9x240",
    f'baton_chunk_phase_seconds{{{ONE},phase="train"}}': "0+54x240",
    f'baton_chunk_phase_seconds{{{ONE},phase="save"}}': "0+6x240",
}
"""A chunk of four hours, a value a minute."""

SICK: dict[str, tuple[dict[str, str], str, dict[str, str]]] = {
    # alert: series that differ, from which minute on it fires, labels
    "BatonWorkUnsaved": ({"baton_unsaved_seconds": "0+60x240"}, "33m", {"severity": "warning", "chunk": "2"}),
    "BatonStalled": ({"baton_step": "7x240"}, "17m", {"severity": "critical", "chunk": "2"}),
    "BatonLossNotFinite": ({"baton_loss": "3 3 NaN NaN"}, "3m", {"severity": "critical", "chunk": "2"}),
    "BatonLossDiverges": ({"baton_loss": "1x30 2.1x210"}, "42m", {"severity": "warning"}),
    "BatonGoodputLow": ({"baton_goodput_ratio": "0.4x240"}, "31m", {"severity": "warning"}),
    "BatonChunkOverhead": (
        {"baton_chunk_phase_seconds": "0+10x240"},  # both phases: half of the time, and a little more beside it
        "200m",
        {"severity": "warning", "chunk": "2"},
    ),
}


def case(changed: dict[str, str], at: str, alert: str, expected: list[dict[str, str]]) -> dict[str, Any]:
    """Describe one test of promtool: series, and the alerts at a time."""
    series = {name: changed.get(name.partition("{")[0], values) for name, values in HEALTHY.items()}
    if "baton_chunk_phase_seconds" in changed:
        series[f'baton_chunk_phase_seconds{{{ONE},phase="start"}}'] = "1x240"
    return {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "alert_rule_test": [
            {"eval_time": at, "alertname": alert, "exp_alerts": [{"exp_labels": labels} for labels in expected]}
        ],
    }


def test_alerts_fire_for_what_they_name_and_not_before(tmp_path: Path) -> None:
    groups = named("spot", "PrometheusRule", "baton")["spec"]["groups"]
    for rule in groups[0]["rules"]:
        rule.get("annotations", {}).clear()
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": groups}))
    labels = {"namespace": "kubeflow", "run": "r"}
    cases = []
    for alert, (changed, at, own) in SICK.items():
        cases.append(case(changed, at, alert, [labels | own]))
        cases.append(case({}, at, alert, []))
        if alert != "BatonLossNotFinite":
            cases.append(case(changed, "9m", alert, []))
    (tmp_path / "test.yaml").write_text(
        yaml.safe_dump({"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": cases})
    )
    promtool("test", "rules", str(tmp_path / "test.yaml"))
    assert {rule["alert"] for rule in expressions.rules() if "alert" in rule} == set(SICK)


def test_prometheus_finds_the_pods_that_the_pipeline_makes(tmp_path: Path) -> None:
    recipe = load.load(
        str(Path(__file__).parents[1] / "recipes/scratch.yaml"),
        ["store=s3://baton", "tracking.prometheus_port=9095", "resources.capacity=spot"],
    )
    compiler.Compiler().compile(finetune(recipe), str(tmp_path / "p.yaml"))
    _, platform = yaml.safe_load_all((tmp_path / "p.yaml").read_text())
    executors = platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    metadata = executors["exec-train-chunk"]["podMetadata"]
    monitor = named("spot", "PodMonitor", "baton")["spec"]
    assert monitor["selector"]["matchLabels"].items() <= metadata["labels"].items()
    assert metadata["annotations"] == {"prometheus.io/scrape": "true", "prometheus.io/port": "9095"}
    (door,) = named("spot", "NetworkPolicy", "baton-stages-from-prometheus")["spec"]["ingress"]
    assert door["ports"] == [{"protocol": "TCP", "port": 9095}]
    assert metadata["labels"]["baton/capacity"] == "spot"
    assert "annotations" not in executors["exec-evaluate"]["podMetadata"]
