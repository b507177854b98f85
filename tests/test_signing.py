"""Keys, and what counts as signed by one."""

import base64
import copy
import hashlib
import json
import random
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature, encode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from baton import signing
from baton.errors import UserError
from baton.signing import PublicKey, SignatureError, Signer

STATEMENT = {"_type": "https://in-toto.io/Statement/v1", "predicate": {"step": 8}}
kinds = pytest.mark.parametrize("kind", ["ed25519", "p256"])


@kinds
def test_what_is_signed_is_read_back_by_its_key_alone(kind: signing.Kind) -> None:
    signer = Signer.new(kind)
    bundle = signer.sign(STATEMENT)
    assert signer.public.open(json.loads(json.dumps(bundle))) == STATEMENT
    with pytest.raises(SignatureError, match="another key"):
        Signer.new(kind).public.open(bundle)


@pytest.mark.parametrize("payload", [b"{", b"\xff", b"[" * 100_000], ids=["no JSON", "no text", "too deep"])
def test_what_is_signed_and_is_no_statement_is_refused(payload: bytes) -> None:
    signer = Signer.new("ed25519")
    bundle = signing._bundle(payload, signing._signed(signer._key, signing._encoding(payload)), signer.public)
    with pytest.raises(SignatureError, match="its signature covers no statement"):
        signer.public.open(bundle)


@kinds
def test_dsse_and_bundle_are_those_of_their_specifications(kind: signing.Kind) -> None:
    signer = Signer.new(kind)
    bundle = signer.sign(STATEMENT)
    envelope = bundle["dsseEnvelope"]
    payload, signature = (base64.b64decode(x) for x in (envelope["payload"], envelope["signatures"][0]["sig"]))
    assert json.loads(payload) == STATEMENT
    assert envelope["payloadType"] == "application/vnd.in-toto+json"
    assert bundle["verificationMaterial"]["publicKey"]["hint"] == hashlib.sha256(signer.public.pem).hexdigest()
    signed = b"DSSEv1 28 application/vnd.in-toto+json %d %s" % (len(payload), payload)
    key = signer._key.public_key()
    # By cryptography itself, which raises an error where it does not hold.
    if isinstance(key, ec.EllipticCurvePublicKey):
        key.verify(signature, signed, ec.ECDSA(SHA256()))
    else:
        key.verify(signature, signed)


@kinds
def test_no_other_form_of_a_bundle_counts(kind: signing.Kind) -> None:
    signer, draw = Signer.new(kind), random.Random(3)
    text = json.dumps(signer.sign(STATEMENT))
    for _ in range(300):
        place = draw.randrange(len(text))
        changed = text[:place] + chr(ord(text[place]) ^ (1 << draw.randrange(7))) + text[place + 1 :]
        try:
            bundle = json.loads(changed)
        except ValueError:
            continue
        with pytest.raises(SignatureError):
            signer.public.open(bundle)


def test_the_second_signature_that_anybody_can_make_of_one_by_ecdsa_does_not_count() -> None:
    signer = Signer.new("p256")
    bundle = signer.sign(STATEMENT)
    signature = bundle["dsseEnvelope"]["signatures"][0]
    r, s = decode_dss_signature(base64.b64decode(signature["sig"]))
    other = copy.deepcopy(bundle)
    twin = encode_dss_signature(r, signing.P256_ORDER - s)
    other["dsseEnvelope"]["signatures"][0]["sig"] = base64.b64encode(twin).decode()
    with pytest.raises(SignatureError):
        signer.public.open(other)


@pytest.mark.parametrize("bundle", [None, "x", 3, [], {}, {"dsseEnvelope": {"payload": "é", "signatures": []}}])
def test_what_is_no_bundle(bundle: object) -> None:
    with pytest.raises(SignatureError, match="not a bundle"):
        Signer.new("ed25519").public.open(bundle)


@kinds
def test_a_public_key_is_read_from_its_line_and_from_pem(kind: signing.Kind) -> None:
    signer = Signer.new(kind)
    theirs = signer._key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    assert signer.public.pem == theirs
    assert PublicKey.parse(theirs.decode()) == PublicKey.parse(signer.public.line) == signer.public


def test_a_private_key_is_not_taken_for_a_public_one_and_not_repeated() -> None:
    secret = Signer.new("ed25519").pem().decode()
    with pytest.raises(ValueError, match="is a private key") as caught:
        PublicKey.parse(secret)
    assert secret.splitlines()[1] not in str(caught.value)


@pytest.mark.parametrize("text", ["", "hello", "aGVsbG8="])
def test_what_is_no_public_key(text: str) -> None:
    with pytest.raises(ValueError, match="not a public key"):
        PublicKey.parse(text)


def test_keys_of_other_kinds_are_refused(tmp_path: Path) -> None:
    key = rsa.generate_private_key(65537, 2048)
    public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    with pytest.raises(ValueError, match="another kind; expected Ed25519"):
        PublicKey.parse(public.decode())
    path = tmp_path / "key"
    path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    with pytest.raises(UserError, match="holds no private key"):
        Signer.read(str(path))
    with pytest.raises(UserError, match="cannot be read"):
        Signer.read(str(tmp_path / "none"))


def test_the_key_of_the_surroundings_comes_before_the_one_in_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = Signer.new("ed25519").public, Signer.new("ed25519").public
    assert signing.trusted_here() is None
    assert signing.required(theirs.line, "run 'r'") == theirs
    monkeypatch.setenv(signing.SIGNED_BY, ours.line)
    assert signing.trusted_here() == signing.required(ours.line, "run 'r'") == ours
    with pytest.raises(UserError, match=f"run 'r' names the signing key {theirs.name}.*given {ours.name}"):
        signing.required(theirs.line, "run 'r'")
