"""Tokenize stage."""

from kfp import dsl

from baton.components.declaring import stage


@stage
def tokenize(baton: str, tokens: dsl.Output[dsl.Dataset]) -> str:
    """Turns the split into tokens once per content, and plans the steps of the run.

    Args:
        baton: The run.
        tokens: The first sequences as the model sees them, counts, and where all of them are.

    Returns:
        The baton.
    """
    from baton.components.shared.core import events
    from baton.components.shared.pages import quality_page
    from baton.components.shared.runs.baton import Baton
    from baton.components.shared.runs.run import Run
    from baton.components.tokenize.card import card
    from baton.components.tokenize.tokenization import tokenize_run

    with events.stage("tokenize"):
        run_uri = Baton.read(baton).run_uri
        made = tokenize_run(run_uri)
        run = Run.open(run_uri)
        quality_page.refresh(run)
        card(run.recipe(), made).leave(tokens)
    return baton


@stage
def tokenize_shard(baton: str, index: int, of: int) -> str:
    """Tokenizes the segments of the split that fall to one of several pods; `tokenize` commits what all have made.

    Args:
        baton: The run.
        index: Which pod, from 1; 0 trains the tokenizer that the others use.
        of: How many there are.

    Returns:
        The baton.
    """
    from baton.components.shared.core import events
    from baton.components.shared.runs.baton import Baton
    from baton.components.tokenize import tokenization

    with events.stage(f"tokenize shard {index} of {of}" if index else "train tokenizer"):
        tokenization.tokenize_shard(Baton.read(baton).run_uri, index, of)
    return baton
