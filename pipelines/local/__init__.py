"""Runs a compiled pipeline, a sweep or single stages on this machine."""
