"""Checkpoints of a chunk: when one is due, what is in it, how it reaches the store, and what is restored."""
