"""What may pass is tried again, until there was text, and never for longer than was asked."""

import asyncio
import threading
import time

import pytest

from shared import errors
from shared.errors import EngineError, InvalidArgumentError, QueueFullError, ServingError
from tandem_client import (
    NO_RETRIES,
    AlreadyExistsError,
    Delta,
    ResourceExhaustedError,
    RetryPolicy,
    Started,
    TandemError,
    UnavailableError,
)
from tandem_client.retries import Attempts
from tests.client.callers import Caller, collect
from tests.client.conftest import MakeCaller
from tests.client.scripted_server import WHOLE, ScriptedServer, delta, started

QUICK = RetryPolicy(first_wait_s=0.001, max_wait_s=0.01)
LOST = errors.UnavailableError("no worker is ready")
FULL = QueueFullError("the queue is full", retry_after_ms=5)
TOO_LARGE = QueueFullError("the message is too large")


@pytest.mark.parametrize("refusal", [LOST, FULL], ids=["unavailable", "queue full"])
async def test_a_refusal_that_may_pass_is_not_seen(
    server: ScriptedServer, make_caller: MakeCaller, refusal: ServingError
) -> None:
    server.scripts = [(refusal,), (refusal,), WHOLE]
    async with make_caller(server.address, retries=QUICK) as caller:
        completion = await caller.call("generate", "Hi", max_tokens=2)
    assert completion.text == "Hello"
    # The same request three times, and under one id.
    assert [request.max_tokens for request in server.requests] == [2, 2, 2]
    assert len({request.request_id for request in server.requests}) == 1


@pytest.mark.parametrize(
    "refusal",
    [
        TOO_LARGE,
        InvalidArgumentError("n", "no"),
        EngineError("fault"),
        errors.AlreadyExistsError(""),
    ],
)
async def test_any_other_refusal_is_final(
    server: ScriptedServer, make_caller: MakeCaller, refusal: ServingError
) -> None:
    server.scripts = [(refusal,), WHOLE]
    async with make_caller(server.address, retries=QUICK) as caller:
        with pytest.raises(TandemError) as raised:
            await caller.call("generate", "Hi")
    assert raised.value.code.value[0] == refusal.code
    assert len(server.requests) == 1


async def test_the_last_refusal_is_raised_when_there_were_enough(
    server: ScriptedServer, make_caller: MakeCaller
) -> None:
    server.scripts = [(LOST,)]
    async with make_caller(server.address, retries=QUICK) as caller:
        with pytest.raises(UnavailableError, match="no worker is ready"):
            await collect(caller.stream("Hi"))
    assert len(server.requests) == 1 + QUICK.max_retries


@pytest.mark.parametrize("method", ["generate", "model"])
async def test_closing_the_client_ends_a_call_that_waits_to_be_tried_again(
    server: ScriptedServer, make_caller: MakeCaller, method: str
) -> None:
    soon = QueueFullError("the queue is full", retry_after_ms=300)
    server.scripts, server.model_errors = [(soon,)], [soon]
    prompt = ["Hi"] if method == "generate" else []
    async with make_caller(server.address, retries=RetryPolicy()) as caller:
        async with asyncio.TaskGroup() as tasks:
            call = tasks.create_task(outcome(caller, method, *prompt))
            await server.called.until(lambda: len(server.requests) + server.num_model_calls > 0)
            # Whose answer comes after the refusal.
            assert (await outcome(caller, "health")).startswith("UNIMPLEMENTED")
            await caller.close()
    assert call.result().startswith("CANCELLED")


async def outcome(caller: Caller, method: str, *args: str) -> str:
    try:
        return str(await caller.call(method, *args))
    except TandemError as error:
        return str(error)


async def test_nothing_is_tried_again_when_that_is_asked_for(
    server: ScriptedServer, make_caller: MakeCaller
) -> None:
    server.scripts = [(LOST,), WHOLE]
    async with make_caller(server.address, retries=NO_RETRIES) as caller:
        with pytest.raises(UnavailableError):
            await caller.call("generate", "Hi")
    assert len(server.requests) == 1


async def test_a_request_that_had_only_started_is_sent_again_and_starts_once(
    server: ScriptedServer, make_caller: MakeCaller
) -> None:
    server.scripts = [(started(), LOST), WHOLE]
    async with make_caller(server.address, retries=QUICK) as caller:
        events = await collect(caller.stream("Hi"))
    assert sum(isinstance(event, Started) for event in events) == 1
    assert "".join(event.text for event in events if isinstance(event, Delta)) == "Hello"


async def test_after_text_a_failure_is_final(
    server: ScriptedServer, make_caller: MakeCaller
) -> None:
    server.scripts = [(started(), delta("Hel"), LOST), WHOLE]
    seen = []
    async with make_caller(server.address, retries=QUICK) as caller:
        stream = caller.stream("Hi")
        with pytest.raises(UnavailableError):
            async for event in stream:
                seen.append(event)
        # The stream is over, and says so for ever.
        assert await collect(stream) == []
    assert isinstance(seen[-1], Delta)
    assert len(server.requests) == 1


async def test_text_of_one_completion_makes_a_failure_final_for_all(
    server: ScriptedServer, make_caller: MakeCaller
) -> None:
    server.scripts = [(started(0), delta("Hel", 0), started(1), LOST), WHOLE]
    async with make_caller(server.address, retries=QUICK) as caller:
        with pytest.raises(UnavailableError):
            await caller.call("generate_many", "Hi", 2)
    assert len(server.requests) == 1


