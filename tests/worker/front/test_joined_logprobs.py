"""Log-probabilities of steps that wait: together they say what they would say one by one."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from shared.metrics import WorkerMetrics
from shared.pb.tandem.worker.v1 import worker_pb2 as pb
from shared.types import FinishReason
from tests.worker.front.harness import neutral_sampling
from worker.convert import uid_of
from worker.dispatcher import Dispatcher, DispatcherLimits
from worker.link import Link, LinkLimits
from worker.messages import (
    Event,
    Finished,
    ModelInfo,
    Ready,
    StepOutput,
    TokenizerBundle,
    TokenLogprobs,
)
from worker.output_merging import merged
from worker.step import EngineInfo

VOCABULARY = 1000
NUM_TOP_OF_STEP = 3
READY = Ready(
    ModelInfo("m", "echo", "float32", "cpu", (2,), True),
    EngineInfo(num_pages=64, page_size=4, max_rows=8, max_context=64, vocab_size=VOCABULARY),
    TokenizerBundle({}, ""),
)

# (token id, log-probability, rank, likeliest ids, their log-probabilities)
Entry = tuple[int, float, int, tuple[int, ...], tuple[float, ...]]


@dataclass(frozen=True)
class Asked:
    """A request, by its link's index, and how many of the likeliest it wants."""

    link: int
    handle: int
    num_top: int


ASKED = [Asked(0, 1, 0), Asked(1, 1, 2), Asked(0, 2, NUM_TOP_OF_STEP), Asked(1, 5, 1)]


@dataclass
class Told:
    """What is said of one request: by the engine, or in a link's messages."""

    token_ids: list[int] = field(default_factory=list)
    sampled: list[Entry] = field(default_factory=list)
    prompt: list[Entry] = field(default_factory=list)
    num_endings: int = 0


class Steps:
    """Makes outputs in which no two numbers are alike, and remembers what each request is owed."""

    def __init__(self, links: Sequence[Link]) -> None:
        self.owed = {(asked.link, asked.handle): Told() for asked in ASKED}
        self._uids = {asked: uid_of(links[asked.link].link_id, asked.handle) for asked in ASKED}
        self._numbers = count(1)

    def step(self, sampling: Sequence[Asked], *, prompts: Sequence[Asked] = ()) -> StepOutput:
        """One token of each of `sampling`, in this order, and two prompt tokens of `prompts`."""
        parts = []
        if sampling:
            parts.append(self._entries(sampling, is_prompt=False))
        if prompts:
            twice = [asked for asked in prompts for _ in range(2)]
            parts.append(self._entries(twice, is_prompt=True))
        tokens = parts[0].token_ids if sampling else np.empty(0, np.int32)
        for asked, token_id in zip(sampling, tokens.tolist(), strict=True):
            self.owed[asked.link, asked.handle].token_ids.append(token_id)
        uids = np.array([self._uids[asked] for asked in sampling], np.int64)
        return StepOutput(uids, tokens, committed_at=1.0, logprobs=tuple(parts))

    def ends(self) -> StepOutput:
        for told in self.owed.values():
            told.num_endings += 1
        uids = self._uids.values()
        return StepOutput(
            finished=tuple(Finished(uid, FinishReason.LENGTH, -1, 0, 9, 0, 0, 0) for uid in uids)
        )

    def _entries(self, order: Sequence[Asked], *, is_prompt: bool) -> TokenLogprobs:
        size, width = len(order), NUM_TOP_OF_STEP
        ids = np.array([next(self._numbers) for _ in range(size * (2 + width))], np.int32)
        entries = TokenLogprobs(
            is_prompt=is_prompt,
            uids=np.array([self._uids[asked] for asked in order], np.int64),
            token_ids=ids[:size],
            logprobs=(-ids[:size] / 8).astype(np.float32),
            ranks=ids[size : 2 * size],
            num_top=np.array([asked.num_top for asked in order], np.int32),
            top_ids=ids[2 * size :].reshape(size, width),
            top_logprobs=(-ids[2 * size :].reshape(size, width) / 8).astype(np.float32),
        )
        for i, asked in enumerate(order):
            told, token_id = self.owed[asked.link, asked.handle], int(ids[i])
            top = tuple(entries.top_ids[i, : asked.num_top].tolist())
            (told.prompt if is_prompt else told.sampled).append(
                (token_id, -token_id / 8, int(ids[size + i]), top, tuple(-t / 8 for t in top))
            )
        return entries


