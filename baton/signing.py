"""Signatures in the form of sigstore's model-signing: an in-toto statement in a DSSE envelope, in a sigstore bundle.

    BATON_SIGNING_KEY_FILE    file with the private key to sign with, PEM
    BATON_SIGNED_BY           the public key whose signature is required, in one line

Both come from a mounted Secret or the compiled pipeline, never from the store, where any writer could name a key of
their own. Keys are Ed25519, or ECDSA on P-256, as model-signing verifies. Documents outside of a run's chain, such as a
sweep's verdicts, hold a signature of their own.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias

from baton.documents import load
from baton.errors import BatonError, UserError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519

    Private: TypeAlias = ed25519.Ed25519PrivateKey | ec.EllipticCurvePrivateKey
    Public: TypeAlias = ed25519.Ed25519PublicKey | ec.EllipticCurvePublicKey

KEY_FILE = "BATON_SIGNING_KEY_FILE"
SIGNED_BY = "BATON_SIGNED_BY"
PAYLOAD_TYPE = "application/vnd.in-toto+json"
MEDIA_TYPE = "application/vnd.dev.sigstore.bundle.v0.3+json"
STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
BUILD_TYPE = "https://baton-llm.dev/stage/v1"
REFUSED = (
    "Find out who wrote it, and remove it. If it is your own, from before such documents were signed, sign it: "
    "`baton verify decisions FOLDER --sign`."
)
SIGNATURE = "signature"  # key of the signature in a document, and in a manifest's `meta`
KINDS = "Ed25519, or ECDSA on P-256"
P256_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551

Kind = Literal["ed25519", "p256"]
Bundle = dict[str, Any]


class SignatureError(BatonError):
    """A signature is missing, is of another key, or does not match."""


@dataclass(frozen=True)
class PublicKey:
    """A public key in one line: its SubjectPublicKeyInfo in DER, in base64, which is a PEM file's body."""

    line: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads a key from one line or a PEM file's text; `ValueError` if it is not a public key of a known kind."""
        # No message repeats the text, which may be a private key.
        if "PRIVATE KEY" in text:
            raise ValueError("is a private key; expected the public one, which `baton verify keys show FILE` prints")
        body = "".join(line.strip() for line in text.splitlines() if not line.startswith("-----"))
        try:
            return cls(_line(_loaded(base64.b64decode(body, validate=True))))
        except (binascii.Error, ValueError) as error:
            reason = str(error) if str(error).startswith("is ") else f"is not a public key; expected one ({KINDS})"
            raise ValueError(f"{reason} as `baton verify keys new FILE` prints it, or a PEM file's text") from None

    @property
    def pem(self) -> bytes:
        lines = [self.line[start : start + 64] for start in range(0, len(self.line), 64)]
        return "\n".join(["-----BEGIN PUBLIC KEY-----", *lines, "-----END PUBLIC KEY-----", ""]).encode()

    @property
    def hint(self) -> str:
        """SHA-256 of the PEM file, by which a bundle names the key."""
        return hashlib.sha256(self.pem).hexdigest()

    @property
    def name(self) -> str:
        """A short name for messages."""
        return self.hint[:12]

    def open(self, bundle: object) -> dict[str, Any]:
        """Returns the statement in a bundle; `SignatureError` unless this key has signed it exactly so."""
        try:
            envelope = bundle["dsseEnvelope"]  # type: ignore[index]
            payload, signature = (
                base64.b64decode(text, validate=True)
                for text in (envelope["payload"], envelope["signatures"][0]["sig"])
            )
        except (KeyError, IndexError, TypeError, ValueError):
            raise SignatureError("its signature is not a bundle with a DSSE envelope.") from None
        # Compare the whole bundle, not only the fields read here: another form of it was not written by Baton.
        if bundle != (expected := _bundle(payload, signature, self)):
            hint = bundle.get("verificationMaterial", {}) if isinstance(bundle, dict) else {}
            if hint != expected["verificationMaterial"]:
                raise SignatureError(f"it is signed by another key than {self.name}.")
            raise SignatureError("its signature's bundle is not in the form in which it was written.")
        if not _verifies(_loaded(base64.b64decode(self.line)), signature, _encoding(payload)):
            raise SignatureError(f"its signature is not one of the key {self.name}.")
        try:
            statement: dict[str, Any] = load(payload)
        except ValueError:
            raise SignatureError("its signature covers no statement.") from None
        return statement


class Signer:
    def __init__(self, key: Private) -> None:
        self._key = key
        self.public = PublicKey(_line(key.public_key()))

    @classmethod
    def new(cls, kind: Kind) -> Self:
        from cryptography.hazmat.primitives.asymmetric import ec, ed25519

        return cls(
            ed25519.Ed25519PrivateKey.generate() if kind == "ed25519" else ec.generate_private_key(ec.SECP256R1())
        )

    @classmethod
    def read(cls, path: str) -> Self:
        """Reads a key from a PEM file; `UserError` if it has none."""
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        try:
            with open(path, "rb") as file:
                key = load_pem_private_key(file.read(), None)
            _line(key.public_key())  # type: ignore[arg-type]
        except OSError as error:
            raise UserError(
                f"the signing key {path!r} cannot be read: {error.strerror}.",
                remedy="On a cluster name its Secret in chunks.signing.secret; `baton verify keys new FILE` makes one.",
            ) from None
        except (ValueError, TypeError, UnsupportedAlgorithm):
            raise UserError(
                f"{path!r} holds no private key without a password; expected one ({KINDS}) in PEM.",
                remedy="`baton verify keys new FILE` makes one.",
            ) from None
        return cls(key)  # type: ignore[arg-type]

    def pem(self) -> bytes:
        """Returns the key as an unencrypted PEM file."""
        from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

        return self._key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())

    def sign(self, statement: Mapping[str, Any]) -> Bundle:
        payload = json.dumps(statement, sort_keys=True).encode()
        return _bundle(payload, _signed(self._key, _encoding(payload)), self.public)


