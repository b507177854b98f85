"""The trainer of a chunk: TRL's, with mixins for exact resume, shards, groups of parameters and orders of rows."""
