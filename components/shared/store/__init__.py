"""The object store: clients by scheme, bundles committed as one, and where users' rows are read from."""
