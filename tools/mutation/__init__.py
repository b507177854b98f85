"""Mutants of the code that saves and restores, and which of them the tests kill: `python -m tools.mutation`."""
