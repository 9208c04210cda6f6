"""Which of this machine's addresses and network interfaces another machine can reach. Linux, no packets sent."""

from __future__ import annotations

import fcntl
import socket
import struct

LOOPBACK = "127.0.0.1"
_SIOCGIFADDR = 0x8915  # from linux/sockios.h: the IPv4 address of a named interface


def resolves(host: str) -> bool:
    """Whether `host` is an address or a name that this machine can look up."""
    try:
        return bool(socket.getaddrinfo(host, None))
    except OSError:
        return False


def address_towards(host: str) -> str:
    """The address that this machine shows to `host`, by its routing table; loopback where it is `host` itself.

    Raises OSError where `host` has no address or no route leads there.
    """
    family, kind, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)  # UDP: sets the route, sends nothing
        return str(probe.getsockname()[0])


def is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def interfaces() -> dict[str, str]:
    """IPv4 address → name of the interface that has it, for those that are set up."""
    found: dict[str, str] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                reply = fcntl.ioctl(probe, _SIOCGIFADDR, request)
            except OSError:  # this one has no IPv4 address
                continue
            found.setdefault(socket.inet_ntoa(reply[20:24]), name)
    return found
