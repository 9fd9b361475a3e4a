"""Which worker takes a request."""

import time
from collections.abc import Callable, Collection, Sequence

from gateway.affinity import PromptPrefix
from gateway.backoff import RETRY_AFTER_MS
from gateway.routing import Chooser, Reason, RoutingPolicy
from gateway.served_model import ModelInfo, ServedModel
from gateway.worker_link import WorkerLink
from shared.errors import UnavailableError
from shared.metrics import RoutingMetrics


class Router:
    """Picks a ready worker of those that serve the model, and remembers what it got."""

    def __init__(
        self,
        links: Callable[[], Sequence[WorkerLink]],
        chooser: Chooser,
        metrics: RoutingMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`links` tells of the workers there are now."""
        self._links = links
        self._chooser = chooser
        self._metrics = metrics
        self._clock = clock

    @property
    def links(self) -> tuple[WorkerLink, ...]:
        return tuple(self._links())

    @property
    def num_ready(self) -> int:
        return sum(link.is_ready for link in self.links)

    @property
    def known_model(self) -> ServedModel | None:
        """What is served, or was served last; None before any worker has been reached."""
        links = self.links
        ready = [link.model for link in links if link.is_ready and link.model]
        known = ready or [link.model for link in links if link.model]
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
        prompt: PromptPrefix,
        tried: Collection[WorkerLink] = (),
        preferred: WorkerLink | None = None,
    ) -> WorkerLink:
        """A worker that was not tried. Raises UnavailableError when there is none."""
        candidates = self._candidates(model, tried)
        if not candidates:
            raise no_worker_error()
        if preferred in candidates and len(candidates) > 1:
            link, reason = preferred, Reason.PREFIX
        else:
            link, reason = self._chooser.choose(candidates, prompt, self._clock())
        self._metrics.decisions.labels(reason.value).inc()
        if tried:
            self._metrics.retries.inc()
        if self._chooser.policy is RoutingPolicy.PREFIX and len(self._links()) > 1:
            link.prefixes.send(prompt, link.page_size)
        return link

    def has_other(
        self, model: ModelInfo, tried: Collection[WorkerLink], *, with_room: bool = False
    ) -> bool:
        others = self._candidates(model, tried)
        return any(not link.is_full for link in others) if with_room else bool(others)

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
