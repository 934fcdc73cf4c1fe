"""The addresses at which processes listen, from /proc."""

from __future__ import annotations

import contextlib
import ipaddress
import os
from pathlib import Path

LISTEN = "0A"


def listening(pid: int | None = None) -> set[str]:
    """`address:port` of every TCP socket at which a process (by default this one) listens."""
    process = pid or os.getpid()
    mine = set()
    for descriptor in Path(f"/proc/{process}/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            mine.add(str(descriptor.readlink()))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{process}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTEN and f"socket:[{fields[9]}]" in mine:
                address, port = fields[1].split(":")
                found.add(f"{_address(address)}:{int(port, 16)}")
    return found


def open_to_others(found: set[str]) -> set[str]:
    """The addresses that other hosts can reach."""
    return {each for each in found if not ipaddress.ip_address(each.rpartition(":")[0]).is_loopback}


def _address(text: str) -> str:
    """An address from /proc/net: words of 32 bits in the byte order of the machine."""
    words = [bytes.fromhex(text[at : at + 8])[::-1] for at in range(0, len(text), 8)]
    packed = ipaddress.ip_address(b"".join(words))
    mapped = getattr(packed, "ipv4_mapped", None)
    return str(mapped or packed)
