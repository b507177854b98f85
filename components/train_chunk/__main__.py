"""One chunk as a process: `python -m components.train_chunk RUN_URI INDEX [--leave-out rng] [--standby FILE]`."""

import argparse

from components.shared import events

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Bring a run to the target of one of its chunks.")
    parser.add_argument("run_uri")
    parser.add_argument("index", type=int)
    parser.add_argument(
        "--leave-out", action="append", default=[], choices=["rng"], help="what not to restore (a test)"
    )
    parser.add_argument("--standby", help="file to wait for before the machine is this chunk's")
    given = parser.parse_args()
    with events.stage(f"train chunk {given.index}"):
        from components.train_chunk.chunk import Chunk

        Chunk(given.run_uri, given.index, tuple(given.leave_out), standby=given.standby).bring()
