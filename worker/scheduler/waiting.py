"""Requests without a row, and requests with an expiry. Both in order, neither scanned."""

from worker.scheduler.lazy_heap import LazyHeap
from worker.scheduler.request import Request, RequestState

_SMALLEST_SWEEP = 64


class WaitingQueue:
    """By priority; within one, preempted requests first, then clients by fair shares.

    A client's share is counted in tokens, prompt and max_tokens together: that is the most a
    request may take of the device, and all that is known of it when its turn is decided. Who
    asks for fewer has more turns. What a client asks for is served in the order in which it
    came; requests that name no client are those of one client, so they go by arrival.
    """

    def __init__(self) -> None:
        self._levels: dict[int, _Level] = {}
        self._len = 0
        # Uids of members that are passed over.
        self._held: set[int] = set()

    def __len__(self) -> int:
        return self._len

    def position(self, priority: int, client: str = "") -> int:
        """How many are ahead of a request of this client that comes now, about.

        Of every other client as many as it has itself, and one more: exact if all requests
        are of one size and no others come.
        """
        ahead = sum(level.num_members for other, level in self._levels.items() if other > priority)
        level = self._levels.get(priority)
        return ahead if level is None else ahead + level.position(client)

    @property
    def num_held(self) -> int:
        return len(self._held)

    def push(self, request: Request) -> None:
        level = self._join(request)
        level.make_ready(request)

    def hold(self, request: Request) -> None:
        """Takes up a member that keeps nobody waiting until it is released."""
        self._held.add(request.uid)
        self._join(request)

    def release(self, request: Request) -> None:
        """Lets a held member go its way, in the place in which it came."""
        self._held.remove(request.uid)
        self._levels[request.new.priority].make_ready(request)

    def peek(self) -> Request | None:
        level = self._first_level()
        return None if level is None else level.peek()

    def pop(self) -> Request:
        level = self._first_level()
        assert level is not None, "there must be something"
        request = level.pop()
        self._leave(request, level)
        return request

    def discard(self, request: Request) -> None:
        """Forgets a member whose state its owner changes from WAITING."""
        level = self._levels[request.new.priority]
        if request.uid in self._held:
            self._held.remove(request.uid)
        else:
            level.unready(request)
        self._leave(request, level)

    def _first_level(self) -> "_Level | None":
        if len(self._levels) == 1:
            (only,) = self._levels.values()
            return only if only.num_ready else None
        ready = [priority for priority, level in self._levels.items() if level.num_ready]
        return self._levels[max(ready)] if ready else None

    def _join(self, request: Request) -> "_Level":
        self._len += 1
        level = self._levels.get(request.new.priority)
        if level is None:
            # Two heaps: too much to make for every request in case it is the first.
            level = self._levels[request.new.priority] = _Level()
        level.join(request)
        return level

    def _leave(self, request: Request, level: "_Level") -> None:
        self._len -= 1
        level.leave(request)
        if level.num_members:
            return
        if len(self._levels) == 1:
            level.begin_anew()
        else:
            del self._levels[request.new.priority]


class _Client:
    """What one client has waiting at one priority."""

    __slots__ = ("due", "num_members", "num_ready", "requests", "turn")

    def __init__(self) -> None:
        self.requests: LazyHeap[Request] = LazyHeap(lambda r: r.state is RequestState.WAITING)
        # Held ones included.
        self.num_members = 0
        self.num_ready = 0
        # Tokens it has been served, on the level's clock: the least of all has the next turn.
        self.due = 0.0
        # Its one valid entry among the level's turns; None while it has nothing ready.
        self.turn: _Turn | None = None


class _Turn:
    """A client's place in the order of turns; out of date once the client has another."""

    __slots__ = ("client",)

    def __init__(self, client: _Client) -> None:
        self.client = client


