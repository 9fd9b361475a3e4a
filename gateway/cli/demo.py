"""`tandem demo`: the whole system on this machine, once, in a minute."""

from collections.abc import Sequence

from rich.markup import escape

from gateway.cli.client import Client, Target
from gateway.cli.generate import GenerateOptions, build_request
from gateway.cli.pair import Pair, free_address
from gateway.cli.terminal import stderr_console, write_text, write_usage
from gateway.cli.up import UpOptions, run_pair
from shared.pb.tandem.v1 import inference_pb2 as pb

_START_TIMEOUT_S = 240.0
_ANSWER_TIMEOUT_S = 120.0


async def demo(
    question: str, worker_arguments: Sequence[str], *, token: str, shows_logs: bool
) -> int:
    """Starts both services on free ports, streams one chat answer, stops both.

    Returns the exit code, not 0 when anything failed or took longer than its time.
    """
    console = stderr_console()
    options = UpOptions(
        gateway_address=free_address(),
        worker_address=free_address(),
        worker_arguments=worker_arguments,
        start_timeout_s=_START_TIMEOUT_S,
        shows_logs=shows_logs,
    )

    async def ask(pair: Pair) -> None:
        message = pb.ChatMessage(role="user", content=question)
        greedy = GenerateOptions(max_tokens=128, sampling=pb.SamplingParams(temperature=0))
        request = build_request(greedy, [message])
        console.print(f"\n[bold]{escape(question)}[/]")
        target = Target(pair.gateway.address, token, _ANSWER_TIMEOUT_S)
        async with Client(target) as client:
            answer = await client.generate(request, write_text)
        write_text("\n")
        write_usage(console, answer.finished)

    return await run_pair(options, console, ask)
