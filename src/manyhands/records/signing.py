"""Signatures of specs show that this account has started a run (the owner of a file is no proof).

The account has a random key in its configuration folder, and signs the spec.json of each run with it
(HMAC-SHA256 of its bytes). Only the content is signed: a folder may be moved or copied.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import stat
from pathlib import Path

from manyhands.core.atomic_files import open_regular, read_regular
from manyhands.core.errors import ManyhandsError

LENGTH = 32  # bytes of the key


class NoKeyError(ManyhandsError):
    """The account's key can be neither read nor created."""


def key_path() -> Path:
    """`~/.config/manyhands/key`, or `manyhands/key` in XDG_CONFIG_HOME."""
    configured = os.environ.get("XDG_CONFIG_HOME", "")
    try:
        base = Path(configured) if Path(configured).is_absolute() else Path.home() / ".config"
    except RuntimeError:
        raise NoKeyError("this account has no home folder") from None
    return base / "manyhands" / "key"


def why_not() -> str | None:
    """Why nothing can be signed; None if signing works."""
    try:
        _key()
    except NoKeyError as error:
        return str(error)
    return None


def signatures(content: bytes, before: bytes | None = None) -> bytes | None:
    """Return a line for a spec and one for the spec that it replaces; None if nothing can be signed.

    With both lines the folder is valid after a crash between the writes of spec.sig and spec.json.
    """
    try:
        key = _key()
    except NoKeyError:
        return None
    signed = [each for each in (content, before) if each is not None]
    return "".join(f"{_digest(key, each)}\n" for each in dict.fromkeys(signed)).encode()


def is_signed(content: bytes, signature: Path) -> bool:
    """Whether a line of the file `signature` is this account's signature of the content."""
    try:
        lines = read_regular(signature, most=1_000).decode("ascii", errors="replace").split()
        digest = _digest(_key(create=False), content)
    except (OSError, NoKeyError):
        return False
    return any(hmac.compare_digest(line.encode(), digest.encode()) for line in lines)


def _digest(key: bytes, content: bytes) -> str:
    return hmac.new(key, b"manyhands spec.json\n" + content, hashlib.sha256).hexdigest()


def _key(*, create: bool = True) -> bytes:
    path = key_path()
    try:
        if create and not os.path.lexists(path):
            _create(path)
        return _read(path)
    except OSError as error:
        raise NoKeyError(f"cannot read or create {path}: {(error.strerror or str(error)).lower()}") from None


def _read(path: Path) -> bytes:
    """Read the key; raise NoKeyError if another account owns it or may read it."""
    with os.fdopen(open_regular(path), "rb") as file:
        about = os.fstat(file.fileno())
        key = file.read(LENGTH + 1)
    if hasattr(os, "getuid"):
        if about.st_uid != os.getuid():
            raise NoKeyError(f"{path} belongs to another account")
        if stat.S_IMODE(about.st_mode) & 0o077:
            raise NoKeyError(
                f"{path} is open to other accounts: remove it, and the next run creates a new one"
            )
    if len(key) != LENGTH:
        raise NoKeyError(f"{path} is not a key: remove it, and the next run creates a new one")
    return key


def _create(path: Path) -> None:
    """Create the key atomically; if two processes do so at once, the first one wins."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if hasattr(os, "getuid") and path.parent.stat().st_uid != os.getuid():
        raise NoKeyError(f"{path.parent} belongs to another account")
    temporary = path.with_name(f".key.{secrets.token_hex(8)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(LENGTH))
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        temporary.unlink()
