"""A seal on every frame: who does not know the key can neither write, change, repeat nor reorder one.

session key    HMAC(key, direction + nonces of hub and worker): one per direction and connection
tag            HMAC(session key, number of the frame + the frame)
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from typing import Literal, Self, final

TAG = 32  # bytes
_NUMBER = struct.Struct("!Q")

Role = Literal["hub", "worker"]


@final
class FrameMac:
    """One direction of a connection; both ends count the frames, so each frame has its place."""

    def __init__(self, key: bytes) -> None:
        self._keyed = hmac.new(key, digestmod=hashlib.sha256)
        self._number = 0

    def tag(self, frame: bytes | bytearray | memoryview) -> bytes:
        """The tag of the next frame."""
        made = self._keyed.copy()  # the key is hashed once, not for every frame
        made.update(_NUMBER.pack(self._number))
        made.update(frame)
        self._number += 1
        return made.digest()

    def is_next(self, tag: bytes | bytearray | memoryview, frame: bytes | bytearray | memoryview) -> bool:
        """Whether this is the other end's next frame, as it was sent."""
        return hmac.compare_digest(tag, self.tag(frame))


@final
class SealedSession:
    """What one end of a connection seals with, and what it expects of the other end."""

    def __init__(self, outgoing: FrameMac, incoming: FrameMac) -> None:
        self.outgoing, self.incoming = outgoing, incoming

    @classmethod
    def of(cls, role: Role, key: bytes, nonces: bytes) -> Self:
        """That of a hub or a worker, after a handshake with these nonces."""
        hubs, workers = (FrameMac(proof(key, f"session: {one}", nonces)) for one in ("hub", "worker"))
        return cls(hubs, workers) if role == "hub" else cls(workers, hubs)


def proof(key: bytes, role: str, nonces: bytes) -> bytes:
    """What only someone with the key can say about nonces; the roles keep it from being said back."""
    return hmac.new(key, role.encode() + b"\0" + nonces, hashlib.sha256).digest()
