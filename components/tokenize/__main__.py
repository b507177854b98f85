"""Tokenizing as a process: `python -m baton.components.tokenize RUN_URI`."""

import sys

from baton.components.shared.core import events

if __name__ == "__main__":
    with events.stage("tokenize"):
        from baton.components.shared.pages import quality_page
        from baton.components.shared.runs.run import Run
        from baton.components.tokenize.tokenization import tokenize_run

        tokenize_run(sys.argv[1])
        quality_page.refresh(Run.open(sys.argv[1]))
