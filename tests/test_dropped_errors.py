"""Errors that production code drops unheard: each place with its reason, and no other."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BROAD = frozenset({"Exception", "BaseException", "BatonError", "UserError", "StoreError", "UnavailableError"})
"""Classes that hold errors of several meanings."""

REASONS = {
    "baton/cli/address.py:_run_of": "the text then names a model",
    "baton/cli/forecast.py:by_earlier": "a run that cannot be read tells no time: another one, or a probe does",
    "baton/cli/status.py:find": "the endpoint is asked instead",
    "baton/doctor.py:examine_store": "the check of the store itself reports it",
    "baton/pages/publish.py:write": "training continues, and its last stage writes the page",
    "baton/prove/diff.py:_boundary": "a run without a plan has no boundaries",
    "baton/source/prepare.py:check_model": "pods may reach a store that this machine does not",
    "baton/doctor.py:_rights": "the check of the store itself tells it",
    "baton/kubeflow/connection.py:is_new": "the endpoint's refusal of the token before is raised",
    "baton/kubeflow/connection.py:_tasks": "an API up to 2.17 has no tasks; its stages are listed with the run",
    "baton/kubeflow/run_status.py:_in_its_own_words": "Kubernetes' words stay where the store is out of reach",
    "baton/kubeflow/run_status.py:_workflow": "the second API tells stages where the first is closed",
    "baton/train/user_state.py:_unknown": "its iterators count as changed each time",
    "baton/runs/run.py:warn": "the screen has told it by then",
    "baton/store/storage.py:remove_quietly": "all but a denied right is raised again, and what stays harms nobody",
    "baton/kfp/executor.py:_run_name": "the stage itself raises the same of its inputs",
    "baton/kfp/executor.py:_run": "the stage itself raises the same of its inputs",
    "baton/export/model_card.py:_hub_licence": "a card without a licence is better than no export",
    "baton/kfp/rung.py:_one": "the trial is out, and its failure is told and kept",
    "baton/kfp/rung.py:_take_turns": "the trial is out, and its failure is told and kept",
    "baton/checkpoint/chain.py:_is_part": "what is no part of tokens is told as a problem",
    "baton/checkpoint/seals.py:_is_older": "a broken checkpoint tells nothing about its run's age",
    "baton/checkpoint/seals.py:_is_same": "a manifest that cannot be read differs",
    "baton/checkpoint/seals.py:read": "the stage that owns the bundle tells it, and commits another",
    "baton/checkpoint/proof.py:_notes": "what is wrong with the run is told the same error",
    "baton/models/chat.py:end_of_turn": "a template may refuse the probe; it then closes nothing",
    "baton/tracking/messages.py:_gpus": "a machine without the library has no such GPU",
    "baton/train/distributed.py:note_failure": "a traceback is printed",
    "baton/train/preemption.py:_ask_again": "a warning, once for each source",
    "baton/train/preemption.py:_look_at_azure": "without a name every event counts",
    "baton/train/build.py:resolve_micro_batch": "another process was first",
    "baton/train/supervisor.py:_import": "training imports the same, and raises",
    "baton/cli/follow.py:seen": "a healer in the cluster may use a store that is out of reach here",
    "baton/kubeflow/heal.py:look": "one that watches its own run may do without the store",
    "baton/cli/kubeflow.py:ci_report": "the run's own end is told instead",
    "baton/cli/kubeflow.py:_of_run": "its state is told without figures",
    "baton/source/hardware.py:_total": "a proposal that is no recipe is not made",
    "baton/source/hardware.py:_changed": "a proposal that is no recipe is not made",
    "baton/source/prepare.py:_tokenizer": "the tokenize stage raises the same",
    "baton/source/prepare.py:run_name_for_pods": "pods may reach what this machine does not",
    "baton/doctor.py:_of_runs": "a note says so",
    "baton/kubeflow/connection.py:_pipeline": "a version that is gone has no stages to show",
    "baton/kubeflow/submit.py:_there_or": "another submission has made it",
    "baton/kubeflow/run_status.py:explained": "the API server's own word is shown",
    "baton/kubeflow/namespace.py:_row": "a row without figures; the store is not asked again",
    "baton/kubeflow/pods.py:_ask": "Kubernetes is a second source, and need not be at hand",
    "baton/kubeflow/run_status.py:_said": "Argo's word is shown",
    "baton/kubeflow/run_status.py:_completed": "Kubeflow's word is shown",
    "baton/kubeflow/run_status.py:_closed": "a line says so",
    "baton/local/preview.py:lengths": "a draft without measured lengths",
}
"""Where → why nobody need hear of it. Elsewhere an error is raised, kept, returned or logged."""


def _names(node: ast.expr | None) -> set[str]:
    if node is None:
        return {"BaseException"}
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def _is_heard(body: list[ast.stmt], name: str | None) -> bool:
    """Tells whether every way through a handler raises, or does something with the error or about it."""
    for statement in body:
        if isinstance(statement, ast.If):
            if _is_heard(statement.body, name) and _is_heard(statement.orelse, name):
                return True
            continue
        for node in ast.walk(statement):
            if isinstance(node, ast.Raise) or (isinstance(node, ast.Name) and node.id == name):
                return True
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "logger":
                return True
    return False


def dropped(source: str) -> Iterator[tuple[str, int]]:
    """Yields the function and line of each broad handler that drops its error on some way through it."""

    def walk(node: ast.AST, within: str) -> Iterator[tuple[str, int]]:
        for child in ast.iter_child_nodes(node):
            inner = child.name if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) else within
            if isinstance(child, ast.ExceptHandler):
                is_dropped = bool(_names(child.type) & BROAD) and not _is_heard(child.body, child.name)
            else:
                is_dropped = (
                    isinstance(child, ast.Call)
                    and ast.unparse(child.func) in ("suppress", "contextlib.suppress")
                    and bool(set().union(*map(_names, child.args)) & BROAD)
                )
            if is_dropped:
                yield inner, child.lineno
            yield from walk(child, inner)

    return walk(ast.parse(source), "<module>")


def _places() -> list[str]:
    files = sorted(path for room in ("baton", "components", "pipelines") for path in (ROOT / room).rglob("*.py"))
    return [
        f"{path.relative_to(ROOT).as_posix()}:{function}"
        for path in files
        for function, _ in dropped(path.read_text(encoding="utf-8"))
    ]


def test_each_place_that_drops_errors_has_its_reason() -> None:
    assert sorted({*_places()} - REASONS.keys()) == []


def test_no_reason_is_left_over() -> None:
    assert sorted(REASONS.keys() - {*_places()}) == []


@pytest.mark.parametrize(
    ("body", "is_found"),
    [
        pytest.param("except Exception:\n  pass", True, id="pass"),
        pytest.param("except BaseException as e:\n  if x:\n   y = e", True, id="kept on one way alone"),
        pytest.param("except (KeyError, BatonError):\n  return None", True, id="one of several"),
        pytest.param("except:\n  z = 1", True, id="all"),
        pytest.param("except BatonError as e:\n  if x:\n   y = e\n  else:\n   raise", False, id="kept or raised"),
        pytest.param("except Exception:\n  logger.exception('x')", False, id="logged"),
        pytest.param("except KeyError:\n  pass", False, id="of one meaning"),
    ],
)
def test_what_counts_as_dropped(body: str, is_found: bool) -> None:
    source = "def f():\n try:\n  g()\n " + body.replace("\n", "\n ")
    assert bool([*dropped(source)]) == is_found
