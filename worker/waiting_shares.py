"""Whose requests wait at this worker, and whose must go when there is no room."""


class WaitingShares:
    """The waiting requests by client, in the order in which they came."""

    def __init__(self) -> None:
        # Client -> uid -> priority.
        self._waiting: dict[str, dict[int, int]] = {}
        self._client_of: dict[int, str] = {}

    def add(self, uid: int, client: str, priority: int) -> None:
        self._client_of[uid] = client
        self._waiting.setdefault(client, {})[uid] = priority

    def remove(self, uid: int) -> None:
        """It waits no more. Idempotent."""
        client = self._client_of.pop(uid, None)
        if client is None:
            return
        mine = self._waiting[client]
        del mine[uid]
        if not mine:
            del self._waiting[client]

    def displaced_by(self, client: str, priority: int) -> int | None:
        """Who must go for one more request of this client, if anybody must.

        The newest request of the client that has the most, but only if it then still has as
        many as the newcomer's client: so nobody is pushed below an equal share, and two
        clients never push each other out in turn. One of a higher priority stays.
        """
        own = len(self._waiting.get(client, ()))
        greediest = max(self._waiting.values(), key=len, default={})
        if len(greediest) < own + 2:
            return None
        return next((uid for uid in reversed(greediest) if greediest[uid] <= priority), None)
