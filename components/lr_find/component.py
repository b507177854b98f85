"""Learning-rate finder stage."""

from kfp import dsl


@dsl.component(base_image="python:3.11", install_kfp_package=False)
def lr_find(
    run_uri: str, previous: str, cache_key: str, metrics: dsl.Output[dsl.Metrics], page: dsl.Output[dsl.HTML]
) -> str:
    """Tries learning rates on a model that is thrown away, and notes the one found with the run.

    Args:
        run_uri: Address of the run.
        previous: What this stage waits for; not read.
        cache_key: Changes when something is gone that a finished stage had left; not read.
        metrics: The learning rate found.
        page: Loss by learning rate.

    Returns:
        The learning rate found.
    """
    from baton.components.shared.core import events

    with events.stage("learning-rate finder"):
        from baton.components.lr_find.finder import find

        finding = find(run_uri)
        metrics.log_metric("learning_rate", finding.learning_rate)
        with open(page.path, "w", encoding="utf-8") as file:
            file.write(finding.html)
    return str(finding.learning_rate)
