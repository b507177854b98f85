"""Symptoms that users of other tools report, each reproduced, and absent here: `docs/internals/demands.md`."""
