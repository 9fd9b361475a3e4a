"""Mutual TLS and tokens on both hops, with real processes, real signals and the command line."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from google.protobuf.descriptor import ServiceDescriptor
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from shared.auth import bearer_metadata
from shared.pb.tandem.v1 import inference_pb2 as pb
from shared.pb.tandem.v1 import inference_pb2_grpc as pb_grpc
from shared.pb.tandem.worker.v1 import worker_pb2
from shared.tls import ClientTls, open_channel
from shared.tokens import hash_line
from tests.certificates import Authority
from tests.integration.conftest import ECHO
from tests.integration.pair import Service, Stream, rest_of
from tests.ports import free_port

WORKER_TOKEN, HERS, NEXT = "w0rker-s3cret", "hers-s3cret", "next-s3cret"
SECRETS = (WORKER_TOKEN, HERS, NEXT)
TEXT = "a b c d " * 18


@dataclass
class SecurePair:
    """Two gateway processes and a worker, which trust one authority and nobody else."""

    folder: Path
    gateway: Service
    worker: Service
    client: ClientTls
    tokens: Path

    def environment(self, token: str = HERS) -> dict[str, str]:
        """What lets the command line in."""
        return {
            **os.environ,
            "NO_COLOR": "1",
            "TANDEM_ADDRESS": self.gateway.address,
            "TANDEM_TOKEN": token,
            "TANDEM_TLS_CA": str(self.client.ca),
            "TANDEM_TLS_CERT": str(self.client.cert),
            "TANDEM_TLS_KEY": str(self.client.key),
        }


@contextmanager
def running_secure_pair(folder: Path, tokenizer: Path) -> Iterator[SecurePair]:
    authority = Authority(folder)
    client = authority.client()
    ca = str(authority.ca)
    tokens, worker_tokens, worker_token = (
        folder / name for name in ("clients", "gateways", "worker-token")
    )
    tokens.write_text(hash_line("alice", HERS))
    worker_tokens.write_text(hash_line("gateway", WORKER_TOKEN))
    worker_token.write_text(WORKER_TOKEN)

    def service(module: str, name: str, *args: str) -> Service:
        cert, key = authority.issue(name, "127.0.0.1", to=module)
        tls = ("--tls-cert", str(cert), "--tls-key", str(key), "--tls-client-ca", ca)
        address, log = f"127.0.0.1:{free_port()}", folder / f"{module}.log"
        return Service(module, (*tls, *args), address, log, client)

    worker = service(
        *("worker", "worker.internal", "--tokens-file", str(worker_tokens)),
        *(*ECHO[:-1], "20", "--model", str(tokenizer)),
    )
    gateway_cert, gateway_key = authority.issue("gateway.internal", to="link")
    gateway = service(
        *("gateway", "gateway.internal", "--workers", worker.address, "--processes", "2"),
        *("--tokens-file", str(tokens), "--worker-token-file", str(worker_token)),
        *("--worker-tls-ca", ca, "--worker-tls-server-name", "worker.internal"),
        *("--worker-tls-cert", str(gateway_cert), "--worker-tls-key", str(gateway_key)),
    )
    pair = SecurePair(folder, gateway, worker, client, tokens)
    try:
        for one in (worker, gateway):
            one.start()
        for one in (worker, gateway):
            one.wait_serving()
        yield pair
    finally:
        for one in (gateway, worker):
            one.stop()


@pytest.fixture(scope="module")
def tokenizer(tokenizer_files: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    for name, content in tokenizer_files.items():
        (folder / name).write_bytes(content)
    return folder


@pytest.fixture(scope="module")
def secure_pair(tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecurePair]:
    with running_secure_pair(tmp_path_factory.mktemp("secure"), tokenizer) as pair:
        yield pair


def tandem(
    *arguments: str, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gateway.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment,
    )


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        (("health",), "SERVING"),
        (("model", "--json"), '"worker_version"'),
        (("generate", "--raw", "one two three"), "one two three"),
    ],
)
def test_the_command_line_gets_in_with_a_certificate_and_a_token(
    secure_pair: SecurePair, command: Sequence[str], shown: str
) -> None:
    ran = tandem(*command, environment=secure_pair.environment())
    assert ran.returncode == 0, ran.stderr
    assert shown in ran.stdout


async def test_a_worker_is_traced_with_a_certificate_and_its_token(
    secure_pair: SecurePair,
) -> None:
    out = secure_pair.folder / "trace.json.gz"
    command = ("trace", "--address", secure_pair.worker.address, "--steps", "5", "--out", str(out))
    environment = secure_pair.environment(WORKER_TOKEN)
    request = pb.GenerateRequest(text=TEXT, max_tokens=20)
    async with caller(secure_pair) as stub, asyncio.TaskGroup() as tasks:
        tracing = tasks.create_task(asyncio.to_thread(tandem, *command, environment=environment))
        while not tracing.done():
            await stub.Generate(request, metadata=bearer_metadata(HERS))
    ran = tracing.result()
    assert ran.returncode == 0, ran.stderr
    assert out.exists()


def test_the_probe_of_the_images_gets_in_by_its_environment(secure_pair: SecurePair) -> None:
    for service in (secure_pair.gateway, secure_pair.worker):
        command = [sys.executable, "-m", "gateway.cli.health", service.address]
        ran = subprocess.run(
            command, capture_output=True, text=True, timeout=60, env=secure_pair.environment()
        )
        assert (ran.returncode, ran.stdout) == (0, "SERVING\n"), ran.stderr


@pytest.mark.parametrize("left_out", [("CERT", "KEY"), ("CA", "CERT", "KEY")])
def test_without_a_certificate_nobody_gets_in_and_is_told_what_to_do(
    secure_pair: SecurePair, left_out: Sequence[str]
) -> None:
    environment = secure_pair.environment()
    for name in left_out:
        del environment[f"TANDEM_TLS_{name}"]
    ran = tandem("model", environment=environment)
    assert ran.returncode == 1
    assert "UNAVAILABLE" in ran.stderr and "--tls-" in " ".join(ran.stderr.split())


def test_without_a_token_nobody_gets_in(secure_pair: SecurePair) -> None:
    ran = tandem("model", environment=secure_pair.environment(WORKER_TOKEN))
    assert ran.returncode == 1
    assert "UNAUTHENTICATED" in ran.stderr
    assert WORKER_TOKEN not in ran.stderr


def methods_of(*services: ServiceDescriptor) -> list[str]:
    return [f"/{one.full_name}/{method.name}" for one in services for method in one.methods]


async def test_every_method_asks_for_a_token_reflection_too_and_only_health_does_not(
    secure_pair: SecurePair,
) -> None:
    guarded = [
        (secure_pair.gateway, pb.DESCRIPTOR.services_by_name["InferenceService"]),
        (secure_pair.worker, worker_pb2.DESCRIPTOR.services_by_name["WorkerService"]),
    ]
    reflection = reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"]
    for service, descriptor in guarded:
        async with open_channel(service.address, secure_pair.client, []) as channel:
            for method in [*methods_of(descriptor, reflection), "/none/None"]:
                call: Any = channel.unary_unary(method)
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call(b"", timeout=5)
                assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED, method
            health = health_pb2_grpc.HealthStub(channel)
            assert (await health.Check(health_pb2.HealthCheckRequest())).status


def test_a_file_that_cannot_be_used_is_a_wrong_option(tmp_path: Path) -> None:
    missing = tmp_path / "missing.pem"
    for command in ("model", "health", "chat"):
        ran = tandem(command, "--tls-ca", str(missing))
        assert ran.returncode == 2
        assert "cannot read" in ran.stderr


@asynccontextmanager
async def caller(pair: SecurePair) -> AsyncIterator[pb_grpc.InferenceServiceStub]:
    options: list[tuple[str, int | str]] = [("grpc.use_local_subchannel_pool", 1)]
    async with open_channel(pair.gateway.address, pair.client, options) as channel:
        yield pb_grpc.InferenceServiceStub(channel)


async def is_known(pair: SecurePair, token: str) -> bool:
    """By a connection of its own, which may be with either process."""
    async with caller(pair) as stub:
        call = stub.GetModel(pb.GetModelRequest(), metadata=bearer_metadata(token))
        code = await call.code()
    assert code in (grpc.StatusCode.OK, grpc.StatusCode.UNAUTHENTICATED)
    return code is grpc.StatusCode.OK


async def test_a_hang_up_changes_the_tokens_of_every_process_and_ends_no_stream(
    secure_pair: SecurePair,
) -> None:
    try:
        async with caller(secure_pair) as stub:
            stream: Stream = stub.GenerateStream(
                pb.GenerateRequest(text=TEXT, max_tokens=70), metadata=bearer_metadata(HERS)
            )
            await stream.read()
            secure_pair.tokens.write_text(hash_line("alice", NEXT))
            secure_pair.gateway.signal(signal.SIGHUP)
            # Each process in its own time; then all of them.
            async with asyncio.timeout(10):
                while sum([await is_known(secure_pair, NEXT) for _ in range(8)]) < 8:
                    pass
            assert not any([await is_known(secure_pair, HERS) for _ in range(8)])
            text = "".join([event.delta.text async for event in rest_of(stream)])
            assert text == TEXT[: len(text)] and len(text) > 100
            assert await stream.code() is grpc.StatusCode.OK
    finally:
        secure_pair.tokens.write_text(hash_line("alice", HERS))
        secure_pair.gateway.signal(signal.SIGHUP)
        async with asyncio.timeout(10):
            while sum([await is_known(secure_pair, HERS) for _ in range(8)]) < 8:
                pass


async def test_no_secret_is_in_a_log_or_in_a_process_list(secure_pair: SecurePair) -> None:
    for token in ("wr0ng-s3cret", HERS):
        await is_known(secure_pair, token)
    for service in (secure_pair.gateway, secure_pair.worker):
        process = psutil.Process(service.process.pid)
        family = [process, *process.children(recursive=True)]
        shown = service.log.read_text() + repr([one.cmdline() for one in family])
        assert not [secret for secret in (*SECRETS, "wr0ng-s3cret") if secret in shown]


@pytest.mark.parametrize("module", ["gateway", "gateway --processes 2", "worker"])
@pytest.mark.parametrize("flag", ["--tls-cert", "--tokens-file"])
def test_a_service_does_not_start_with_a_file_that_cannot_be_used(
    tmp_path: Path, tokenizer: Path, module: str, flag: str
) -> None:
    authority = Authority(tmp_path)
    cert, key = authority.issue("127.0.0.1")
    broken = tmp_path / "broken"
    broken.write_text("s3cret: and more\n")
    files = {"--tls-cert": cert, "--tls-key": key, flag: broken}
    arguments = [*module.split(), "--listen", f"127.0.0.1:{free_port()}"]
    arguments += [word for name, path in files.items() for word in (name, str(path))]
    if module == "worker":
        arguments += ["--engine", "echo", "--model", str(tokenizer)]
    ran = subprocess.run(
        [sys.executable, "-m", *arguments], capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 2, ran.stderr
    assert f"tandem {module.split()[0]}: " in ran.stderr and str(broken) in ran.stderr
    assert "Traceback" not in ran.stderr and "s3cret" not in ran.stderr


@pytest.mark.parametrize("program", ["gateway", "worker"])
def test_help_shows_no_secret_of_the_environment(program: str) -> None:
    environment = {**os.environ, "TANDEM_GATEWAY_TOKENS": HERS, "TANDEM_TOKEN": HERS}
    ran = tandem(program, "--help", environment=environment)
    assert ran.returncode == 0 and "--tokens-file" in ran.stdout
    assert HERS not in ran.stdout
    chat = tandem("chat", "--help", environment=environment)
    assert "--token" in chat.stdout and HERS not in chat.stdout
