"""`python -m pipelines` is `baton`."""

from pipelines.cli import main

main()
