"""By which address other hosts reach this one, and sockets that listen at one address and nowhere else."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Sequence
from contextlib import suppress

from manyhands.core.errors import UsageError

MASTER = "MASTER_ADDR"


def is_loopback(host: str) -> bool:
    """Whether every host means itself by this."""
    if host == "localhost":
        return True
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False


def source(address: str) -> str:
    """The address of ours from which a packet to another would leave; OSError where no way leads there."""
    found = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)
    family, kind, _, _, where = min(found, key=lambda one: one[0] != socket.AF_INET)  # as gloo has it
    with socket.socket(family, kind) as probe:
        probe.connect(where)  # sends nothing
        return str(probe.getsockname()[0])


def outward(others: Sequence[str]) -> str:
    """By which these hosts reach this one: what MASTER_ADDR says, or where the way to them begins."""
    if given := os.environ.get(MASTER):
        return given
    for other in others:
        with suppress(OSError):
            if not is_loopback(found := source(other)):
                return found
    raise UsageError(
        f"no way leads from this host to {', '.join(others)}: set {MASTER} at worker 0 to the address by "
        "which other hosts reach it"
    )


def check_reachable(host: str) -> None:
    """Refuse a name that here leads to the loopback, as it often does in /etc/hosts."""
    where = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][4][0]
    if is_loopback(str(where)):
        raise UsageError(
            f"{MASTER}={host} is {where} on this host, where no other host reaches worker 0: "
            "use the address by which they do"
        )


def listener(host: str, port: int, backlog: int = 512) -> socket.socket:
    """A socket that listens at this address of this host only; OSError, as a rule with a reason to read."""
    family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    if ipaddress.ip_address(where[0]).is_unspecified:
        raise OSError(f"{host} stands for every address of this host, and one is needed")
    made = socket.socket(family)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind(where)
        made.listen(backlog)
    except OSError:
        made.close()
        raise
    return made
