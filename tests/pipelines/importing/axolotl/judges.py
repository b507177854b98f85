"""Judges of completions."""
