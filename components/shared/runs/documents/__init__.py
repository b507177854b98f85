"""The documents of runs and sweeps: a type for each, which has its name in the store."""
