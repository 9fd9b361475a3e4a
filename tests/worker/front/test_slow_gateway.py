"""A gateway that reads slowly gets fewer, larger messages; one too far behind is let go."""

import asyncio

import grpc
import numpy as np
import pytest

from shared.errors import QueueFullError, UnavailableError
from shared.pb.tandem.worker.v1 import worker_pb2 as pb
from shared.types import FinishReason
from tests.worker.front.conftest import MakeWorker
from worker.convert import uid_of
from worker.link import Link, LinkLimits
from worker.messages import Finished, Started, TokenLogprobs

LINK_ID = 3


class SlowReader:
    """A `write` that blocks until the test lets it go on."""

    def __init__(self) -> None:
        self.messages: list[pb.RunResponse] = []
        self.written = asyncio.Event()
        self.may_go = asyncio.Event()

    async def write(self, message: pb.RunResponse) -> None:
        self.messages.append(message)
        self.written.set()
        await self.may_go.wait()

    def outputs(self) -> list[pb.StepOutput]:
        return [message.output for message in self.messages if message.HasField("output")]


def push(link: Link, handle: int, token_ids: list[int], committed_at: float = 1.0) -> None:
    uids = np.full(len(token_ids), uid_of(LINK_ID, handle), np.int64)
    link.push_tokens(uids, np.array(token_ids, np.int32), committed_at)


def finished(handle: int) -> Finished:
    uid = uid_of(LINK_ID, handle)
    return Finished(uid, FinishReason.EOS, 2, 0, 3, 0.1, 0.2, 0.3)


def push_logprobs(link: Link, handle: int, token_ids: list[int], *, is_prompt: bool) -> None:
    count = len(token_ids)
    entries = TokenLogprobs(
        is_prompt=is_prompt,
        uids=np.full(count, uid_of(LINK_ID, handle), np.int64),
        token_ids=np.array(token_ids, np.int32),
        logprobs=np.zeros(count, np.float32),
        ranks=np.ones(count, np.int32),
        num_top=np.full(count, 1, np.int32),
        top_ids=np.ones((count, 1), np.int32),
        top_logprobs=np.zeros((count, 1), np.float32),
    )
    link.push_logprobs(entries, np.ones(count, np.bool_), 1.0)


async def test_many_logprobs_go_in_several_messages_each_entry_beside_its_token() -> None:
    # Twenty bytes an entry: a message is cut once it has three.
    limits = LinkLimits(max_message_logprob_bytes=50)
    link, reader = Link(LINK_ID, limits), SlowReader()
    link.live[7] = ("seven", 0)
    reader.may_go.set()
    for prompt in ([1, 2, 3, 4], [5], [6, 7], [8]):
        push_logprobs(link, 7, prompt, is_prompt=True)
    for token_id in range(10, 17):
        push_logprobs(link, 7, [token_id], is_prompt=False)
        push(link, 7, [token_id])
    link.push_ended(finished(7), 2.0)
    link.close(None)
    await link.send_all(reader.write)
    outputs = reader.outputs()
    told = [[list(e.token_ids) for e in output.logprobs] for output in outputs]
    assert told == [[[1, 2, 3, 4]], [[5], [6, 7]], [[8], [10], [11]], [[12], [13], [14]]] + [
        [[15], [16]]
    ]
    assert [list(o.token_ids) for o in outputs] == [[], [], [10, 11], [12, 13, 14], [15, 16]]
    assert [len(output.finished) for output in outputs] == [0, 0, 0, 0, 1]


async def test_a_gateway_too_many_logprobs_behind_is_let_go() -> None:
    link = Link(LINK_ID, LinkLimits(max_pending_logprob_bytes=100))
    link.live[7] = ("seven", 0)
    push_logprobs(link, 7, [1] * 5, is_prompt=True)
    push_logprobs(link, 7, [1], is_prompt=True)
    with pytest.raises(QueueFullError, match="120 bytes"):
        await link.ended()