def signer_here() -> Signer | None:
    """Returns this process's signer, None without a key; `UserError` if the key cannot be read."""
    path = os.environ.get(KEY_FILE)
    return Signer.read(path) if path else None


def trusted_here() -> PublicKey | None:
    """Returns the key whose signature this process requires, if any."""
    try:
        return PublicKey.parse(line) if (line := os.environ.get(SIGNED_BY)) else None
    except ValueError as error:
        raise UserError(f"the environment variable {SIGNED_BY} {error}.") from None


def signer_of(public: PublicKey, what: str) -> Signer:
    """Returns this process's signer, which must have a public key; `UserError` names `what` must be signed."""
    signer = signer_here()
    if signer is None:
        raise UserError(
            f"{what} must be signed by {public.name}, and {KEY_FILE} is not set.",
            remedy="Set it to the file with the private key. On a cluster, name its Secret in chunks.signing.secret "
            "and compile the pipeline again.",
        )
    if signer.public != public:
        raise UserError(
            f"{what} must be signed by {public.name}, and {KEY_FILE} holds {signer.public.name}.",
            remedy="Give it the private key that belongs to chunks.signing.public_key.",
        )
    return signer


def statement_of(place: str, digest: str) -> dict[str, Any]:
    """Returns the statement that an object with a SHA-256 belongs at a place in the store."""
    subject = [{"name": place, "digest": {"sha256": digest}}]
    return {"_type": STATEMENT_TYPE, "subject": subject, "predicateType": BUILD_TYPE, "predicate": {}}


def stamped(place: str, document: Mapping[str, Any], public: PublicKey | None) -> dict[str, Any]:
    """Returns a document for its place in the store: with a key, signed by this process, whose key that must be."""
    plain = {name: value for name, value in document.items() if name != SIGNATURE}
    if public is None:
        return plain
    bundle = signer_of(public, place).sign(statement_of(place, _document_digest(plain)))
    return {**plain, SIGNATURE: bundle}


def opened(place: str, document: Mapping[str, Any], public: PublicKey | None) -> dict[str, Any]:
    """Returns a document without its signature; `SignatureError` unless the key has signed it for its place."""
    plain = {name: value for name, value in document.items() if name != SIGNATURE}
    if public is None:
        return plain
    if SIGNATURE not in document:
        raise SignatureError("it is not signed.")
    if public.open(document[SIGNATURE]) != statement_of(place, _document_digest(plain)):
        raise SignatureError("its signature is of other content, or of another place.")
    return plain


def _document_digest(document: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def required(line: str, what: str) -> PublicKey:
    """Returns the key that a recipe requires; `UserError` if this process was given another one.

    The message calls the recipe's owner `what`.
    """
    wanted, here = PublicKey.parse(line), trusted_here()
    if here and here != wanted:
        raise UserError(
            f"{what} names the signing key {wanted.name} (chunks.signing.public_key), and this process was given "
            f"{here.name} ({SIGNED_BY}).",
            remedy="Give it the key that belongs to the recipe. If you have not changed the recipe in the store, find "
            "out who did.",
        )
    return wanted


def _loaded(der: bytes) -> Public:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_der_public_key

    try:
        return load_der_public_key(der)  # type: ignore[return-value]
    except UnsupportedAlgorithm:
        raise ValueError(f"is a key of another kind; expected {KINDS}") from None


def _line(key: Public) -> str:
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    is_p256 = isinstance(key, ec.EllipticCurvePublicKey) and isinstance(key.curve, ec.SECP256R1)
    if not (is_p256 or isinstance(key, ed25519.Ed25519PublicKey)):
        raise ValueError(f"is a key of another kind; expected {KINDS}")
    return base64.b64encode(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).decode()


def _signed(key: Private, data: bytes) -> bytes:
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519, utils
    from cryptography.hazmat.primitives.hashes import SHA256

    if isinstance(key, ed25519.Ed25519PrivateKey):
        return key.sign(data)
    # The lower of the two valid forms of an ECDSA signature, the only one that `_verifies` accepts.
    r, s = utils.decode_dss_signature(key.sign(data, ec.ECDSA(SHA256())))
    return utils.encode_dss_signature(r, min(s, P256_ORDER - s))


def _verifies(key: Public, signature: bytes, data: bytes) -> bool:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519, utils
    from cryptography.hazmat.primitives.hashes import SHA256

    try:
        if isinstance(key, ed25519.Ed25519PublicKey):
            key.verify(signature, data)
            return True
        key.verify(signature, data, ec.ECDSA(SHA256()))
    except InvalidSignature:
        return False
    # Anybody can turn an ECDSA signature into a second valid one: only the form that `_signed` writes counts.
    r, s = utils.decode_dss_signature(signature)
    return s <= P256_ORDER // 2 and utils.encode_dss_signature(r, s) == signature


def _encoding(payload: bytes) -> bytes:
    """Returns the bytes to sign: DSSE's encoding of type and payload, each after its length."""
    kind = PAYLOAD_TYPE.encode()
    return b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(payload), payload)


def _bundle(payload: bytes, signature: bytes, key: PublicKey) -> Bundle:
    return {
        "mediaType": MEDIA_TYPE,
        "verificationMaterial": {"publicKey": {"hint": key.hint}, "tlogEntries": []},
        "dsseEnvelope": {
            "payload": base64.b64encode(payload).decode(),
            "payloadType": PAYLOAD_TYPE,
            "signatures": [{"sig": base64.b64encode(signature).decode(), "keyid": ""}],
        },
    }
