"""Runs that begin at another run's checkpoint."""
