"""S3, Amazon's and every server that speaks it: `s3://bucket[/prefix]`.

s3fs reads the sources of data; see `cloud` for why it does not move Baton's own objects.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import fsspec
from fsspec import AbstractFileSystem
from obstore.store import S3Store

from baton.components.shared.store import errors
from baton.components.shared.store.cloud import RETRIES, CloudStore, client_options, endpoint_in

if TYPE_CHECKING:
    from obstore.store import ObjectStore, S3Config, S3Credential


class S3(CloudStore):
    """Objects of one bucket below a prefix.

    Whether the server honours `If-None-Match: *`, which `create` sends, is for `Storage` to try.
    """

    schemes = ("s3", "s3a")
    environment = ("AWS_",)
    largest_copy = 5 * 10**9
    words = errors.Words(
        no_container=("NoSuchBucket", "bucket does not exist"),
        no_credentials=("NoCredentials", "PartialCredentials"),
        credentials="Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or name a Secret in resources.secret.",
        endpoint="AWS_ENDPOINT_URL",
        own_endpoint="AWS's own endpoint",
    )

    def _open(self) -> ObjectStore:
        endpoint = endpoint_in("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", uri=self.uri)
        config: S3Config = {"endpoint": endpoint} if endpoint else {}
        return S3Store(
            self.bucket,
            region=_region() or "us-east-1",
            credential_provider=self._credentials(),
            # The SHA-256 in the manifest guards the bytes from end to end; signing them as well costs a second hash.
            unsigned_payload=True,
            client_options=client_options(endpoint),
            retry_config=RETRIES,
            config=config,
        )

    def file_system(self) -> AbstractFileSystem:
        """Returns s3fs, with time limits and without a cache of listings."""
        region = _region()
        return cast(
            AbstractFileSystem,
            fsspec.filesystem(
                "s3",
                use_listings_cache=False,
                client_kwargs={"region_name": region} if region else {},
                config_kwargs={
                    "connect_timeout": 5,
                    "read_timeout": 60,
                    "retries": {"mode": "standard", "max_attempts": 4},
                    "request_checksum_calculation": "when_required",
                    "response_checksum_validation": "when_required",
                },
            ),
        )

    def _credentials(self) -> Callable[[], S3Credential] | None:
        """Returns None where the client finds credentials in the environment, else botocore's chain as a provider.

        The chain knows profiles, SSO and instance metadata; importing it costs a pod 0.3 s, so only those pay that
        need it.
        """
        own = ("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI")
        if any(os.environ.get(name) for name in (*own, "AWS_CONTAINER_CREDENTIALS_FULL_URI")):
            return None
        import botocore.session

        credentials = botocore.session.get_session().get_credentials()
        if credentials is None:
            raise errors.no_credentials(self.uri, self.words)

        def provide() -> S3Credential:
            frozen = credentials.get_frozen_credentials()
            return {
                "access_key_id": frozen.access_key,
                "secret_access_key": frozen.secret_key,
                "token": frozen.token,
                "expires_at": getattr(credentials, "_expiry_time", None),
            }

        return provide


def _region() -> str | None:
    return os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