class Gateway:
    """A link's other end, that reads nothing until it is let."""

    def __init__(self) -> None:
        self.may_read = asyncio.Event()
        self.is_asked = asyncio.Event()
        self.outputs: list[pb.StepOutput] = []

    async def write(self, message: pb.RunResponse) -> None:
        self.is_asked.set()
        await self.may_read.wait()
        if message.HasField("output"):
            self.outputs.append(message.output)

    def told(self) -> dict[int, Told]:
        by_handle: dict[int, Told] = {}
        for output in self.outputs:
            begun = {handle for handle, told in by_handle.items() if told.token_ids}
            for handle, token_id in zip(output.handles, output.token_ids, strict=True):
                by_handle.setdefault(handle, Told()).token_ids.append(token_id)
            for part in output.logprobs:
                assert not (part.prompt and part.handle in begun)
                told = by_handle.setdefault(part.handle, Told())
                (told.prompt if part.prompt else told.sampled).extend(entries_of(part))
            for ended in output.finished:
                by_handle[ended.handle].num_endings += 1
            for told in by_handle.values():
                # One to one in each message, not only in the end.
                assert [entry[0] for entry in told.sampled] == told.token_ids
        return by_handle


def entries_of(part: pb.TokenLogprobs) -> list[Entry]:
    num = part.num_top
    assert len(part.top_token_ids) == len(part.top_logprobs) == num * len(part.token_ids)
    entries: list[Entry] = []
    for i, (token_id, logprob, rank) in enumerate(
        zip(part.token_ids, part.logprobs, part.ranks, strict=True)
    ):
        top = slice(i * num, (i + 1) * num)
        top_ids, top_logprobs = tuple(part.top_token_ids[top]), tuple(part.top_logprobs[top])
        entries.append((token_id, logprob, rank, top_ids, top_logprobs))
    return entries


def outputs_of(steps: Steps) -> list[Event]:
    """Prompts in parts, others sampling meanwhile; then all sample, in changing orders."""
    one, two, three, four = ASKED
    orders = [[one, two, three, four], [four, two, one, three], [two, one], [three, four, one, two]]
    return [
        steps.step([], prompts=[one, two]),
        steps.step([one], prompts=[two, three]),
        steps.step([one, two], prompts=[three, four]),
        *(steps.step(order) for order in orders * 5),
        steps.ends(),
    ]


@pytest.mark.parametrize("where", ["in the engine", "in the front", "nowhere"])
@pytest.mark.parametrize("most_bytes", [LinkLimits().max_message_logprob_bytes, 100])
async def test_steps_that_wait_tell_each_token_s_logprobs_once_in_order_to_its_request(
    where: str, most_bytes: int
) -> None:
    limits = DispatcherLimits(8, 8, LinkLimits(max_message_logprob_bytes=most_bytes))
    dispatcher = Dispatcher(lambda _: None, limits, WorkerMetrics(CollectorRegistry()))
    dispatcher.on_event(READY)
    links, gateways = [dispatcher.open_link() for _ in range(2)], [Gateway(), Gateway()]
    for asked in ASKED:
        submit = pb.Submit(
            handle=asked.handle,
            request_id=f"{asked.link} {asked.handle}",
            prompt_token_ids=[5] * 5,
            max_tokens=32,
            sampling=neutral_sampling(),
        )
        dispatcher.obey(links[asked.link], pb.RunRequest(submit=submit))
    steps = Steps(links)
    events = outputs_of(steps)
    async with asyncio.TaskGroup() as tasks:
        for link, gateway in zip(links, gateways, strict=True):
            tasks.create_task(link.send_all(gateway.write))
            if where == "nowhere":
                gateway.may_read.set()
            await gateway.is_asked.wait()
        for event in merged(events) if where == "in the engine" else events:
            dispatcher.on_event(event)
            # Long enough for a gateway that reads.
            for _ in range(10):
                await asyncio.sleep(0)
        for link, gateway in zip(links, gateways, strict=True):
            gateway.may_read.set()
            link.half_close()
    for index, gateway in enumerate(gateways):
        assert gateway.told() == {h: told for (i, h), told in steps.owed.items() if i == index}
        if where == "nowhere":
            assert len(gateway.outputs) > 20
        elif most_bytes > 100:
            assert len(gateway.outputs) == 1
