"""Code that is not of Baton: hooks of the user, tasks for the evaluation harness, and what comes with a model."""
