"""Encryption at rest: an AES-256-GCM codec for App(codec=…), with key rotation."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from os import urandom
from typing import cast

from txbox.errors import ConfigurationError, installed

with installed("crypto", "AesGcm"):
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

_KEY_BYTES = 32
_NONCE_BYTES = 12
_NAME_BYTES = 64
# format version; it is followed by the length and name of the key, the nonce, and the ciphertext with its tag
_FORM = b"\x01"
# bound to the context, too
_BOUND_FORM = b"\x02"
_BOUND = b"txbox at rest"


def new_key() -> str:
    """Return a fresh key as base64, for your secret store."""
    return base64.b64encode(urandom(_KEY_BYTES)).decode()


class AesGcm:
    """A codec. The first key encrypts; all of them decrypt.

    Args:
        keys: name → key, as base64 of 32 random bytes (`new_key`). A name is 1 to 64 printable ASCII characters. It
            is stored in the rows and not secret. Never reuse a name for another key.

    Each ciphertext names its key, so keys may change between any two writes to a row. Nonces are 96 random bits: use
    a key for fewer than 2**32 encryptions (a failed attempt takes four), then put a new key before it. The key's name
    is authenticated, and so are table, consumer, id and column: whoever can write to the tables can delete and repeat,
    but neither forge a text nor move one to another message.

    Raises:
        ConfigurationError: no key, or an invalid one. Error messages never contain a key.
    """

    def __init__(self, keys: Mapping[str, str]) -> None:
        if not isinstance(cast("object", keys), Mapping) or not keys:
            raise ConfigurationError(
                "AesGcm takes a mapping of names to keys, the one that encrypts first: "
                "AesGcm({'2026-11': os.environ['SHOP_KEY']})."
            )
        self._keys = {_name(name): AESGCM(_key(name, key)) for name, key in keys.items()}
        #: The name of the key that encrypts.
        self.key_id = next(iter(self._keys))

    @property
    def key_ids(self) -> tuple[str, ...]:
        """The names of all keys."""
        return tuple(self._keys)

    def __repr__(self) -> str:
        return f"AesGcm({', '.join(self.key_ids)})"

    def encode(self, data: bytes, context: bytes | None = None) -> bytes:
        """Encrypt under the first key.

        Args:
            context: what the ciphertext is bound to: row and column.
        """
        form = _FORM if context is None else _BOUND_FORM
        head, nonce = _head(form, self.key_id), urandom(_NONCE_BYTES)
        bound = _BOUND + head + (context or b"")
        return head + nonce + self._keys[self.key_id].encrypt(nonce, data, bound)

    def decode(self, data: bytes, key_id: str, context: bytes | None = None) -> bytes:
        """Decrypt with the key that the ciphertext names.

        Args:
            key_id: the row's key, which may be newer than that of this ciphertext.
            context: as for `encode`; a ciphertext of the form without one is not bound to it.

        Raises:
            ConfigurationError: another format, an unknown key, or altered bytes.
        """
        if (
            data[:1] not in (_FORM, _BOUND_FORM)
            or len(data) < 2
            or len(data) < 2 + data[1] + _NONCE_BYTES
        ):
            raise ConfigurationError(
                f"A row of key {key_id!r} was not written by AesGcm: use the codec that wrote it."
            )
        end = 2 + data[1]
        head, nonce, sealed = data[:end], data[end : end + _NONCE_BYTES], data[end + _NONCE_BYTES :]
        name = head[2:].decode("ascii", "backslashreplace")
        cipher = self._keys.get(name)
        if cipher is None:
            raise ConfigurationError(
                f"A row is encrypted with key {name!r}, and AesGcm has {', '.join(self._keys)}: add it after these."
            )
        try:
            bound = context if data[:1] == _BOUND_FORM else None
            return cipher.decrypt(nonce, sealed, _BOUND + head + (bound or b""))
        except InvalidTag:
            raise ConfigurationError(
                f"A row cannot be decrypted with key {name!r}: it was written with another key of this name, or its "
                "bytes were altered or moved in the database."
            ) from None


def _head(form: bytes, name: str) -> bytes:
    return form + bytes([len(name)]) + name.encode()


def _name(name: object) -> str:
    if (
        isinstance(name, str)
        and name.isascii()
        and name.isprintable()
        and 1 <= len(name) <= _NAME_BYTES
    ):
        return name
    raise ConfigurationError(
        f"invalid key name {name!r}: use 1 to {_NAME_BYTES} printable ASCII characters."
    )


def _key(name: str, key: object) -> bytes:
    # URL-safe base64 and missing padding are fine: secret stores use both
    text = key.strip().rstrip("=") if isinstance(key, str) else ""
    try:
        raw = base64.b64decode(
            text.replace("-", "+").replace("_", "/") + "=" * (-len(text) % 4), validate=True
        )
    except (binascii.Error, ValueError):
        raw = b""
    if len(raw) != _KEY_BYTES:
        raise ConfigurationError(
            f"The key {name!r} is not {_KEY_BYTES} bytes in base64: make one with txbox.encryption.new_key()."
        )
    return raw
