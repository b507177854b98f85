"""Gate stages: the judgement, and what happens to a run that fails it."""

from kfp import dsl

from baton.kfp.component import component


@component
def gate(
    baton: str,
    limits: dsl.Output[dsl.Markdown],
    verdict: dsl.OutputPath(str),  # type: ignore[valid-type]
) -> str:
    """Compares the evaluation with the limits of the recipe.

    Args:
        baton: The run.
        limits: Each figure of the gate with its limit.
        verdict: `accepted` or `rejected`.

    Returns:
        The baton.
    """
    from baton import events
    from baton.evaluate.gate import as_markdown, judge_run
    from baton.runs.ref import RunRef

    with events.stage("gate"):
        judged = judge_run(RunRef.read(baton).run_uri)
        word = "accepted" if judged.passed else "rejected"
        for path, text in ((limits.path, as_markdown(judged)), (verdict, word)):
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)
    return baton


@component
def reject(baton: str, reason: dsl.OutputPath(str)) -> str:  # type: ignore[valid-type]
    """Ends a run whose gate failed: it exports nothing.

    Args:
        baton: The run.
        reason: Which lines failed, in words.

    Returns:
        The baton.
    """
    from baton import events
    from baton.evaluate.gate import reject_run
    from baton.runs.ref import RunRef

    with events.stage("rejected"), open(reason, "w", encoding="utf-8") as file:
        file.write(reject_run(RunRef.read(baton).run_uri))
    return baton
