"""Tokenize stage."""

from baton.components.declaring import stage


@stage
def tokenize(baton: str) -> str:
    """Turns the split into tokens once per content, and plans the steps of the run.

    Args:
        baton: The run.

    Returns:
        The baton.
    """
    from baton.components.shared.core import events
    from baton.components.shared.runs.baton import Baton
    from baton.components.tokenize.tokenization import tokenize_run

    with events.stage("tokenize"):
        tokenize_run(Baton.read(baton).run_uri)
    return baton
