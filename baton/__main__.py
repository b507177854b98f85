"""`python -m baton` is `baton`."""

import io
import os
import sys


def main() -> None:
    """Runs the command line: the entry point of the console script.

    `multiprocessing` runs this script again in its processes, under another name. So the script imports the command
    line only to run it: stages do not need it, and kfp lacks parts of it in their environment.
    """
    # An old locale would refuse names and messages with an umlaut. Python may have been told to read no variable.
    if sys.getfilesystemencoding() != "utf-8" and os.environ.get("PYTHONUTF8") != "1":
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, "PYTHONUTF8": "1"})
    for stream in (sys.stdout, sys.stderr):  # names of files need not be text
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    from baton import machine

    machine.settle_home()
    from baton.cli.app import app
    from baton.cli.options import start

    start(app)


if __name__ == "__main__":
    main()
