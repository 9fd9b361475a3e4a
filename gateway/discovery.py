"""Where workers are: addresses as they stand, and DNS names that are asked again and again."""

import asyncio
import socket
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import structlog

_log = structlog.get_logger(__name__)

_DNS = "dns:///"


@dataclass(frozen=True, slots=True, order=True)
class Endpoint:
    """One worker's place."""

    # host:port, or [v6]:port.
    address: str
    # The name that it was found by, for its certificate; empty: its address says it all.
    server_name: str = ""


@dataclass(frozen=True, slots=True, order=True)
class DnsName:
    """A name that stands for any number of workers."""

    host: str
    port: int


class Resolver(Protocol):
    """Finds the addresses of a name."""

    async def resolve(self, name: DnsName) -> Collection[str]:
        """All of them, as host:port. Raises OSError."""
        ...


class SystemResolver:
    """As the machine resolves names: hosts file, then DNS; IPv4 and IPv6."""

    async def resolve(self, name: DnsName) -> Collection[str]:
        loop = asyncio.get_running_loop()
        infos = await loop.getaddrinfo(name.host, name.port, type=socket.SOCK_STREAM)
        return {_address(str(info[4][0]), int(info[4][1])) for info in infos}


def worker_place(text: str) -> Endpoint | DnsName:
    """What `host:port` or `dns:///name:port` says. Raises ValueError."""
    if not text.startswith("dns:"):
        return Endpoint(text)
    host, _, port = text.removeprefix(_DNS).rpartition(":")
    is_whole = text.startswith(_DNS) and host and "/" not in host and port.isdecimal()
    if not is_whole or not _is_name(host):
        raise ValueError(f"must be like {_DNS}name:port, got {text}")
    if not 1 <= int(port) <= 65535:
        raise ValueError(f"port must be 1 to 65535, got {text}")
    return DnsName(host, int(port))


class Discovery:
    """Tells who is there, at first and whenever that changes."""

    def __init__(
        self,
        places: Iterable[Endpoint | DnsName],
        on_found: Callable[[Sequence[Endpoint]], None],
        *,
        resolver: Resolver,
        interval_s: float,
    ) -> None:
        """Tells of the fixed addresses at once."""
        places = list(places)
        self._fixed = [place for place in places if isinstance(place, Endpoint)]
        # What each name stood for when it could last be resolved.
        self._resolved: dict[DnsName, list[Endpoint]] = {
            place: [] for place in places if isinstance(place, DnsName)
        }
        self._on_found = on_found
        self._resolver = resolver
        self._interval_s = interval_s
        self._complaints: dict[DnsName, str] = {}
        self._tell()

    async def run(self) -> None:
        """Resolves for as long as it is not cancelled; returns if there are no names."""
        while self._resolved:
            if any(await asyncio.gather(*(self._resolve(name) for name in self._resolved))):
                self._tell()
            await asyncio.sleep(self._interval_s)

    async def _resolve(self, name: DnsName) -> bool:
        """Whether it stands for others now. Nothing is forgotten because DNS is down."""
        try:
            addresses = await self._resolver.resolve(name)
        except OSError as error:
            if self._complaints.get(name) != str(error):
                self._complaints[name] = str(error)
                _log.warning("name not resolved", name=name.host, reason=str(error))
            return False
        self._complaints.pop(name, None)
        found = [Endpoint(address, name.host) for address in sorted(addresses)]
        if found == self._resolved[name]:
            return False
        _log.info("workers resolved", name=name.host, addresses=sorted(addresses))
        self._resolved[name] = found
        return True

    def _tell(self) -> None:
        found: dict[str, Endpoint] = {}
        for endpoint in (*self._fixed, *(e for each in self._resolved.values() for e in each)):
            found.setdefault(endpoint.address, endpoint)
        self._on_found(list(found.values()))


def _is_name(host: str) -> bool:
    """Whether it can be asked for: no part of it is empty, or longer than DNS has them."""
    try:
        host.encode("idna")
    except UnicodeError:
        return False
    return True


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
