"""Google Cloud Storage: `gs://bucket[/prefix]`."""

from __future__ import annotations

from typing import cast

from fsspec import AbstractFileSystem
from obstore.store import GCSStore, ObjectStore

from baton.components.shared.store import errors
from baton.components.shared.store.cloud import RETRIES, CloudStore, client_options, endpoint_in


def _allow(right: str, root: str) -> str:
    rights = {"read": "get", "write": "create", "list": "list", "remove": "delete"}
    return f"Grant storage.objects.{rights[right]} on the bucket {root.partition('/')[0]}."


class Google(CloudStore):
    """Objects of one bucket below a prefix.

    Credentials are those of `GOOGLE_SERVICE_ACCOUNT_KEY`, `GOOGLE_SERVICE_ACCOUNT` or `GOOGLE_APPLICATION_CREDENTIALS`,
    else gcloud's own or the machine's service account. Put-if-absent is `x-goog-if-generation-match: 0`.
    """

    schemes = ("gs",)
    environment = ("GOOGLE_",)
    create_is_certain = True
    largest_copy = 5 * 10**12
    words = errors.Words(
        no_container=("NoSuchBucket", "bucket does not exist"),
        no_credentials=("Error performing token request",),
        bad_credentials=("service account file",),
        credentials="Set GOOGLE_APPLICATION_CREDENTIALS, or name a key for GOOGLE_SERVICE_ACCOUNT_KEY in "
        "resources.secret_env.",
        endpoint="GOOGLE_BASE_URL",
        own_endpoint="Google's own endpoint",
        allow=_allow,
    )

    def _open(self) -> ObjectStore:
        return GCSStore(self.bucket, client_options=client_options(self.address), retry_config=RETRIES)

    def file_system(self) -> AbstractFileSystem:
        """Returns obstore's own file system, so that no other client is needed."""
        from obstore.fsspec import FsspecStore  # asyncio with it: for those alone who read rows here

        options = client_options(self.address)
        return cast(AbstractFileSystem, FsspecStore("gs", client_options=options, retry_config=RETRIES))

    @property
    def address(self) -> str:
        """Where requests go."""
        return endpoint_in("GOOGLE_BASE_URL", uri=self.uri) or "https://storage.googleapis.com"
