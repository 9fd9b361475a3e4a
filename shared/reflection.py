"""Server reflection that finds methods by name as well: ghz asks for nothing else.

The descriptor pool of protobuf's C implementation finds files by their services, messages
and fields, but not by their methods.
"""

from collections.abc import Iterable
from typing import Any

import grpc
from google.protobuf import descriptor_pool
from google.protobuf.descriptor import FileDescriptor
from grpc_reflection.v1alpha import reflection


def enable_reflection(server: grpc.aio.Server, service_names: Iterable[str]) -> None:
    """Adds the reflection service, itself and the named services to be found."""
    names = (*service_names, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server, _Pool(descriptor_pool.Default()))


class _Pool:
    """A descriptor pool in which a method is a symbol too."""

    def __init__(self, pool: descriptor_pool.DescriptorPool) -> None:
        self._pool = pool

    # The name is protobuf's.
    def FindFileContainingSymbol(self, symbol: str) -> FileDescriptor:
        try:
            return self._pool.FindFileContainingSymbol(symbol)
        except KeyError:
            return self._pool.FindMethodByName(symbol).containing_service.file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)
