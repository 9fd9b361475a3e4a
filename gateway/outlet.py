"""Tokens to their client without the request's task, which sleeps while they flow.

Whoever adds to a channel, or ends a write, makes the next message and begins to write it. A
message then takes none of the task switches, generators and futures of the way through the
task, which everything else goes: what comes before the first token, the end, and errors.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from gateway.channel import RequestChannel
from gateway.completion import Completion, Delta
from gateway.stream_writer import StreamWriter


class Outlet:
    """One client's stream, for one completion."""

    def __init__(self, writer: StreamWriter, to_message: Callable[[Delta], Any]) -> None:
        """`to_message` is called once for each delta, in their order."""
        self._writer = writer
        self._to_message = to_message

    async def carry(self, completion: Completion, channel: RequestChannel) -> None:
        """Writes deltas for as long as tokens are all that comes.

        Then nothing is being written, and the channel tells of what is in it. Raises what
        went wrong with a delta or with a write.
        """
        if not completion.is_flowing:
            return
        flow = _Flow(self._writer, self._to_message, completion, channel)
        channel.listen(flow.go_on)
        try:
            flow.go_on()
            await flow.over
        finally:
            flow.has_ended = True
            channel.listen(None)
        if flow.error is not None:
            raise flow.error
        await self._writer.drain()


class _Flow:
    """One time that tokens flow."""

    def __init__(
        self,
        writer: StreamWriter,
        to_message: Callable[[Delta], Any],
        completion: Completion,
        channel: RequestChannel,
    ) -> None:
        self._writer = writer
        self._to_message = to_message
        self._completion = completion
        self._channel = channel
        self._waits_for_writer = False
        self.has_ended = False
        self.error: BaseException | None = None
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def go_on(self) -> None:
        """Writes what waits as far as the writer is free; never raises."""
        if self.has_ended or self._waits_for_writer:
            return
        try:
            self._write_on()
        # CancelledError, too: that of a write is not one of the task that adds to the channel.
        except (Exception, asyncio.CancelledError) as error:
            self._end(error)

    def _write_on(self) -> None:
        channel, completion, writer = self._channel, self._completion, self._writer
        while channel.token_ids and channel.end is None:
            if not writer.is_free:
                self._waits_for_writer = True
                writer.when_free(self._on_free)
                return
            delta = completion.take_delta(channel)
            if delta is not None:
                writer.begin(self._to_message(delta))
            if completion.has_stopped:
                self._end(None)
                return
        if channel.end is not None:
            self._end(None)

    def _on_free(self) -> None:
        self._waits_for_writer = False
        self.go_on()

    def _end(self, error: BaseException | None) -> None:
        self.has_ended, self.error = True, error
        # It is done when its task was cancelled.
        if not self.over.done():
            self.over.set_result(None)
