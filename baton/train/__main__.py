"""One chunk as a process: `python -m baton.train RUN_URI INDEX [--leave-out rng]`."""

from baton.train import readahead

if __name__ == "__main__":  # before anything else is imported: on each node of a train job
    readahead.start("train_chunk")

import argparse

from baton import events

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a run to the target of one of its chunks.")
    parser.add_argument("run_uri")
    parser.add_argument("index", type=int)
    parser.add_argument(
        "--leave-out", action="append", default=[], choices=["rng", "hooks"], help="what not to restore (a test)"
    )
    arguments = parser.parse_args()
    with events.stage(f"train chunk {arguments.index}"):
        from baton.train.chunk import run_chunk

        run_chunk(arguments.run_uri, arguments.index, tuple(arguments.leave_out))