class _Level:
    """Those of one priority: start-time fair queueing over the clients.

    The clock goes at the pace at which a client with a fair share is served: by each
    request's tokens, divided by the clients that have something ready. A client that comes
    back starts at the clock, so it has neither saved up turns nor lost any. A clock that went
    by the turns' own times alone would stand still, and an old client starve, as long as ever
    new names come.
    """

    def __init__(self) -> None:
        self.num_members = 0
        self.num_ready = 0
        # Those that ran before; they were charged for then.
        self._resumed: LazyHeap[Request] = LazyHeap(lambda r: r.state is RequestState.WAITING)
        # They are never held.
        self._num_resumed = 0
        self._clients: dict[str, _Client] = {}
        self._turns: LazyHeap[_Turn] = LazyHeap(lambda turn: turn.client.turn is turn)
        self._num_clients_ready = 0
        # Whose turn it is, as long as no turn has changed.
        self._next: _Client | None = None
        self._clock = 0.0
        self._sweep_at = _SMALLEST_SWEEP

    def begin_anew(self) -> None:
        """Nobody waits, so nobody has had too much."""
        self._clock = 0.0
        if len(self._clients) == 1:
            # The ordinary case, and cheaper than making it again for the next request.
            (client,) = self._clients.values()
            client.due = 0.0
        else:
            self._clients.clear()

    def position(self, client: str) -> int:
        mine = self._clients.get(client)
        own = mine.num_members if mine else 0
        shares = sum(min(c.num_members, own + 1) for c in self._clients.values() if c is not mine)
        return self._num_resumed + own + shares

    def join(self, request: Request) -> None:
        self.num_members += 1
        if _has_run(request):
            self._num_resumed += 1
        else:
            self._client_of(request).num_members += 1

    def leave(self, request: Request) -> None:
        self.num_members -= 1
        if _has_run(request):
            self._num_resumed -= 1
        else:
            self._clients[request.new.client].num_members -= 1

    def make_ready(self, request: Request) -> None:
        self.num_ready += 1
        if _has_run(request):
            self._resumed.push((request.arrival,), request)
            return
        client = self._clients[request.new.client]
        client.requests.push((request.arrival,), request)
        client.num_ready += 1
        if client.num_ready == 1:
            client.due = max(client.due, self._clock)
            self._num_clients_ready += 1
            self._give_turn(client)

    def unready(self, request: Request) -> None:
        """One that leaves without its turn; its entry dies with its state."""
        self.num_ready -= 1
        if not _has_run(request):
            self._take_from(self._clients[request.new.client])

    def peek(self) -> Request:
        first = self._resumed if self._num_resumed else self._next_client().requests
        request = first.peek()
        assert request is not None, "a client with a turn has something ready"
        return request[1]

    def pop(self) -> Request:
        self.num_ready -= 1
        if self._num_resumed:
            return self._resumed.pop()
        client = self._next_client()
        request = client.requests.pop()
        cost = request.prompt_len + request.new.max_tokens
        self._clock = max(self._clock, client.due) + cost / self._num_clients_ready
        client.due += cost
        self._take_from(client)
        if client.num_ready:
            self._give_turn(client)
        return request

    def _next_client(self) -> _Client:
        if self._next is None:
            turn = self._turns.peek()
            assert turn is not None, "something is ready"
            self._next = turn[1].client
        return self._next

    def _give_turn(self, client: _Client) -> None:
        first = client.requests.peek()
        assert first is not None
        client.turn = _Turn(client)
        self._next = None
        self._turns.push((client.due, first[1].arrival), client.turn)

    def _take_from(self, client: _Client) -> None:
        client.num_ready -= 1
        if not client.num_ready:
            client.turn = None
            self._next = None
            self._num_clients_ready -= 1

    def _client_of(self, request: Request) -> _Client:
        client = self._clients.get(request.new.client)
        if client is None:
            if len(self._clients) >= self._sweep_at:
                self._sweep()
            client = self._clients[request.new.client] = _Client()
        return client

    def _sweep(self) -> None:
        """Forgets clients that would start at the clock anyhow."""
        self._clients = {
            name: client
            for name, client in self._clients.items()
            if client.num_members or client.due > self._clock
        }
        self._sweep_at = max(_SMALLEST_SWEEP, 2 * len(self._clients))


def _has_run(request: Request) -> bool:
    return request.admitted_at is not None


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
