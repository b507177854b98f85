"""Trainers that somebody else has built, trained in chunks: what `baton.attach` does."""
