"""Gate stages: the judgement, and what happens to a run that fails it."""

from kfp import dsl


@dsl.component(base_image="python:3.11", install_kfp_package=False)
def gate(run_uri: str, evaluation: str, metrics: dsl.Output[dsl.Metrics]) -> str:
    """Compares the evaluation with what the recipe says must hold.

    Args:
        run_uri: Address of the run.
        evaluation: What this stage waits for: the evaluation.
        metrics: Each figure of the gate beside its limit.

    Returns:
        `accepted` or `rejected`.
    """
    from baton.components.gate.gate import judge_run
    from baton.components.shared.core import events

    with events.stage("gate"):
        verdict = judge_run(run_uri)
        for line in verdict.lines:
            if line.value is not None and line.limit is not None:
                metrics.log_metric(line.figure, line.value)
                metrics.log_metric(f"{line.figure}_limit", line.limit)
    return "accepted" if verdict.passed else "rejected"


@dsl.component(base_image="python:3.11", install_kfp_package=False)
def reject(run_uri: str) -> str:
    """Ends a run whose gate failed: it exports nothing.

    Args:
        run_uri: Address of the run.

    Returns:
        Which lines failed, in words.
    """
    from baton.components.gate.gate import reject_run
    from baton.components.shared.core import events

    with events.stage("rejected"):
        return reject_run(run_uri)
