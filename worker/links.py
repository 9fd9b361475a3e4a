"""The open links by number, and the engine's output taken apart among them.

A request's uid holds the number of its link, so that nothing is looked up for each token.
"""

import itertools
from collections.abc import Iterator

from worker.convert import HANDLE_BITS, uid_of
from worker.link import Link, LinkLimits
from worker.messages import StepOutput, TokenLogprobs


class Links:
    """Every gateway that is connected. Runs on the event loop alone."""

    def __init__(self, limits: LinkLimits) -> None:
        self._limits = limits
        self._links: dict[int, Link] = {}
        # Never used again: output of a link that is gone must not reach another.
        self._ids = itertools.count(1)

    def __iter__(self) -> Iterator[Link]:
        return iter(self._links.values())

    def __len__(self) -> int:
        return len(self._links)

    def open(self) -> Link:
        link = Link(next(self._ids), self._limits)
        self._links[link.link_id] = link
        return link

    def close(self, link: Link) -> None:
        del self._links[link.link_id]

    def of(self, uid: int) -> Link | None:
        """The link of a request; None: it is gone."""
        return self._links.get(uid >> HANDLE_BITS)

    @property
    def num_waiting(self) -> int:
        """Requests that the scheduler has not taken up yet."""
        return sum(len(link.waiting) for link in self)

    def waiting_uids(self) -> list[int]:
        return [uid_of(link.link_id, handle) for link in self for handle in link.waiting]

    def push_tokens(self, output: StepOutput) -> None:
        """Each link its own tokens."""
        if not len(output.uids):
            return
        link_ids = output.uids >> HANDLE_BITS
        first = int(link_ids[0])
        if (link_ids == first).all():
            # One gateway: nothing is copied.
            if (link := self._links.get(first)) is not None:
                link.push_tokens(output.uids, output.token_ids, output.committed_at)
            return
        for link_id in set(link_ids.tolist()):
            if (link := self._links.get(link_id)) is not None:
                mine = link_ids == link_id
                link.push_tokens(output.uids[mine], output.token_ids[mine], output.committed_at)

    def push_logprobs(self, logprobs: TokenLogprobs, committed_at: float) -> None:
        """Each link its own entries."""
        link_ids = logprobs.uids >> HANDLE_BITS
        for link_id in set(link_ids.tolist()):
            if (link := self._links.get(link_id)) is not None:
                link.push_logprobs(logprobs, link_ids == link_id, committed_at)
