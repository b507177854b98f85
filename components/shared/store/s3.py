"""S3, Amazon's and every server that speaks it: `s3://bucket[/prefix]`.

s3fs reads the sources of data; see `cloud` for why it does not move Baton's own objects.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, cast

import fsspec
from fsspec import AbstractFileSystem
from obstore.store import S3Store

from baton.components.shared.core import proxies
from baton.components.shared.store import errors
from baton.components.shared.store.cloud import RETRIES, CloudStore, client_options, endpoint_in

if TYPE_CHECKING:
    from obstore.store import ObjectStore, S3Config, S3Credential


RIGHTS = {"read": "s3:GetObject", "write": "s3:PutObject", "list": "s3:ListBucket", "remove": "s3:DeleteObject"}


def _cause(answer: errors.Answer) -> tuple[str, str] | None:
    """Returns why S3 refuses where that is no right: <https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html>."""
    code, message = answer.code, answer.message.lower()
    match code:
        case "ExpiredToken" | "ExpiredTokenException" | "TokenRefreshRequired" | "RequestExpired":
            return "the credentials have expired", (
                "Get new ones and set AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN, or renew the "
                "Secret that resources.secret names."
            )
        case "InvalidToken" | "InvalidTokenId" | "InvalidClientTokenId" | "UnrecognizedClientException":
            return "the session token is not of these keys", (
                "Set AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN from one log-in. Unset "
                "AWS_SESSION_TOKEN for a user's own keys, which have none."
            )
        case "InvalidAccessKeyId":
            return "access denied", (
                "Check AWS_ACCESS_KEY_ID, AWS_SESSION_TOKEN of a temporary key, and AWS_ENDPOINT_URL."
            )
        case "SignatureDoesNotMatch":
            return "access denied", ("Check AWS_SECRET_ACCESS_KEY, and AWS_REGION, which is signed too.")
        case "RequestTimeTooSkewed":
            return f"the clock of this machine is {_skew(answer)}", "Set the clock by NTP."
        case "PermanentRedirect" | "TemporaryRedirect" | "Redirect" | "AuthorizationHeaderMalformed":
            where = answer.fields.get("Region")
        case "IllegalLocationConstraintException":
            where = None
        case _ if "checksum" in message or "content-md5" in message or code == "MissingContentMD5":
            return "the bucket wants a checksum with each request", (
                "Set AWS_CHECKSUM_ALGORITHM=SHA256; in pods, by resources.env."
            )
        case _:
            return None
    asked = _region() or "us-east-1"
    if code == "AuthorizationHeaderMalformed" and not where and "region" not in message:
        return None
    return (
        f"the bucket is in {f'region {where}' if where else 'another region'}, and {asked} was asked",
        f"Set AWS_REGION={where}." if where else "Set AWS_REGION to the bucket's region.",
    )


def _skew(answer: errors.Answer) -> str:
    try:
        asked = datetime.strptime(answer.fields["RequestTime"], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
        apart = (asked - datetime.fromisoformat(answer.fields["ServerTime"])).total_seconds() / 60
    except (KeyError, ValueError):
        return "more than 15 minutes off"
    return f"{abs(apart):.0f} minutes {'fast' if apart > 0 else 'slow'}"


def _allow(right: str, root: str) -> str:
    """Returns the statement of a policy that allows a request."""
    bucket, _, prefix = root.partition("/")
    below = f"{prefix}/*" if prefix else "*"
    statement: dict[str, object] = {"Effect": "Allow", "Action": RIGHTS[right], "Resource": f"arn:aws:s3:::{bucket}"}
    if right != "list":
        statement["Resource"] = f"arn:aws:s3:::{bucket}/{below}"
    elif prefix:
        statement["Condition"] = {"StringLike": {"s3:prefix": below}}
    return f"Allow it: {json.dumps(statement)}."


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
        cause=_cause,
        allow=_allow,
    )

    def _open(self) -> ObjectStore:
        endpoint = self._endpoint()
        # One object is removed at a time; for a request that may name many, Ceph wants the right to the whole bucket.
        config: S3Config = {"disable_bulk_delete": True}
        if endpoint:
            config["endpoint"] = endpoint
        return S3Store(
            self.bucket,
            region=_region() or "us-east-1",
            credential_provider=self._credentials(),
            # The SHA-256 in the manifest guards the bytes from end to end; signing them as well costs a second hash.
            unsigned_payload=True,
            client_options=client_options(self.address),
            retry_config=RETRIES,
            config=config,
        )

    def file_system(self) -> AbstractFileSystem:
        """Returns s3fs, with time limits and without a cache of listings."""
        region, proxy = _region(), proxies.applies(self.address)
        return cast(
            AbstractFileSystem,
            fsspec.filesystem(
                "s3",
                use_listings_cache=False,
                client_kwargs={"region_name": region} if region else {},
                config_kwargs={
                    "proxies": dict.fromkeys(("http", "https"), proxy.url) if proxy else {},
                    "connect_timeout": 5,
                    "read_timeout": 60,
                    "retries": {"mode": "standard", "max_attempts": 4},
                    "request_checksum_calculation": "when_required",
                    "response_checksum_validation": "when_required",
                },
            ),
        )

    def _endpoint(self) -> str | None:
        return endpoint_in("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", uri=self.uri)

    @property
    def address(self) -> str:
        """Where requests go."""
        return self._endpoint() or f"https://s3.{_region() or 'us-east-1'}.amazonaws.com"

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
