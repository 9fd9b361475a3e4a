"""Where a service under test may listen."""

import socket


def free_port(host: str = "127.0.0.1") -> int:
    """A port nobody listens on now. OSError: there is no such host here."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as sock:
        sock.bind((host, 0))
        return int(sock.getsockname()[1])
