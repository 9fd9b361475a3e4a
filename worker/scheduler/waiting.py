"""Requests without a row, and requests with an expiry. Both in order, neither scanned."""

from collections import Counter

from worker.scheduler.lazy_heap import LazyHeap
from worker.scheduler.request import Request, RequestState


class WaitingQueue:
    """By priority, then by arrival: a preempted request is ahead of all later ones."""

    def __init__(self) -> None:
        self._heap: LazyHeap[Request] = LazyHeap(lambda r: r.state is RequestState.WAITING)
        self._per_priority: Counter[int] = Counter()
        self._len = 0
        # Uids of members that are passed over.
        self._held: set[int] = set()

    def __len__(self) -> int:
        return self._len

    def position(self, priority: int) -> int:
        """How many are ahead of a request that comes now."""
        return sum(count for other, count in self._per_priority.items() if other >= priority)

    @property
    def num_held(self) -> int:
        return len(self._held)

    def push(self, request: Request) -> None:
        self._heap.push(request.order, request)
        self._count(request, 1)

    def hold(self, request: Request) -> None:
        """Takes up a member that keeps nobody waiting until it is released."""
        self._held.add(request.uid)
        self._count(request, 1)

    def release(self, request: Request) -> None:
        """Lets a held member go its way, in the place in which it came."""
        self._held.remove(request.uid)
        self._heap.push(request.order, request)

    def peek(self) -> Request | None:
        top = self._heap.peek()
        return top[1] if top else None

    def pop(self) -> Request:
        request = self._heap.pop()
        self._count(request, -1)
        return request

    def discard(self, request: Request) -> None:
        """Forgets a member whose state its owner changes from WAITING."""
        self._held.discard(request.uid)
        self._count(request, -1)

    def _count(self, request: Request, change: int) -> None:
        self._len += change
        self._per_priority[request.new.priority] += change
        if not self._per_priority[request.new.priority]:
            del self._per_priority[request.new.priority]


class Expiries:
    """When live requests end whatever they do."""

    def __init__(self) -> None:
        self._heap: LazyHeap[Request] = LazyHeap(lambda r: r.state is not RequestState.ENDED)

    def watch(self, request: Request) -> None:
        for moment in (request.new.deadline, request.new.time_limit):
            if moment is not None:
                self._heap.push((moment,), request)

    def next_due(self) -> float | None:
        """When the next live request expires, if ever."""
        top = self._heap.peek()
        return None if top is None else top[0][0]

    def pop_due(self, now: float) -> Request | None:
        """The live request that expired first, if one did by now."""
        top = self._heap.peek()
        if top is None or top[0][0] > now:
            return None
        return self._heap.pop()
