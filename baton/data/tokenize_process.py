"""Tokenizing as a process: `python -m baton.data.tokenize_process RUN_URI`."""

import sys

from baton import events

if __name__ == "__main__":
    with events.stage("tokenize"):
        from baton.data.tokenize import tokenize_run
        from baton.pages import quality_page
        from baton.runs.run import Run

        tokenize_run(sys.argv[1])
        quality_page.refresh(Run.open(sys.argv[1]))