async def test_steps_that_come_while_a_write_blocks_are_merged_in_order() -> None:
    link, reader = Link(LINK_ID, LinkLimits()), SlowReader()
    link.live[7] = ("seven", 0)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(link.send_all(reader.write))
        push(link, 7, [1])
        await reader.written.wait()
        for token_id in range(2, 12):
            push(link, 7, [token_id], committed_at=float(token_id))
        assert link.push_ended(finished(7), 20.0) == ("seven", 0)
        link.close(None)
        reader.may_go.set()
    first, second = reader.outputs()
    assert list(first.token_ids) == [1]
    assert list(second.token_ids) == list(range(2, 12))
    assert set(second.handles) == {7}
    assert [entry.handle for entry in second.finished] == [7]
    # The oldest of the merged steps tells the lag: 18 s before the last.
    assert second.committed_unix_us - first.committed_unix_us == pytest.approx(1e6, abs=2e5)


async def test_an_answer_is_sent_before_the_output_that_follows_it() -> None:
    link, reader = Link(LINK_ID, LinkLimits()), SlowReader()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(link.send_all(reader.write))
        link.answer(pb.RunResponse(accepted=pb.Accepted(handle=1)))
        await reader.written.wait()
        link.live[2] = ("two", 0)
        link.answer(pb.RunResponse(accepted=pb.Accepted(handle=2)))
        link.push_started(Started(uid_of(LINK_ID, 2), 0, 0, 0.0), 1.0)
        push(link, 2, [5])
        link.close(None)
        reader.may_go.set()
    kinds = [message.WhichOneof("event") for message in reader.messages]
    assert kinds == ["accepted", "accepted", "output"]


async def test_entries_of_requests_that_have_ended_are_dropped() -> None:
    link = Link(LINK_ID, LinkLimits())
    link.live[1] = ("one", 0)
    assert link.push_ended(finished(1), 1.0) == ("one", 0)
    assert link.push_ended(finished(1), 2.0) is None
    assert link.forget(1) is None


async def test_a_gateway_too_far_behind_is_let_go_at_the_limit() -> None:
    link = Link(LINK_ID, LinkLimits(max_pending_tokens=100))
    push(link, 1, [5] * 100)
    ended = asyncio.Task(link.ended())
    await asyncio.sleep(0)
    assert not ended.done()
    push(link, 1, [5])
    with pytest.raises(QueueFullError, match="101 tokens behind; at most 100"):
        await ended


async def test_commands_are_not_read_while_too_many_answers_wait() -> None:
    link, reader = Link(LINK_ID, LinkLimits(max_pending_answers=3)), SlowReader()
    for nonce in range(3):
        await link.has_room()
        link.answer(pb.RunResponse(pong=pb.Pong(nonce=nonce)))
    room = asyncio.Task(link.has_room())
    await asyncio.sleep(0)
    assert not room.done()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(link.send_all(reader.write))
        reader.may_go.set()
        await room
        link.close(None)


async def test_a_closed_link_sends_what_it_has_and_then_ends_with_its_error() -> None:
    link, reader = Link(LINK_ID, LinkLimits()), SlowReader()
    reader.may_go.set()
    push(link, 1, [5])
    link.close(UnavailableError("worker is shutting down"))
    await link.send_all(reader.write)
    assert [list(output.token_ids) for output in reader.outputs()] == [[5]]
    with pytest.raises(UnavailableError, match="shutting down"):
        await link.ended()


async def test_a_gateway_that_never_reads_is_let_go_and_its_pages_come_back(
    make_worker: MakeWorker,
) -> None:
    async with make_worker(max_running=256, max_context=32768, echo_step_ms=0) as worker:
        deaf = worker.link()
        for handle in range(256):
            await deaf.submit(handle, [5], max_tokens=30_000, ignore_eos=True)
        # It is let go when 262144 tokens wait, after the million or so that gRPC's buffers
        # take; all of them would be 7 million.
        await worker.wait_load(lambda load: load.running == 256)
        await worker.wait_load(lambda load: load.running == 0, timeout_s=40)
        assert (await worker.load()).generated_tokens < 256 * 30_000
        assert await deaf.ending() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert not any(outcome.num_endings for outcome in deaf.heard.values())
        await worker.assert_next_works()
        await worker.assert_clean()
