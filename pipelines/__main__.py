"""`python -m baton.pipelines` is `baton`."""

from baton.pipelines.cli.app import main

main()
