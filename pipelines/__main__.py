"""`python -m baton.pipelines` is `baton`."""


def main() -> None:
    """Runs the command line: the entry point of the console script.

    What starts a process of `multiprocessing` has that run this script again, under another name, so that the
    script imports the command line only to run it: a stage has no use for it, and kfp, which knows a stage by its
    environment, leaves out there what the command line needs.
    """
    from baton.pipelines.cli.app import app
    from baton.pipelines.cli.options import start

    start(app)


if __name__ == "__main__":
    main()
