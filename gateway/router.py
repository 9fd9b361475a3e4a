"""Which worker takes a request."""

import time
from collections.abc import Callable, Collection, Sequence

from gateway.backoff import RETRY_AFTER_MS
from gateway.served_model import ModelInfo, ServedModel
from gateway.worker_link import WorkerLink
from shared.errors import UnavailableError


class Router:
    """Picks the least loaded ready worker of those that serve the model."""

    def __init__(
        self, links: Sequence[WorkerLink], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.links = tuple(links)
        self._clock = clock
        self._turn = 0

    @property
    def num_ready(self) -> int:
        return sum(link.is_ready for link in self.links)

    @property
    def known_model(self) -> ServedModel | None:
        """What is served, or was served last; None before any worker has been reached."""
        ready = [link.model for link in self.links if link.is_ready and link.model]
        known = ready or [link.model for link in self.links if link.model]
        return known[0] if known else None

    def model(self) -> ServedModel:
        """What is served now. Raises UnavailableError when no worker is ready."""
        if not self.num_ready:
            raise no_worker_error()
        model = self.known_model
        assert model is not None, "a ready worker's model is known"
        return model

    def pick(
        self,
        model: ModelInfo,
        tried: Collection[WorkerLink] = (),
        preferred: WorkerLink | None = None,
    ) -> WorkerLink:
        """A worker that was not tried. Raises UnavailableError when there is none."""
        candidates = self._candidates(model, tried)
        if not candidates:
            raise no_worker_error()
        if preferred in candidates:
            return preferred
        # Equals take turns, so that two idle workers share what comes one at a time.
        self._turn += 1
        turn, count, now = self._turn, len(candidates), self._clock()
        # A suspect worker is still better than none.
        order = sorted(
            range(count),
            key=lambda i: (
                candidates[i].is_suspect(now),
                candidates[i].num_live,
                (i + turn) % count,
            ),
        )
        return candidates[order[0]]

    def has_other(self, model: ModelInfo, tried: Collection[WorkerLink]) -> bool:
        return bool(self._candidates(model, tried))

    def _candidates(self, model: ModelInfo, tried: Collection[WorkerLink]) -> list[WorkerLink]:
        return [
            link
            for link in self.links
            if link.is_ready
            and link not in tried
            and link.model is not None
            and link.model.info.serves_like(model)
        ]


def no_worker_error() -> UnavailableError:
    """Nobody to serve the request now."""
    return UnavailableError("no worker is ready; try again soon", retry_after_ms=RETRY_AFTER_MS)
