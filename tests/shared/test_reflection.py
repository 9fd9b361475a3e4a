"""Reflection answers what grpcurl and ghz ask."""

from collections.abc import AsyncIterator

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

# Imported so that its descriptors are in the pool.
from shared.pb.tandem.v1 import inference_pb2
from shared.reflection import enable_reflection

SERVICE = "tandem.v1.InferenceService"


@pytest.fixture
async def stub() -> AsyncIterator[reflection_pb2_grpc.ServerReflectionStub]:
    server = grpc.aio.server()
    enable_reflection(server, [SERVICE])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield reflection_pb2_grpc.ServerReflectionStub(channel)
    await server.stop(None)


async def ask(
    stub: reflection_pb2_grpc.ServerReflectionStub,
    request: reflection_pb2.ServerReflectionRequest,
) -> reflection_pb2.ServerReflectionResponse:
    call = stub.ServerReflectionInfo(iter([request]))
    return [response async for response in call][0]


async def test_services_are_listed(stub: reflection_pb2_grpc.ServerReflectionStub) -> None:
    answer = await ask(stub, reflection_pb2.ServerReflectionRequest(list_services=""))
    names = {service.name for service in answer.list_services_response.service}
    assert names == {SERVICE, "grpc.reflection.v1alpha.ServerReflection"}


@pytest.mark.parametrize(
    "symbol",
    [
        SERVICE,
        f"{SERVICE}.GenerateStream",
        "tandem.v1.GenerateRequest",
    ],
)
async def test_a_symbol_of_any_kind_leads_to_its_file(
    stub: reflection_pb2_grpc.ServerReflectionStub, symbol: str
) -> None:
    request = reflection_pb2.ServerReflectionRequest(file_containing_symbol=symbol)
    answer = await ask(stub, request)
    (serialized, *_) = answer.file_descriptor_response.file_descriptor_proto
    file = descriptor_pb2.FileDescriptorProto.FromString(serialized)
    assert file.name == inference_pb2.DESCRIPTOR.name


@pytest.mark.parametrize("symbol", [f"{SERVICE}.NoSuchMethod", "tandem.v1.NoSuchMessage", "x"])
async def test_an_unknown_symbol_is_not_found(
    stub: reflection_pb2_grpc.ServerReflectionStub, symbol: str
) -> None:
    request = reflection_pb2.ServerReflectionRequest(file_containing_symbol=symbol)
    answer = await ask(stub, request)
    assert answer.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]
