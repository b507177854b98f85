"""The checkpoint stage as a process: `python -m baton.train.promote_process RUN_URI INDEX`."""

import argparse

from baton import events

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Read back what a chunk committed, and apply retention.")
    parser.add_argument("run_uri")
    parser.add_argument("index", type=int)
    given = parser.parse_args()
    with events.stage(f"checkpoint {given.index}"):
        from baton.train.promote import promote

        promote(given.run_uri, given.index)
