"""`tandem generate`: one prompt, its completions streamed to the terminal."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from gateway.cli.client import Answer, Client, Target
from gateway.cli.terminal import (
    answer_json,
    completion_json,
    stderr_console,
    write_logprobs,
    write_text,
    write_title,
    write_usage,
)
from shared.pb.tandem.v1 import inference_pb2 as pb


@dataclass(frozen=True, slots=True)
class GenerateOptions:
    """Options of a completion; None and empty leave the choice to the server."""

    is_chat: bool = True
    system: str = ""
    template_kwargs_json: str = ""
    max_tokens: int | None = None
    num_completions: int | None = None
    sampling: pb.SamplingParams = field(default_factory=pb.SamplingParams)
    stopping: pb.StopConditions = field(default_factory=pb.StopConditions)
    output: pb.OutputOptions = field(default_factory=pb.OutputOptions)
    structured_output: pb.StructuredOutput | None = None


def build_request(
    options: GenerateOptions, messages: Sequence[pb.ChatMessage]
) -> pb.GenerateRequest:
    """The request for a conversation, or for its last message as it stands when not a chat."""
    request = pb.GenerateRequest(
        max_tokens=options.max_tokens,
        n=options.num_completions,
        sampling=options.sampling,
        stopping=options.stopping,
        output=options.output,
        structured_output=options.structured_output,
    )
    if not options.is_chat:
        request.text = messages[-1].content
        return request
    if options.system:
        request.chat.messages.add(role="system", content=options.system)
    request.chat.messages.extend(messages)
    request.chat.template_kwargs_json = options.template_kwargs_json
    return request


async def generate(target: Target, request: pb.GenerateRequest) -> None:
    """Streams the completions to stdout, what is to be said of them to stderr.

    Raises CallError.
    """
    terminal = _InOrder(max(request.n, 1))
    async with Client(target) as client:
        await client.generate_all(request, terminal.write, terminal.end)


async def generate_json(target: Target, request: pb.GenerateRequest) -> None:
    """Writes all of it as one JSON object. Raises CallError."""
    async with Client(target) as client:
        answers = await client.generate_all(request)
    whole = (
        answer_json(answers[0])
        if request.n <= 1
        else {
            "request_id": answers[0].request_id,
            "completions": [completion_json(answer) for answer in answers],
        }
    )
    print(json.dumps(whole, ensure_ascii=False))


class _InOrder:
    """Several completions one below the other, each as it comes once those above have ended."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._console = stderr_console()
        self._now = 0
        self._waiting: dict[int, list[str]] = {}
        self._ended: dict[int, Answer] = {}
        self._begin()

    def write(self, index: int, text: str) -> None:
        if index == self._now:
            write_text(text)
        else:
            self._waiting.setdefault(index, []).append(text)

    def end(self, answer: Answer) -> None:
        self._ended[answer.index] = answer
        while (ended := self._ended.get(self._now)) is not None:
            if not ended.text.endswith("\n"):
                write_text("\n")
            write_logprobs(self._console, ended)
            write_usage(self._console, ended.finished)
            self._now += 1
            self._begin()

    def _begin(self) -> None:
        if self._now == self._count:
            return
        if self._count > 1:
            write_title(self._console, f"{self._now + 1} of {self._count}")
        if texts := self._waiting.pop(self._now, None):
            write_text("".join(texts))
