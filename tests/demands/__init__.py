"""Symptoms that users of other tools report, each reproduced, and shown absent here; see `docs/demands.md`."""
