"""`tandem chat`: a conversation at the terminal, or one read from a pipe."""

import asyncio
import sys
from contextlib import suppress
from dataclasses import replace

from rich.console import Console

from gateway.cli.client import CallError, Client, Target
from gateway.cli.generate import GenerateOptions, build_request
from gateway.cli.terminal import stderr_console, write_error, write_text, write_usage
from shared.pb.tandem.v1 import inference_pb2 as pb

# Line editing and history at the prompt, where the platform has it.
with suppress(ImportError):
    import readline  # noqa: F401

_HELP = """\
/reset          forget the conversation
/system TEXT    set the system message (without TEXT: show it)
/help           this list
/quit           leave; so does Ctrl-D
Ctrl-C          stop the answer; at the prompt: leave"""


def chat(target: Target, options: GenerateOptions) -> None:
    """Reads lines and streams answers until /quit or the end of input."""
    conversation = Conversation(options, stderr_console())
    # One loop for the whole conversation, running only while an answer comes: at the
    # prompt the terminal keeps its own way with lines and with Ctrl-C.
    with asyncio.Runner() as runner:
        client = runner.run(_open(target))
        try:
            while (line := _read_line()) is not None:
                if line.startswith("/"):
                    if not conversation.command(line):
                        break
                elif line.strip():
                    conversation.ask(runner, client, line)
        finally:
            runner.run(client.close())


class Conversation:
    """The messages so far, and what the user's lines do to them."""

    def __init__(self, options: GenerateOptions, console: Console) -> None:
        self._options = options
        self._console = console
        self._messages: list[pb.ChatMessage] = []

    def command(self, line: str) -> bool:
        """Carries out a line that begins with a slash; False: leave."""
        name, _, argument = line.strip().partition(" ")
        match name:
            case "/quit" | "/exit":
                return False
            case "/reset":
                self._messages.clear()
                self._console.print("[dim]forgotten[/]")
            case "/system":
                self._system(argument.strip())
            case "/help":
                self._console.print(_HELP, markup=False)
            case _:
                write_error(self._console, f"unknown command {name}; /help lists them")
        return True

    def ask(self, runner: asyncio.Runner, client: Client, line: str) -> None:
        """Streams the answer to a line. What Ctrl-C cuts off stays in the conversation."""
        question = pb.ChatMessage(role="user", content=line)
        request = build_request(self._options, [*self._messages, question])
        pieces: list[str] = []

        def on_text(text: str) -> None:
            pieces.append(text)
            write_text(text)

        finished = None
        try:
            finished = runner.run(client.generate(request, on_text)).finished
        except CallError as error:
            # The question is forgotten too, so that it can be asked again.
            self._end_line(pieces)
            write_error(self._console, str(error))
            return
        except KeyboardInterrupt:
            pass
        self._end_line(pieces)
        self._messages += [question, pb.ChatMessage(role="assistant", content="".join(pieces))]
        if finished is None:
            self._console.print("[dim]stopped[/]")
        else:
            write_usage(self._console, finished)

    def _system(self, text: str) -> None:
        if text:
            self._options = replace(self._options, system=text)
        shown = self._options.system or "no system message"
        self._console.print(shown, markup=False, style="dim")

    def _end_line(self, pieces: list[str]) -> None:
        if pieces and not pieces[-1].endswith("\n"):
            write_text("\n")


async def _open(target: Target) -> Client:
    """A channel belongs to the loop that is running when it is made."""
    return Client(target)


def _read_line() -> str | None:
    """The user's next line; None at the end of input or at Ctrl-C."""
    try:
        return input("› " if sys.stdin.isatty() else "")
    except (EOFError, KeyboardInterrupt):
        if sys.stdin.isatty():
            write_text("\n")
        return None
