"""A run in the store: its documents, plan, lineage and tracking."""
