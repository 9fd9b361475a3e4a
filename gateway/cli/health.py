"""Asks a gRPC server for its health; the probe of both container images.

Runs every few seconds beside a loaded service, so it imports nothing but gRPC.
"""

import argparse
import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc


def probe(address: str, *, service: str = "", timeout_s: float = 5.0) -> str:
    """The server's answer, SERVING or NOT_SERVING, or UNREACHABLE with the reason."""
    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s)
        except grpc.RpcError as error:
            assert isinstance(error, grpc.Call)
            return f"UNREACHABLE {error.code().name}: {error.details()}"
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


def main() -> int:
    """Prints the answer; 0 when the server is SERVING, else 1."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address", nargs="?", default="127.0.0.1:50051")
    parser.add_argument("--service", default="", help="a service's full name; default: the server")
    parser.add_argument("--timeout", type=float, default=5.0, help="seconds")
    options = parser.parse_args()
    answer = probe(options.address, service=options.service, timeout_s=options.timeout)
    print(answer)
    return 0 if answer == "SERVING" else 1


if __name__ == "__main__":
    sys.exit(main())
