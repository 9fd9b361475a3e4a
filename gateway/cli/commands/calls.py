"""The commands that call a gateway that runs."""

import os
import sys
from typing import Annotated

import typer

from gateway.cli import health as health_command
from gateway.cli.chat import chat as run_chat
from gateway.cli.commands.endings import ExitCode, call
from gateway.cli.connection import (
    DEFAULT_ADDRESS,
    Address,
    Timeout,
    TlsCa,
    TlsCert,
    TlsKey,
    TlsServerName,
    Token,
    checked_tls,
    target,
)
from gateway.cli.generate import GenerateOptions, build_request, generate_json
from gateway.cli.generate import generate as stream_generate
from gateway.cli.model import show_model
from gateway.cli.options import (
    AsJson,
    Choice,
    FrequencyPenalty,
    Grammar,
    JsonObject,
    JsonSchema,
    MaxTokens,
    MinP,
    MinTokens,
    NumCompletions,
    NumLogprobs,
    PresencePenalty,
    Regex,
    RepetitionPenalty,
    Seed,
    Stop,
    System,
    Temperature,
    TemplateKwargs,
    TopK,
    TopP,
    structured_output,
)
from shared.pb.tandem.v1 import inference_pb2 as pb


def generate(
    prompt: Annotated[str, typer.Argument(help='The prompt; "-" reads it from stdin.')],
    is_chat: Annotated[
        bool,
        typer.Option("--chat/--raw", help="As a user's chat message, or as it stands."),
    ] = True,
    system: System = "",
    template_kwargs: TemplateKwargs = "",
    n: NumCompletions = None,
    max_tokens: MaxTokens = None,
    min_tokens: MinTokens = 0,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repetition_penalty: RepetitionPenalty = None,
    frequency_penalty: FrequencyPenalty = None,
    presence_penalty: PresencePenalty = None,
    seed: Seed = None,
    stop: Stop = None,
    logprobs: NumLogprobs = None,
    json_schema: JsonSchema = "",
    json_object: JsonObject = False,
    regex: Regex = "",
    grammar: Grammar = "",
    choice: Choice = None,
    address: Address = DEFAULT_ADDRESS,
    token: Token = "",
    timeout: Timeout = None,
    tls_ca: TlsCa = "",
    tls_cert: TlsCert = "",
    tls_key: TlsKey = "",
    tls_server_name: TlsServerName = "",
    as_json: AsJson = False,
) -> None:
    """Stream a completion, or several, to the terminal."""
    options = GenerateOptions(
        is_chat=is_chat,
        system=system,
        template_kwargs_json=template_kwargs,
        max_tokens=max_tokens,
        num_completions=n,
        sampling=pb.SamplingParams(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            frequency_penalty=frequency_penalty,
            presence_penalty=presence_penalty,
            seed=seed,
        ),
        stopping=pb.StopConditions(stop_strings=stop, min_tokens=min_tokens),
        output=pb.OutputOptions(logprobs=logprobs),
        structured_output=structured_output(json_schema, json_object, regex, grammar, choice),
    )
    request = build_request(options, [pb.ChatMessage(role="user", content=_prompt(prompt))])
    run = generate_json if as_json else stream_generate
    tls = (tls_ca, tls_cert, tls_key, tls_server_name)
    call(run(target(address, token, timeout, tls), request))


def chat(
    system: System = "",
    template_kwargs: TemplateKwargs = "",
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repetition_penalty: RepetitionPenalty = None,
    frequency_penalty: FrequencyPenalty = None,
    presence_penalty: PresencePenalty = None,
    seed: Seed = None,
    stop: Stop = None,
    address: Address = DEFAULT_ADDRESS,
    token: Token = "",
    timeout: Annotated[float | None, typer.Option(help="Seconds for an answer.")] = None,
    tls_ca: TlsCa = "",
    tls_cert: TlsCert = "",
    tls_key: TlsKey = "",
    tls_server_name: TlsServerName = "",
) -> None:
    """Talk with the model; /help lists what a line can do."""
    options = GenerateOptions(
        system=system,
        template_kwargs_json=template_kwargs,
        max_tokens=max_tokens,
        sampling=pb.SamplingParams(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            frequency_penalty=frequency_penalty,
            presence_penalty=presence_penalty,
            seed=seed,
        ),
        stopping=pb.StopConditions(stop_strings=stop),
    )
    tls = (tls_ca, tls_cert, tls_key, tls_server_name)
    run_chat(target(address, token, timeout, tls), options)


def model(
    address: Address = DEFAULT_ADDRESS,
    token: Token = "",
    timeout: Timeout = 10.0,
    tls_ca: TlsCa = "",
    tls_cert: TlsCert = "",
    tls_key: TlsKey = "",
    tls_server_name: TlsServerName = "",
    as_json: AsJson = False,
) -> None:
    """Show what is served."""
    tls = (tls_ca, tls_cert, tls_key, tls_server_name)
    call(show_model(target(address, token, timeout, tls), as_json=as_json))


def health(
    address: Address = DEFAULT_ADDRESS,
    service: Annotated[str, typer.Option(help="A service's full name.")] = "",
    timeout: Annotated[float, typer.Option(help="Seconds.", min=0.001)] = 5.0,
    tls_ca: TlsCa = "",
    tls_cert: TlsCert = "",
    tls_key: TlsKey = "",
    tls_server_name: TlsServerName = "",
) -> None:
    """Ask a gateway or a worker for its health; exit code 0 when it is SERVING."""
    tls = checked_tls(tls_ca, tls_cert, tls_key, tls_server_name)
    answer = health_command.probe(address, service=service, timeout_s=timeout, tls=tls)
    typer.echo(answer)
    if answer != "SERVING":
        raise typer.Exit(ExitCode.FAILED)


def _prompt(argument: str) -> str:
    raw = sys.stdin.buffer.read() if argument == "-" else os.fsencode(argument)
    # Bytes that are no UTF-8 cannot be sent; each becomes a replacement character.
    return raw.decode(errors="replace")
