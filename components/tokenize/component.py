"""Tokenize stage."""

from kfp import dsl


@dsl.component(base_image="python:3.11", install_kfp_package=False)
def tokenize(run_uri: str, cache_key: str, metrics: dsl.Output[dsl.Metrics], page: dsl.Output[dsl.HTML]) -> str:
    """Turns the split into tokens once per content, and plans the steps of the run.

    Args:
        run_uri: Address of the run.
        cache_key: Changes when something is gone that a finished stage had left; not read.
        metrics: Counts of sequences and tokens, and the number of steps.
        page: What was found in the rows, and how long they are.

    Returns:
        Address of the tokenized data.
    """
    from baton.components.shared.core import events
    from baton.components.shared.pages import quality_page
    from baton.components.shared.runs.run import Run
    from baton.components.tokenize.tokenization import tokenize_run

    with events.stage("tokenize"):
        tokens = tokenize_run(run_uri)
        for name in ("train", "eval", "tokens", "truncated", "dropped", "steps"):
            metrics.log_metric(name, tokens[name])
        with open(page.path, "w", encoding="utf-8") as file:
            file.write(quality_page.write(Run.open(run_uri)))
    return tokens["data_uri"]
