"""Which client speaks to a server or database."""

from __future__ import annotations

from baton.components.shared.runs.mlflow import connection, rest
from baton.components.shared.runs.mlflow.told import Client


def client(uri: str) -> Client:
    """Returns what speaks to a server or database: by REST where that will do, else by MLflow's own client."""
    connection.give_up_soon()
    if rest.serves(uri):
        return rest.RestClient(uri)
    from baton.components.shared.runs.mlflow.library import LibraryClient

    return LibraryClient(uri)
