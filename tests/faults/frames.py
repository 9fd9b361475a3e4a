"""Bytes that no client of ours would send: no HTTP/2, broken HTTP/2, and broken gRPC inside it."""

import random
import struct
from collections.abc import Mapping

from google.protobuf.message import Message

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _WINDOW_UPDATE, _CONTINUATION = 0, 1, 3, 4, 6, 8, 9
_END_STREAM, _END_HEADERS = 0x1, 0x4


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """One frame of HTTP/2 (RFC 9113, section 4.1)."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


SETTINGS = frame(_SETTINGS, 0, 0)


def headers(path: bytes, stream: int = 1, more: Mapping[bytes, bytes] | None = None) -> bytes:
    """The HEADERS of a gRPC call, every field literal and never indexed (RFC 7541, 6.2.2)."""
    fields = {
        b":method": b"POST",
        b":scheme": b"http",
        b":path": path,
        b":authority": b"localhost",
        b"content-type": b"application/grpc",
        b"te": b"trailers",
        **(more or {}),
    }
    block = b"".join(b"\x00" + _short(name) + _short(value) for name, value in fields.items())
    return frame(_HEADERS, _END_HEADERS, stream, block)


def only_message(message: Message, stream: int = 1) -> bytes:
    """The DATA that ends a call's request."""
    body = message.SerializeToString()
    return frame(_DATA, _END_STREAM, stream, struct.pack(">BI", 0, len(body)) + body)


def payloads(path: bytes, rng: random.Random) -> list[bytes]:
    """One for each kind of nonsense; `path` is a method that the server has."""
    opening = PREFACE + SETTINGS
    call = opening + headers(path)

    def message(body: bytes, *, flag: int = 0, length: int | None = None) -> bytes:
        prefix = struct.pack(">BI", flag, len(body) if length is None else length)
        return call + frame(_DATA, _END_STREAM, 1, prefix + body)

    return [
        b"\x00" * 4096,
        rng.randbytes(4096),
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(500),
        PREFACE[:10],
        PREFACE + rng.randbytes(2048),
        # A frame of the greatest length there is, of which nothing follows.
        opening + b"\xff\xff\xff" + struct.pack(">BBI", _DATA, 0, 1),
        # A header block that refers to what the table does not have.
        opening + frame(_HEADERS, _END_HEADERS, 1, b"\xff\xff\xff\xff\xff\xff\xff\x7f"),
        opening + frame(_HEADERS, _END_HEADERS, 2, b"\x82"),
        opening + frame(_CONTINUATION, 0, 1, b"\x82"),
        opening + frame(_SETTINGS, 0, 0, b"\x00" * 5),
        opening + frame(_WINDOW_UPDATE, 0, 0, b"\x00\x00\x00\x00"),
        opening + b"".join(frame(_RST_STREAM, 0, 2 * i + 1, b"\0" * 4) for i in range(500)),
        opening + b"".join(frame(_PING, 0, 0, b"\0" * 8) for _ in range(500)),
        # Streams that are opened and reset at once, again and again.
        opening
        + b"".join(
            headers(path, 2 * i + 1) + frame(_RST_STREAM, 0, 2 * i + 1, b"\0\0\0\x08")
            for i in range(200)
        ),
        opening + frame(0xEE, 0xFF, 77, rng.randbytes(100)),
        # A call that is none.
        call,
        message(rng.randbytes(300)),
        message(b"\x08", length=5_000),
        message(b"\x08", length=0xFFFFFFFF),
        message(b"\x0a\x02hi", flag=1),
        message(b"\x0a\x02hi", flag=7),
        message(b"\x0a\xff\xff\xff\xff\x0f"),
        opening + headers(b"/tandem.v1.InferenceService/None") + frame(_DATA, _END_STREAM, 1),
        # A path that is no text.
        opening + headers(b"/\xff\xfe") + frame(_DATA, _END_STREAM, 1),
    ]


def _short(text: bytes) -> bytes:
    """A string of less than 127 bytes, as it is (RFC 7541, 5.2)."""
    assert len(text) < 127
    return bytes([len(text)]) + text
