"""The recipe: the user's one document. YAML carries values, this schema carries the defaults.

`run` has chunks, store, hooks and tracking, `evaluation` the export, `search` sweeps, phases and retraining.
"""
