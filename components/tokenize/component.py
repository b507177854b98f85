"""Tokenize stage."""

from kfp import dsl

from baton.kfp.component import component


@component
def tokenize(baton: str, tokens: dsl.Output[dsl.Dataset]) -> str:
    """Turns the split into tokens once per content, and plans the steps of the run.

    Args:
        baton: The run.
        tokens: The first sequences as the model sees them, counts, and where all of them are.

    Returns:
        The baton.
    """
    from baton import events
    from baton.data.preview import tokens_card
    from baton.data.tokenize import tokenize_run
    from baton.runs.ref import RunRef
    from baton.runs.run import Run

    with events.stage("tokenize"):
        run_uri = RunRef.read(baton).run_uri
        made = tokenize_run(run_uri)
        tokens_card(Run.open(run_uri).recipe(), made).write(tokens)
    return baton


@component
def tokenize_shard(baton: str, index: int, of: int) -> str:
    """Tokenizes the segments of the split that fall to one of several pods; `tokenize` commits what all have made.

    Args:
        baton: The run.
        index: Which pod, from 1; 0 trains the tokenizer that the others use.
        of: How many there are.

    Returns:
        The baton.
    """
    from baton import events
    from baton.data import tokenize as tokenization
    from baton.runs.ref import RunRef

    with events.stage(f"tokenize shard {index} of {of}" if index else "train tokenizer"):
        tokenization.tokenize_shard(RunRef.read(baton).run_uri, index, of)
    return baton
