"""Azure's blob storage: `az://container[/prefix]`, in the account that the environment names."""

from __future__ import annotations

import os
from typing import cast

from fsspec import AbstractFileSystem
from obstore.store import AzureStore, ObjectStore

from baton.components.shared.store import errors
from baton.components.shared.store.cloud import RETRIES, CloudStore, client_options, endpoint_in


def _cause(answer: errors.Answer) -> tuple[str, str] | None:
    if answer.code == "AuthenticationFailed" and "Signed expiry time" in answer.fields.get(
        "AuthenticationErrorDetail", ""
    ):
        return "the shared access signature has expired", "Set a new one in AZURE_STORAGE_SAS_KEY."
    if answer.code == "AuthenticationFailed" and "too old" in answer.fields.get("AuthenticationErrorDetail", ""):
        return "the clock of this machine is more than 15 minutes off", "Set the clock by NTP."
    return None


def _allow(right: str, root: str) -> str:
    role = "Reader" if right in ("read", "list") else "Contributor"
    letters = {"read": "r", "write": "cw", "list": "l", "remove": "d"}[right]
    return f"Grant the role Storage Blob Data {role}, or a shared access signature with {letters!r} in its sp."


class Azure(CloudStore):
    """Blobs of one container below a prefix.

    The account is `AZURE_STORAGE_ACCOUNT_NAME`; credentials are its key, a shared access signature, a service principal
    or a workload's identity, by the variables that obstore reads. Put-if-absent is `If-None-Match: *`.
    """

    schemes = ("az",)
    environment = ("AZURE_",)
    create_is_certain = True
    words = errors.Words(
        container="container",
        no_container=("ContainerNotFound", "container does not exist"),
        no_credentials=("Error performing token request", "Account must be specified"),
        bad_credentials=("Invalid Access Key",),
        credentials="Set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or name a key for the latter in "
        "resources.secret_env.",
        endpoint="AZURE_STORAGE_ENDPOINT",
        own_endpoint="Azure's own endpoint",
        cause=_cause,
        allow=_allow,
    )

    def _open(self) -> ObjectStore:
        return AzureStore(self.bucket, client_options=client_options(self.address), retry_config=RETRIES)

    def file_system(self) -> AbstractFileSystem:
        """Returns obstore's own file system, so that no other client is needed."""
        from obstore.fsspec import FsspecStore  # asyncio with it: for those alone who read rows here

        options = client_options(self.address)
        return cast(AbstractFileSystem, FsspecStore("az", client_options=options, retry_config=RETRIES))

    @property
    def address(self) -> str:
        """Where requests go."""
        account = os.environ.get("AZURE_STORAGE_ACCOUNT_NAME", "account")
        return self._endpoint() or f"https://{account}.blob.core.windows.net"

    def _endpoint(self) -> str | None:
        return endpoint_in("AZURE_ENDPOINT", "AZURE_STORAGE_ENDPOINT", uri=self.uri)
