"""`python -m pipelines` is `baton`."""

from pipelines.cli.app import main

main()
