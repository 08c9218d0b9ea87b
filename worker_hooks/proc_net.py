"""The inet sockets of a network namespace, as /proc/<pid>/net shows them."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROTOCOLS = ("tcp", "tcp6", "udp", "udp6", "raw", "raw6")
_LISTEN = "0A"


@dataclass(frozen=True)
class Address:
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Connection:
    """One socket; ``remote`` is None where it has no peer: a listener, or not connected."""

    protocol: str
    inode: int
    local: Address
    remote: Address | None


def connections(net: Path) -> Iterator[Connection]:
    """Every TCP, UDP and raw socket that ``net`` (a /proc/<pid>/net) lists."""
    for name in PROTOCOLS:
        try:
            lines = (net / name).read_text().splitlines()[1:]
        except FileNotFoundError:  # no IPv6 here, or the process has ended
            continue
        for line in lines:
            fields = line.split()
            remote = _address(fields[2])
            connected = (
                fields[3] != _LISTEN and (remote.port != 0 or name.startswith("raw")) and not _unspecified(remote)
            )
            yield Connection(
                protocol=name.removesuffix("6"),
                inode=int(fields[9]),
                local=_address(fields[1]),
                remote=remote if connected else None,
            )


def _address(text: str) -> Address:
    """``0100007F:1F90`` is 127.0.0.1:8080: the address in 32-bit words of the host's byte order (little-endian)."""
    host, port = text.split(":")
    words = bytes.fromhex(host)
    raw = b"".join(words[start : start + 4][::-1] for start in range(0, len(words), 4))
    address = ipaddress.ip_address(raw)
    mapped = getattr(address, "ipv4_mapped", None)
    return Address(str(mapped or address), int(port, 16))


def _unspecified(address: Address) -> bool:
    return address.port == 0 and ipaddress.ip_address(address.host).is_unspecified
