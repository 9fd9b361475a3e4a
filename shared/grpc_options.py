"""Channel and server options that both services use, in one place because they must agree.

A client that pings more often than the server's minimum gets GOAWAY too_many_pings in the
middle of a long prefill; a message cap raised on one side only fails on the other.
"""

GrpcOptions = list[tuple[str, int | str]]

MAX_MESSAGE_BYTES = 32 * 1024 * 1024
CLIENT_KEEPALIVE_MS = 30_000
KEEPALIVE_TIMEOUT_MS = 10_000
# A server whose loop is busy may take a while to say hello.
CONNECT_TIMEOUT_MS = 5_000
# Well below every client's period: timers drift, and gRPC forbids only two early pings.
MIN_RECV_PING_INTERVAL_MS = 10_000
# Then a client is told to connect again; its calls go on over the old connection to their end.
SHARED_CONNECTION_AGE_MS = 600_000
# Calls that came in one burst and that the loop has yet to look at. Beyond a thousand gRPC
# would cancel some at random, which tells their clients neither why nor to come back; the
# services refuse in their own words what is too much.
MAX_PENDING_CALLS = 1 << 16
# Of one connection; more wait at their client. As many as a gateway process serves unless told
# otherwise. Without it, two connections that begin 160,000 calls a second and reset each at once
# keep everybody else waiting for 7 seconds, and take 1.2 GB; with it, 0.5 seconds and 0.2 GB.
MAX_CALLS_OF_A_CONNECTION = 4096


def server_options(
    *, max_message_bytes: int = MAX_MESSAGE_BYTES, reuse_port: bool = False
) -> GrpcOptions:
    """Options of a server.

    `reuse_port` lets several processes share the port on purpose; without it a second
    server on the same port fails instead of silently taking half of the connections.
    """
    # A process that was started anew has no connections until clients make new ones.
    spreading: GrpcOptions = [("grpc.max_connection_age_ms", SHARED_CONNECTION_AGE_MS)]
    return [
        *_message_caps(max_message_bytes),
        ("grpc.so_reuseport", int(reuse_port)),
        *(spreading if reuse_port else ()),
        ("grpc.max_concurrent_streams", MAX_CALLS_OF_A_CONNECTION),
        ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING_CALLS),
        ("grpc.http2.min_ping_interval_without_data_ms", MIN_RECV_PING_INTERVAL_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        # Finds frozen peers; the kernel finds dead ones.
        ("grpc.keepalive_time_ms", CLIENT_KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def channel_options(
    *,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    own_connection: bool = False,
    max_reconnect_backoff_ms: int = 0,
) -> GrpcOptions:
    """Options of a client channel.

    With `own_connection` the channel shares its TCP connection with no other channel of
    this process. A `max_reconnect_backoff_ms` of 0 leaves gRPC's own (two minutes).
    """
    options: GrpcOptions = [
        *_message_caps(max_message_bytes),
        ("grpc.keepalive_time_ms", CLIENT_KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]
    if own_connection:
        options.append(("grpc.use_local_subchannel_pool", 1))
    if max_reconnect_backoff_ms:
        options += [
            ("grpc.initial_reconnect_backoff_ms", min(100, max_reconnect_backoff_ms)),
            # No pause: this is how long one attempt may take, connection and settings.
            ("grpc.min_reconnect_backoff_ms", CONNECT_TIMEOUT_MS),
            ("grpc.max_reconnect_backoff_ms", max_reconnect_backoff_ms),
        ]
    return options


def _message_caps(max_message_bytes: int) -> GrpcOptions:
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
    ]
