"""`tandem generate`: what it sends, what it writes, how it ends."""

import json

import pytest

from shared.errors import InvalidArgumentError, QueueFullError
from tests.cli.fake_gateway import FakeGateway
from tests.cli.terminal import Terminal, tandem


async def test_text_goes_to_stdout_and_usage_to_stderr(fake_gateway: FakeGateway) -> None:
    run = await tandem("generate", "capital?", "--address", fake_gateway.address)
    assert (run.code, run.out) == (0, "Paris.\n")
    assert "4 tokens, stop at token 2" in run.err
    assert "first token 12 ms" in run.err
    assert "30.0 tokens/s" in run.err


async def test_text_appears_before_the_completion_ends(fake_gateway: FakeGateway) -> None:
    fake_gateway.go_on.clear()
    terminal = await Terminal.start("generate", "capital?", "--address", fake_gateway.address)
    assert await terminal.read("Par") == "Par"
    fake_gateway.go_on.set()
    assert (await terminal.end()).out == "is.\n"


async def test_options_that_are_not_given_are_not_sent(fake_gateway: FakeGateway) -> None:
    await tandem("generate", "capital?", "--address", fake_gateway.address)
    (request,) = fake_gateway.requests
    assert [(m.role, m.content) for m in request.chat.messages] == [("user", "capital?")]
    assert not request.HasField("max_tokens")
    assert not request.sampling.ListFields()
    assert not request.stopping.ListFields()


async def test_every_option_reaches_the_request(fake_gateway: FakeGateway) -> None:
    options = "--max-tokens 0 --temperature 0 --top-k 5 --top-p 0.5 --seed 0 --stop a --stop b"
    await tandem(
        *("generate", "capital?", "--address", fake_gateway.address),
        *("--system", "Be brief.", *options.split()),
    )
    (request,) = fake_gateway.requests
    assert [m.role for m in request.chat.messages] == ["system", "user"]
    assert request.HasField("max_tokens") and request.max_tokens == 0
    sampling = request.sampling
    assert sampling.HasField("temperature") and sampling.temperature == 0
    assert sampling.HasField("seed") and sampling.seed == 0
    assert (sampling.top_k, sampling.top_p) == (5, 0.5)
    assert list(request.stopping.stop_strings) == ["a", "b"]


async def test_a_raw_prompt_from_stdin_is_sent_as_it_stands(fake_gateway: FakeGateway) -> None:
    arguments = ("generate", "--raw", "-", "--address", fake_gateway.address)
    await tandem(*arguments, stdin=" Once\xff upon\n".encode("latin-1"))
    (request,) = fake_gateway.requests
    assert request.WhichOneof("prompt") == "text"
    assert request.text == " Once\ufffd upon\n"


async def test_json_is_one_object_with_numbers_as_numbers(fake_gateway: FakeGateway) -> None:
    run = await tandem("generate", "capital?", "--json", "--address", fake_gateway.address)
    answer = json.loads(run.out)
    assert answer["text"] == "Paris."
    assert answer["request_id"] == "r1"
    assert answer["finish_reason"] == "stop"
    assert answer["seed"] == 2**63
    assert answer["usage"] == {"prompt_tokens": 5, "cached_tokens": 0, "completion_tokens": 4}


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (InvalidArgumentError("max_tokens", "at least 1"), "INVALID_ARGUMENT: max_tokens"),
        (QueueFullError("the queue is full", retry_after_ms=1500), "try again in 1.5 s"),
    ],
)
async def test_a_refusal_is_one_line_and_exit_code_1(
    fake_gateway: FakeGateway, error: Exception, says: str
) -> None:
    fake_gateway.pieces, fake_gateway.error = (), error  # type: ignore[assignment]
    run = await tandem("generate", "capital?", "--address", fake_gateway.address)
    assert (run.code, run.out) == (1, "")
    assert run.err.startswith("error: ") and run.err.count("\n") == 1
    assert says in run.err


async def test_no_gateway_says_how_to_start_one() -> None:
    run = await tandem("generate", "capital?", "--address", "127.0.0.1:1")
    assert run.code == 1
    assert "UNAVAILABLE" in run.err
    assert "tandem up" in run.err


async def test_a_timeout_ends_the_call(fake_gateway: FakeGateway) -> None:
    fake_gateway.go_on.clear()
    run = await tandem("generate", "x", "--timeout", "0.3", "--address", fake_gateway.address)
    assert run.code == 1
    assert "DEADLINE_EXCEEDED" in run.err


async def test_ctrl_c_cancels_the_call_and_exits_with_130(fake_gateway: FakeGateway) -> None:
    fake_gateway.go_on.clear()
    terminal = await Terminal.start("generate", "capital?", "--address", fake_gateway.address)
    await terminal.read("Par")
    terminal.interrupt()
    run = await terminal.end()
    assert run.code == 130
    assert "Traceback" not in run.err
    await fake_gateway.cancelled.wait()
