"""The executor, under the name that pipelines compiled before 2026-11-26 have in their commands."""

from baton.kfp.executor import main

if __name__ == "__main__":
    main()
