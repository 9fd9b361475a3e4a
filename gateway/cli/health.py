"""Asks a gRPC server for its health; the probe of both container images.

Runs every few seconds beside a loaded service, so it imports nothing but gRPC.
"""

import argparse
import os
import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from shared.errors import SettingsError
from shared.tls import ClientTls, channel_credentials, client_tls, tls_options

_EXIT_BAD_CONFIGURATION = 2


def probe(
    address: str, *, service: str = "", timeout_s: float = 5.0, tls: ClientTls | None = None
) -> str:
    """The server's answer, SERVING or NOT_SERVING, or UNREACHABLE with the reason.

    Raises SettingsError when a file of `tls` cannot be used.
    """
    with _channel(address, tls) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s)
        except grpc.RpcError as error:
            assert isinstance(error, grpc.Call)
            return f"UNREACHABLE {error.code().name}: {error.details()}"
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


def main() -> int:
    """Prints the answer; 0 when the server is SERVING, 2 on a bad setting, else 1."""
    options = _options()
    try:
        tls = client_tls(options.tls_ca, options.tls_cert, options.tls_key, options.tls_server_name)
        answer = probe(options.address, service=options.service, timeout_s=options.timeout, tls=tls)
    except SettingsError as error:
        print(error, file=sys.stderr)
        return _EXIT_BAD_CONFIGURATION
    print(answer)
    return 0 if answer == "SERVING" else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address", nargs="?", default="127.0.0.1:50051")
    parser.add_argument("--service", default="", help="a service's full name; default: the server")
    parser.add_argument("--timeout", type=float, default=5.0, help="seconds")
    for name in ("ca", "cert", "key", "server_name"):
        # From the environment, so that a container with TLS needs no other command.
        variable = f"TANDEM_TLS_{name.upper()}"
        default = os.environ.get(variable, "")
        flag = f"--tls-{name.replace('_', '-')}"
        parser.add_argument(flag, default=default, help=f"as of `tandem health`; ${variable}")
    return parser.parse_args()


def _channel(address: str, tls: ClientTls | None) -> grpc.Channel:
    if tls is None:
        return grpc.insecure_channel(address)
    return grpc.secure_channel(address, channel_credentials(tls), options=tls_options(tls))


if __name__ == "__main__":
    sys.exit(main())
