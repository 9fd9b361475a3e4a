"""The header and the last line that every bench prints."""

from shared.bench_report import header, result

__all__ = ["header", "result"]
