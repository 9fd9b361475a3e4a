"""`tandem generate`: one prompt, its completion streamed to the terminal."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from gateway.cli.client import Client, Target
from gateway.cli.terminal import answer_json, stderr_console, write_text, write_usage
from shared.pb.tandem.v1 import inference_pb2 as pb


@dataclass(frozen=True, slots=True)
class GenerateOptions:
    """Options of a completion; None and empty leave the choice to the server."""

    is_chat: bool = True
    system: str = ""
    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: Sequence[str] = ()


def build_request(
    options: GenerateOptions, messages: Sequence[pb.ChatMessage]
) -> pb.GenerateRequest:
    """The request for a conversation, or for its last message as it stands when not a chat."""
    request = pb.GenerateRequest(
        max_tokens=options.max_tokens,
        sampling=pb.SamplingParams(
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            seed=options.seed,
        ),
        stopping=pb.StopConditions(stop_strings=options.stop),
    )
    if not options.is_chat:
        request.text = messages[-1].content
        return request
    if options.system:
        request.chat.messages.add(role="system", content=options.system)
    request.chat.messages.extend(messages)
    return request


async def generate(target: Target, request: pb.GenerateRequest) -> None:
    """Streams the completion to stdout and its usage to stderr. Raises CallError."""
    async with Client(target) as client:
        answer = await client.generate(request, write_text)
    if not answer.text.endswith("\n"):
        write_text("\n")
    write_usage(stderr_console(), answer.finished)


async def generate_json(target: Target, request: pb.GenerateRequest) -> None:
    """Writes the whole completion as one JSON object. Raises CallError."""
    async with Client(target) as client:
        answer = await client.generate(request, lambda text: None)
    print(json.dumps(answer_json(answer), ensure_ascii=False))
