"""The address at which other hosts reach this one, and sockets that listen at one address only."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Sequence
from contextlib import suppress

from manyhands.core.errors import UsageError

MASTER = "MASTER_ADDR"


def is_loopback(host: str) -> bool:
    """Whether this name or address always means the local host."""
    if host == "localhost":
        return True
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False


def source(address: str) -> str:
    """The local address from which a packet to another host would leave. OSError if there is no route."""
    found = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)
    family, kind, _, _, where = min(found, key=lambda one: one[0] != socket.AF_INET)  # as in gloo
    with socket.socket(family, kind) as probe:
        probe.connect(where)  # sends nothing
        return str(probe.getsockname()[0])


def outward(others: Sequence[str]) -> str:
    """The address at which these hosts reach this one: MASTER_ADDR, or the local end of the route to them."""
    if given := os.environ.get(MASTER):
        return given
    for other in others:
        with suppress(OSError):
            if not is_loopback(found := source(other)):
                return found
    raise UsageError(
        f"there is no route from this host to {', '.join(others)}: set {MASTER} at worker 0 to the address "
        "at which other hosts reach it"
    )


def check_reachable(host: str) -> None:
    """Refuse a name that resolves to the loopback on this host, as is common in /etc/hosts."""
    where = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][4][0]
    if is_loopback(str(where)):
        raise UsageError(
            f"{MASTER}={host} is {where} on this host, so other hosts cannot reach worker 0: "
            "use an address that they can reach"
        )


def listener(host: str, port: int, backlog: int = 512) -> socket.socket:
    """A socket that listens at this address only. OSError if that is not possible."""
    family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    if ipaddress.ip_address(where[0]).is_unspecified:
        raise OSError(f"{host} means every address of this host: give one address")
    made = socket.socket(family)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind(where)
        made.listen(backlog)
    except OSError:
        made.close()
        raise
    return made