async def test_an_id_still_taken_by_the_attempt_before_is_tried_again(
    server: ScriptedServer, make_caller: MakeCaller
) -> None:
    server.scripts = [(LOST,), (errors.AlreadyExistsError("x is live"),), WHOLE]
    async with make_caller(server.address, retries=QUICK) as caller:
        completion = await caller.call("generate", "Hi", request_id="x")
    assert completion.text == "Hello"
    assert [request.request_id for request in server.requests] == ["x", "x", "x"]


async def test_an_id_that_somebody_else_has_is_an_error(
    server: ScriptedServer, make_caller: MakeCaller
) -> None:
    server.scripts = [(errors.AlreadyExistsError("x is live"),)]
    async with make_caller(server.address, retries=QUICK) as caller:
        with pytest.raises(AlreadyExistsError):
            await caller.call("generate", "Hi", request_id="x")


async def test_the_timeout_bounds_all_attempts_together(
    server: ScriptedServer, make_caller: MakeCaller
) -> None:
    server.scripts = [(LOST,)]
    patient = RetryPolicy(max_retries=1000, first_wait_s=0.02, max_wait_s=0.02)
    begin = time.monotonic()
    async with make_caller(server.address, retries=patient) as caller:
        # The refusal says more than that time ran out.
        with pytest.raises(UnavailableError, match="no worker is ready"):
            await caller.call("generate", "Hi", timeout_s=0.3)
    assert time.monotonic() - begin < 2
    assert 1 < len(server.requests) < 100


async def test_a_server_that_asks_for_long_patience_is_not_waited_for(
    server: ScriptedServer, make_caller: MakeCaller
) -> None:
    server.scripts = [(QueueFullError("the queue is full", retry_after_ms=60_000),), WHOLE]
    async with make_caller(server.address, retries=QUICK) as caller:
        with pytest.raises(ResourceExhaustedError) as raised:
            await caller.call("generate", "Hi")
    assert raised.value.retry_after_s == 60
    assert len(server.requests) == 1


async def test_calls_with_one_answer_are_tried_again_too(
    server: ScriptedServer, make_caller: MakeCaller
) -> None:
    server.model_errors = [LOST, FULL]
    async with make_caller(server.address, retries=QUICK) as caller:
        model = await caller.call("model")
    assert (model.model, model.vocab_size, model.eos_token_ids) == ("scripted", 7, (1, 2))
    assert model.bos_token_id is None
    assert server.num_model_calls == 3


async def test_closing_a_stream_ends_its_wait_for_the_next_attempt(
    server: ScriptedServer, make_caller: MakeCaller
) -> None:
    server.scripts = [(LOST,)]
    patient = RetryPolicy(first_wait_s=30, max_wait_s=30)
    async with make_caller(server.address, retries=patient) as caller:
        stream = caller.stream("Hi")
        async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
            reader = tasks.create_task(collect(stream))
            await server.called.until(lambda: bool(server.requests))
            stream.close()
            assert await reader == []


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_waits_double_up_to_their_limit() -> None:
    attempts = Attempts(RetryPolicy(5, first_wait_s=1, max_wait_s=3), None)
    waits = [attempts.wait_s(UnavailableError("")) for _ in range(6)]
    for wait_s, limit_s in zip(waits, [1, 2, 3, 3, 3], strict=False):
        assert wait_s is not None
        assert limit_s / 2 <= wait_s <= limit_s
    assert waits[5] is None


def test_the_server_is_never_asked_sooner_than_it_said() -> None:
    attempts = Attempts(RetryPolicy(100, first_wait_s=0, max_wait_s=4), None)
    full = ResourceExhaustedError("", retry_after_s=2)
    for _ in range(100):
        wait_s = attempts.wait_s(full)
        assert wait_s is not None
        assert 2 <= wait_s <= 2.5


def test_no_attempt_begins_after_the_deadline() -> None:
    clock = Clock()
    attempts = Attempts(RetryPolicy(9, first_wait_s=1, max_wait_s=1), 10, now=clock)
    assert attempts.remaining_s() == 10
    clock.now += 9.6
    assert attempts.remaining_s() == pytest.approx(0.4)
    assert attempts.wait_s(UnavailableError("")) is None
    clock.now += 1
    assert attempts.remaining_s() == 0


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan")])
def test_a_timeout_is_above_zero(timeout_s: float) -> None:
    with pytest.raises(ValueError, match="timeout_s"):
        Attempts(RetryPolicy(), timeout_s)


@pytest.mark.parametrize("timeout_s", [float("inf"), threading.TIMEOUT_MAX, 1e300])
def test_an_endless_timeout_is_none(timeout_s: float) -> None:
    assert Attempts(RetryPolicy(), timeout_s).remaining_s() is None


@pytest.mark.parametrize("fields", [{"max_retries": -1}, {"first_wait_s": -1}, {"first_wait_s": 9}])
def test_a_policy_makes_sense(fields: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="max_retries"):
        RetryPolicy(**fields)  # type: ignore[arg-type]


async def test_a_gateway_that_comes_up_late_is_found(make_caller: MakeCaller) -> None:
    async with ScriptedServer() as before:
        address = before.address
    patient = RetryPolicy(max_retries=1000, first_wait_s=0.02, max_wait_s=0.05)
    async with make_caller(address, retries=patient) as caller, asyncio.TaskGroup() as tasks:
        answer = tasks.create_task(caller.call("generate", "Hi", timeout_s=30))
        async with ScriptedServer(address):
            assert (await answer).text == "Hello"
