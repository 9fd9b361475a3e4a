"""`tandem generate`: what it sends, what it writes, how it ends."""

import json
from pathlib import Path

import pytest

from shared.errors import InvalidArgumentError, QueueFullError
from shared.pb.tandem.v1 import inference_pb2 as pb
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
    options = (
        "--max-tokens 0 --temperature 0 --top-k 5 --top-p 0.5 --seed 0 --stop a --stop b "
        "--min-tokens 3 --min-p 0.25 --repetition-penalty 1.5 --frequency-penalty -1 "
        "--presence-penalty 0.5 --logprobs 0 -n 1 --json-object"
    )
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
    assert (sampling.min_p, sampling.repetition_penalty) == (0.25, 1.5)
    assert (sampling.frequency_penalty, sampling.presence_penalty) == (-1, 0.5)
    assert list(request.stopping.stop_strings) == ["a", "b"]
    assert request.stopping.min_tokens == 3
    assert request.output.HasField("logprobs") and request.output.logprobs == 0
    assert request.HasField("n") and request.n == 1
    assert request.structured_output.json_object


@pytest.mark.parametrize(
    ("option", "value", "sent"),
    [
        (
            "--json-schema",
            '{"type": "object"}',
            pb.StructuredOutput(json_schema='{"type": "object"}'),
        ),
        ("--regex", "[ab]+", pb.StructuredOutput(regex="[ab]+")),
        ("--grammar", 'root ::= "a"', pb.StructuredOutput(grammar='root ::= "a"')),
        ("--choice", "yes", pb.StructuredOutput(choice=pb.ChoiceList(choices=["yes"]))),
    ],
)
async def test_a_structure_reaches_the_request(
    fake_gateway: FakeGateway, option: str, value: str, sent: pb.StructuredOutput
) -> None:
    run = await tandem("generate", "x", option, value, "--address", fake_gateway.address)
    assert run.code == 0
    (request,) = fake_gateway.requests
    assert request.structured_output == sent


async def test_a_structure_is_read_from_a_file(fake_gateway: FakeGateway, tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text('{"type": "array"}')
    arguments = ("generate", "x", "--address", fake_gateway.address)
    run = await tandem(*arguments, "--json-schema", f"@{tmp_path / 'schema.json'}")
    assert run.code == 0
    assert fake_gateway.requests[0].structured_output.json_schema == '{"type": "array"}'
    missing = await tandem(*arguments, "--json-schema", f"@{tmp_path / 'none'}")
    assert missing.code == 2
    assert "cannot read" in missing.err
    both = await tandem(*arguments, "--regex", "a", "--json-object")
    assert both.code == 2
    assert "exclude each other" in both.err


async def test_more_for_the_template_reaches_the_request(fake_gateway: FakeGateway) -> None:
    kwargs = '{"enable_thinking": false}'
    arguments = ("--address", fake_gateway.address, "--template-kwargs", kwargs)
    await tandem("generate", "x", *arguments)
    await tandem("chat", *arguments, "--min-p", "0.5", stdin=b"one\n")
    assert [r.chat.template_kwargs_json for r in fake_gateway.requests] == [kwargs, kwargs]
    assert fake_gateway.requests[1].sampling.min_p == 0.5


async def test_several_completions_come_one_below_the_other(fake_gateway: FakeGateway) -> None:
    run = await tandem("generate", "x", "-n", "3", "--address", fake_gateway.address)
    assert run.out == "0Par0is0.\n1Par1is1.\n2Par2is2.\n"
    assert "1 of 3" in run.err and "3 of 3" in run.err
    assert run.err.count("4 tokens, stop at token 2") == 3
    as_json = await tandem("generate", "x", "-n", "2", "--json", "--address", fake_gateway.address)
    whole = json.loads(as_json.out)
    assert whole["request_id"] == "r1"
    assert [(c["index"], c["text"]) for c in whole["completions"]] == [
        (0, "0Par0is0."),
        (1, "1Par1is1."),
    ]


async def test_logprobs_are_a_table_beside_the_text(fake_gateway: FakeGateway) -> None:
    run = await tandem("generate", "x", "--logprobs", "2", "--address", fake_gateway.address)
    assert run.out == "Paris.\n"
    lines = [line.split() for line in run.err.splitlines()]
    assert ["token", "logprob", "p", "rank", "likeliest"] in lines
    # What a token holds cannot move the cursor, nor be taken for markup.
    other = r"'[\x1b'"
    assert ["'is'", "-0.500", "60.7%", "2", other, "100.0%", other, "100.0%"] in lines
    chosen_only = await tandem(
        "generate", "x", "--logprobs", "0", "--address", fake_gateway.address
    )
    assert "likeliest" not in chosen_only.err
    as_json = await tandem(
        *("generate", "x", "--logprobs", "1", "--json", "--address", fake_gateway.address)
    )
    places = json.loads(as_json.out)["logprobs"]
    assert [place["chosen"]["text"] for place in places] == ["Par", "is", "."]
    assert places[0]["top"][0]["rank"] == 1


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
