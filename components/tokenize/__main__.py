"""Tokenizing as a process: `python -m components.tokenize RUN_URI`."""

import sys

from components.shared import events

if __name__ == "__main__":
    with events.stage("tokenize"):
        from components.tokenize.tokenization import tokenize_run

        tokenize_run(sys.argv[1])
