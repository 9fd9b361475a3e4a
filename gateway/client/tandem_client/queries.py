"""The calls with one answer: what each sends, and what its answer comes to. Pure."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from grpc_health.v1 import health_pb2

from shared.pb.tandem.v1 import inference_pb2 as pb
from tandem_client.answers import abort_outcomes_of, load_of, model_of
from tandem_client.errors import DeadlineExceededError, TandemError, UnavailableError
from tandem_client.options import ChatOptions, Message
from tandem_client.requests import tokenize_request
from tandem_client.service_info import Load, Model

_T = TypeVar("_T")

# For a question that anything alive answers at once.
HEALTH_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Query(Generic[_T]):
    """One call of the inference service."""

    method: str
    request: Any
    answer: Callable[[Any], _T]


def tokenize_query(
    prompt: str | Sequence[Message | Mapping[str, Any]],
    *,
    add_special_tokens: bool | None,
    model: str,
    options: ChatOptions,
) -> Query[list[int]]:
    request = tokenize_request(prompt, model, add_special_tokens, options)
    return Query("Tokenize", request, lambda response: list(response.token_ids))


def detokenize_query(
    token_ids: Sequence[int], *, skip_special_tokens: bool, model: str
) -> Query[str]:
    request = pb.DetokenizeRequest(
        model=model, token_ids=token_ids, skip_special_tokens=skip_special_tokens
    )
    return Query("Detokenize", request, lambda response: str(response.text))


def abort_query(request_ids: Sequence[str]) -> Query[dict[str, bool]]:
    return Query("Abort", pb.AbortRequest(request_ids=request_ids), abort_outcomes_of)


def model_query() -> Query[Model]:
    return Query("GetModel", pb.GetModelRequest(), model_of)


def load_query() -> Query[Load]:
    return Query("GetLoad", pb.GetLoadRequest(), load_of)


def flush_cache_query() -> Query[int]:
    return Query("FlushCache", pb.FlushCacheRequest(), lambda response: int(response.pages_freed))


def is_serving(answer: health_pb2.HealthCheckResponse) -> bool:
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def is_out_of_reach(error: TandemError) -> bool:
    """Whether a health check that failed so says that nobody serves, and is no fault itself."""
    return isinstance(error, UnavailableError | DeadlineExceededError)
