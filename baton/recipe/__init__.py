"""The recipe: the user's one document. YAML carries values, this schema carries the defaults.

`model` has the adapter, `data` its quality checks, `training` the schedule and `methods` the methods' sections. `run`
has chunks, store, hooks and tracking, `evaluation` the export, `cluster` the pods, `search` sweeps, phases and
retraining. `recipe` holds them together, with the rules between them.
"""
