"""What both clients are made with."""

from dataclasses import dataclass

from tandem_client.connection import Connection
from tandem_client.retries import Attempts, RetryPolicy


@dataclass(frozen=True, slots=True)
class Settings:
    """Of every call that does not bring its own."""

    connection: Connection
    timeout_s: float | None
    retries: RetryPolicy

    def attempts(self, timeout_s: float | None) -> Attempts:
        """A new call's; its timeout where it has one."""
        return Attempts(self.retries, self.timeout_s if timeout_s is None else timeout_s)
