"""What the command line writes: a model's text to stdout, everything else to stderr."""

import math
import sys

from google.protobuf.json_format import MessageToDict
from rich.console import Console
from rich.table import Table

from gateway.cli.client import Answer
from shared.pb.tandem.v1 import inference_pb2 as pb

# What a model says must not move the cursor or retitle the window.
_CONTROL = {code: None for code in [*range(32), *range(127, 160)] if chr(code) not in "\n\t"}

_MILLISECONDS = 1000.0


def stderr_console() -> Console:
    """For usage lines, progress and errors; plain where stderr is no terminal."""
    return _Console(stderr=True, highlight=False, soft_wrap=True)


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Nobody reads any more: says nothing from now on. Rich would raise SystemExit, in
        whichever task or callback happens to print."""
        self.quiet = True


def write_text(text: str) -> None:
    """Writes a piece of a completion at once; on a terminal without control characters."""
    sys.stdout.write(text.translate(_CONTROL) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def write_error(console: Console, message: str) -> None:
    """One line that says what failed."""
    console.print(f"[bold red]error:[/] {_plain(message)}")


def usage_line(finished: pb.Finished) -> str:
    """How a completion ended, what it took and how fast it came, in one line."""
    usage, timings = finished.usage, finished.timings
    parts = [
        f"{usage.completion_tokens} tokens, {_ending(finished)}",
        f"prompt {usage.prompt_tokens} ({usage.cached_tokens} cached)",
        f"first token {timings.time_to_first_token_ms:.0f} ms",
    ]
    if usage.completion_tokens > 1 and timings.decode_ms > 0:
        rate = (usage.completion_tokens - 1) * _MILLISECONDS / timings.decode_ms
        parts.append(f"{rate:.1f} tokens/s")
    return " · ".join(parts)


def write_usage(console: Console, finished: pb.Finished) -> None:
    """The usage line, dimmed."""
    console.print(f"[dim]{_plain(usage_line(finished))}[/]")


def write_title(console: Console, title: str) -> None:
    """Above one of several completions."""
    console.print(f"[bold]── {_plain(title)} ──[/]")


def write_logprobs(console: Console, answer: Answer) -> None:
    """A line for each token: itself, how likely it was, and the likeliest at its place.

    Nothing where no log-probabilities were asked for.
    """
    if not answer.logprobs:
        return
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("token")
    for name in ("logprob", "p", "rank"):
        table.add_column(name, justify="right")
    if any(place.top for place in answer.logprobs):
        table.add_column("likeliest", overflow="fold")
    for place in answer.logprobs:
        chosen = place.chosen
        likeliest = "  ".join(f"{_shown(top)} {_percent(top)}" for top in place.top)
        table.add_row(
            _plain(_shown(chosen)),
            f"{chosen.logprob:.3f}",
            _percent(chosen),
            str(chosen.rank),
            *([_plain(likeliest)] if place.top else []),
        )
    console.print(table)


def answer_json(answer: Answer) -> dict[str, object]:
    """The only completion of a request as JSON."""
    whole = completion_json(answer)
    # Not one of several, so it needs no number.
    del whole["index"]
    return {"request_id": answer.request_id, **whole}


def completion_json(answer: Answer) -> dict[str, object]:
    """A completion as JSON: names as in the protos, every number a number."""
    finished = MessageToDict(
        answer.finished,
        preserving_proto_field_name=True,
        always_print_fields_with_no_presence=True,
    )
    # proto3 JSON writes 64-bit integers as strings.
    finished["seed"] = answer.finished.seed
    finished["finish_reason"] = _reason(answer.finished)
    # They are among the others.
    del finished["trailing_logprobs"]
    whole: dict[str, object] = {"text": answer.text, **finished}
    if answer.logprobs:
        whole["logprobs"] = [
            MessageToDict(
                place,
                preserving_proto_field_name=True,
                always_print_fields_with_no_presence=True,
            )
            for place in answer.logprobs
        ]
    return whole


def _shown(token: pb.TokenLogprob) -> str:
    """So that spaces, line ends and control characters can be told from each other."""
    return repr(token.text)


def _percent(token: pb.TokenLogprob) -> str:
    return f"{100 * math.exp(token.logprob):.1f}%"


def _ending(finished: pb.Finished) -> str:
    matched = finished.WhichOneof("matched")
    if matched == "stop_string":
        return f"stop {finished.stop_string!r}"
    if matched is not None:
        return f"{_reason(finished)} at token {getattr(finished, matched)}"
    return _reason(finished)


def _reason(finished: pb.Finished) -> str:
    name = pb.FinishReason.Name(finished.finish_reason)
    return name.removeprefix("FINISH_REASON_").lower()


def _plain(message: str) -> str:
    """Text that rich must not read as markup."""
    return message.replace("[", r"\[")
