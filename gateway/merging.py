"""Several completions of one request as one stream of events."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager

from gateway.completion import Event
from gateway.worker_link import WorkerLink
from shared.tasks import TaskSet


class PromptSharing:
    """What the first of several completions tells the others of the prompt they share."""

    def __init__(self) -> None:
        # Set with its first token: the prompt's pages are in the prefix cache then.
        self.prompt_is_cached = asyncio.Event()
        # Whose cache that is.
        self.link: WorkerLink | None = None


class _Ended:
    """One completion's stream has ended, by an error or as it should."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error


@asynccontextmanager
async def merged(
    streams: Sequence[AsyncGenerator[Event, None]], sharing: PromptSharing
) -> AsyncIterator[AsyncIterator[Event]]:
    """The events of all, as they come; the first waits for nothing, the others for its prompt.

    The first error of any is raised. Leaving the block closes them all.
    """
    # With room for one, the tokens of a client that is slow merge where they do for a
    # single completion: in the channels.
    queue: asyncio.Queue[Event | _Ended] = asyncio.Queue(maxsize=1)
    async with TaskSet() as tasks:
        for index, stream in enumerate(streams):
            tasks.start(_pump(stream, queue, sharing, is_first=index == 0), name="completion")
        yield _drain(queue, len(streams))


async def _pump(
    stream: AsyncGenerator[Event, None],
    queue: asyncio.Queue[Event | _Ended],
    sharing: PromptSharing,
    *,
    is_first: bool,
) -> None:
    try:
        async with aclosing(stream):
            if not is_first:
                await sharing.prompt_is_cached.wait()
            async for event in stream:
                await queue.put(event)
    # Whatever it is, it ends the call: raised where the call is, it becomes its status.
    except Exception as error:
        await queue.put(_Ended(error))
        return
    # The first may have ended before its first token.
    sharing.prompt_is_cached.set()
    await queue.put(_Ended(None))


async def _drain(queue: asyncio.Queue[Event | _Ended], num_streams: int) -> AsyncIterator[Event]:
    while num_streams:
        item = await queue.get()
        if not isinstance(item, _Ended):
            yield item
        elif item.error is not None:
            raise item.error
        else:
            num_streams -= 1
