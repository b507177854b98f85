"""Compares a run cut into chunks, or disturbed on purpose, with one that was left alone."""
