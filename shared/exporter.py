"""Serves a registry of metrics over HTTP, in the clear and without a client's name."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from socketserver import TCPServer, ThreadingMixIn
from threading import Thread
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app

# How often the thread looks whether it shall end. The default, which prometheus-client's own
# server keeps, makes each stop of a service wait for up to half a second.
_POLL_S = 0.05


class _QuietHandler(WSGIRequestHandler):
    """Logs no scrapes."""

    def log_message(self, format: str, *args: Any) -> None:
        pass


class _Server(ThreadingMixIn, WSGIServer):
    # A scrape that hangs holds up nobody's end.
    daemon_threads = True

    def __init__(self, host: str, port: int) -> None:
        # The base class has IPv4 alone.
        (self.address_family, *_, address), *_ = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        super().__init__((str(address[0]), port), _QuietHandler)

    def server_bind(self) -> None:
        # The base's asks DNS for the name of its address, and a start would wait for the answer.
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]
        self.setup_environ()


@contextmanager
def metrics_exporter(registry: CollectorRegistry, host: str, port: int) -> Iterator[int]:
    """Serves from a thread of its own; yields the bound port.

    Port 0 turns it off. Raises OSError when the port is taken.
    """
    if port == 0:
        yield 0
        return
    with _Server(host, port) as server:
        server.set_app(make_wsgi_app(registry))
        thread = Thread(target=server.serve_forever, args=(_POLL_S,), name="metrics", daemon=True)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()
