"""The options that several commands share, declared once."""

from pathlib import Path
from typing import Annotated

import typer

from shared.pb.tandem.v1 import inference_pb2 as pb

_UINT32_MAX = 2**32 - 1
_UINT64_MAX = 2**64 - 1
_INT32_MAX = 2**31 - 1

WorkerArguments = Annotated[
    list[str] | None,
    typer.Argument(metavar="[-- WORKER FLAGS]", help="As `tandem worker --help` lists them."),
]
GatewayProcesses = Annotated[
    int,
    typer.Option(
        "--gateway-processes",
        help="Processes that share the gateway's port.",
        envvar="TANDEM_GATEWAY_PROCESSES",
        min=1,
    ),
]
Model = Annotated[
    str, typer.Option(help="A folder, a GGUF file or a hub id. Not set: the built-in one.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Write one JSON object instead.")]

System = Annotated[str, typer.Option(help="The system message of a chat.")]
TemplateKwargs = Annotated[
    str,
    typer.Option(metavar="JSON", help="More for the chat template, such as a model's switches."),
]
MaxTokens = Annotated[
    int | None, typer.Option(help="Most tokens to sample.", min=0, max=_UINT32_MAX)
]
MinTokens = Annotated[
    int, typer.Option(help="No stop before this many tokens.", min=0, max=_UINT32_MAX)
]
Temperature = Annotated[float | None, typer.Option(help="0 is greedy.")]
TopK = Annotated[
    int | None,
    typer.Option(help="Keep the k likeliest tokens; 0 keeps all.", min=-1, max=_INT32_MAX),
]
TopP = Annotated[float | None, typer.Option(help="Keep the likeliest tokens that reach p.")]
MinP = Annotated[
    float | None, typer.Option(help="Keep tokens at least this fraction of the likeliest.")
]
RepetitionPenalty = Annotated[
    float | None, typer.Option(help="Above 1: less of what was said; 1 changes nothing.")
]
FrequencyPenalty = Annotated[
    float | None, typer.Option(help="Off a token's logit each time it came; -2 to 2.")
]
PresencePenalty = Annotated[
    float | None, typer.Option(help="Off a token's logit once it came; -2 to 2.")
]
Seed = Annotated[
    int | None, typer.Option(help="Same seed, same completion.", min=0, max=_UINT64_MAX)
]
Stop = Annotated[list[str] | None, typer.Option(help="End before this text; may be repeated.")]
NumCompletions = Annotated[
    int | None, typer.Option("--n", "-n", help="Completions, 1 to 8.", min=0, max=_UINT32_MAX)
]
NumLogprobs = Annotated[
    int | None,
    typer.Option(
        "--logprobs", help="Show each token and so many likeliest.", min=0, max=_UINT32_MAX
    ),
]

JsonSchema = Annotated[
    str, typer.Option(metavar="JSON|@FILE", help="The output obeys this JSON schema.")
]
JsonObject = Annotated[bool, typer.Option("--json-object", help="The output is a JSON object.")]
Regex = Annotated[str, typer.Option(metavar="REGEX|@FILE", help="All of the output matches this.")]
Grammar = Annotated[
    str, typer.Option(metavar="EBNF|@FILE", help="The output is of this grammar, from `root`.")
]
Choice = Annotated[
    list[str] | None, typer.Option(help="The output is this, or another; may be repeated.")
]


def worker_flags(model: str, more: list[str] | None) -> list[str]:
    """What these two options together say to a worker."""
    return [*(["--model", model] if model else []), *(more or [])]


def structured_output(
    json_schema: str, json_object: bool, regex: str, grammar: str, choices: list[str] | None
) -> pb.StructuredOutput | None:
    """What at most one of these options asks for. Raises typer.BadParameter."""
    given = {
        "--json-schema": pb.StructuredOutput(json_schema=_text(json_schema)),
        "--json-object": pb.StructuredOutput(json_object=json_object),
        "--regex": pb.StructuredOutput(regex=_text(regex)),
        "--grammar": pb.StructuredOutput(grammar=_text(grammar)),
        "--choice": pb.StructuredOutput(choice=pb.ChoiceList(choices=choices or ())),
    }
    is_set = [bool(json_schema), json_object, bool(regex), bool(grammar), bool(choices)]
    wanted = [name for name, is_one in zip(given, is_set, strict=True) if is_one]
    if len(wanted) > 1:
        raise typer.BadParameter(f"{wanted[0]} and {wanted[1]} exclude each other")
    return given[wanted[0]] if wanted else None


def _text(argument: str) -> str:
    """The argument, or what is in the file that it names behind an @."""
    if not argument.startswith("@"):
        return argument
    try:
        return Path(argument[1:]).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"cannot read {argument[1:]}: {error}") from None
