"""A message authentication code (MAC) on every frame: without the key none can be forged or replayed.

session key    HMAC(key, direction + nonces of server and worker): one per direction and connection
tag            HMAC(session key, number of the frame + the frame)
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from typing import Literal, Self, final

TAG = 32  # bytes
_NUMBER = struct.Struct("!Q")

Role = Literal["server", "worker"]


@final
class FrameMac:
    """One direction of a connection; both ends count the frames, so a tag is valid for one position only."""

    def __init__(self, key: bytes) -> None:
        self._keyed = hmac.new(key, digestmod=hashlib.sha256)
        self._number = 0

    def tag(self, frame: bytes | bytearray | memoryview) -> bytes:
        """The tag of the next frame."""
        digest = self._keyed.copy()  # the key is hashed once, not for every frame
        digest.update(_NUMBER.pack(self._number))
        digest.update(frame)
        self._number += 1
        return digest.digest()

    def is_next(self, tag: bytes | bytearray | memoryview, frame: bytes | bytearray | memoryview) -> bool:
        """Whether this is the other end's next frame, unchanged."""
        return hmac.compare_digest(tag, self.tag(frame))


@final
class SessionMacs:
    """The MACs of both directions of a connection, as one end uses them."""

    def __init__(self, outgoing: FrameMac, incoming: FrameMac) -> None:
        self.outgoing, self.incoming = outgoing, incoming

    @classmethod
    def of(cls, role: Role, key: bytes, nonces: bytes) -> Self:
        """Those of the server or of a worker, after a handshake with these nonces."""
        server, worker = (FrameMac(proof(key, f"session: {each}", nonces)) for each in ("server", "worker"))
        return cls(server, worker) if role == "server" else cls(worker, server)


def proof(key: bytes, role: str, nonces: bytes) -> bytes:
    """Proof of knowing the key; it names the role, so that it cannot be sent back to its author."""
    return hmac.new(key, role.encode() + b"\0" + nonces, hashlib.sha256).digest()
