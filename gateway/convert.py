"""The gateway's values as messages of the public contract."""

from collections.abc import Iterator
from typing import assert_never

from gateway.completion import Delta, Event, Finished, Started
from gateway.logprobs import Logprobs, TokenLogprob
from gateway.served_model import ServedModel
from shared.pb.tandem.v1 import inference_pb2 as pb
from shared.pb.tandem.worker.v1 import worker_pb2
from shared.types import FinishReason

_REASONS = {
    FinishReason.EOS: pb.FINISH_REASON_STOP,
    FinishReason.STOP_TOKEN: pb.FINISH_REASON_STOP,
    FinishReason.STOP_STRING: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.ABORTED: pb.FINISH_REASON_ABORTED,
    FinishReason.TIME_LIMIT: pb.FINISH_REASON_TIME_LIMIT,
}


def stream_response(event: Event) -> pb.GenerateStreamResponse:
    match event:
        case Delta():
            return _delta_response(event)
        case Started():
            return pb.GenerateStreamResponse(
                started=pb.Started(
                    index=event.index,
                    request_id=event.request_id,
                    prompt_tokens=event.prompt_tokens,
                    cached_tokens=event.cached_tokens,
                    queue_position=event.queue_position,
                    prompt_logprobs=logprobs_messages(event.prompt_logprobs),
                )
            )
        case Finished():
            return pb.GenerateStreamResponse(finished=finished_message(event))
        case _:
            assert_never(event)


class Answer:
    """The events of a request, gathered into the answer of a unary call."""

    def __init__(self) -> None:
        self._request_id = ""
        self._completions: dict[int, pb.Completion] = {}
        self._texts: dict[int, list[str]] = {}

    def add(self, event: Event) -> None:
        match event:
            case Delta():
                completion = self._completions[event.index]
                completion.token_ids.extend(event.token_ids)
                completion.logprobs.extend(logprobs_messages(event.logprobs))
                self._texts[event.index].append(event.text)
            case Started():
                self._request_id = event.request_id
                self._texts[event.index] = []
                self._completions[event.index] = pb.Completion(
                    index=event.index,
                    prompt_logprobs=logprobs_messages(event.prompt_logprobs),
                )
            case Finished():
                completion = self._completions[event.index]
                completion.token_ids.extend(event.trailing_token_ids)
                completion.logprobs.extend(logprobs_messages(event.trailing_logprobs))
                completion.text = "".join(self._texts[event.index])
                completion.finished.CopyFrom(finished_message(event))
            case _:
                assert_never(event)

    def message(self) -> pb.GenerateResponse:
        completions = [self._completions[index] for index in sorted(self._completions)]
        return pb.GenerateResponse(request_id=self._request_id, completions=completions)


def logprobs_messages(logprobs: Logprobs | None) -> Iterator[pb.TokenLogprobs]:
    """One for each token; none where none were asked for."""
    if logprobs is None:
        return
    for chosen, top in logprobs.places():
        yield pb.TokenLogprobs(
            chosen=_logprob_message(chosen), top=[_logprob_message(token) for token in top]
        )


def _logprob_message(token: TokenLogprob) -> pb.TokenLogprob:
    return pb.TokenLogprob(
        token_id=token.token_id,
        text=token.token_bytes.decode(errors="replace"),
        logprob=token.logprob,
        rank=token.rank,
        token_bytes=token.token_bytes,
    )


def _delta_response(event: Delta) -> pb.GenerateStreamResponse:
    """The one message that is made for every token: filled in place, in half the time that
    a Delta made first and then copied takes (0.6 µs against 1.4)."""
    response = pb.GenerateStreamResponse()
    delta = response.delta
    delta.text = event.text
    delta.token_ids.extend(event.token_ids)
    if event.index:
        delta.index = event.index
    if event.logprobs is not None:
        delta.logprobs.extend(logprobs_messages(event.logprobs))
    return response


def finished_message(event: Finished) -> pb.Finished:
    timings = event.timings
    message = pb.Finished(
        index=event.index,
        finish_reason=_REASONS[event.reason],
        usage=pb.Usage(
            prompt_tokens=event.prompt_tokens,
            cached_tokens=event.cached_tokens,
            completion_tokens=event.completion_tokens,
        ),
        timings=pb.Timings(
            queue_ms=timings.queue_ms,
            prefill_ms=timings.prefill_ms,
            time_to_first_token_ms=timings.time_to_first_token_ms,
            decode_ms=timings.decode_ms,
            total_ms=timings.total_ms,
        ),
        seed=event.seed,
        trailing_token_ids=event.trailing_token_ids,
        trailing_logprobs=logprobs_messages(event.trailing_logprobs),
    )
    match event.reason:
        case FinishReason.EOS:
            message.eos_token_id = event.matched_token_id
        case FinishReason.STOP_TOKEN:
            message.stop_token_id = event.matched_token_id
        case FinishReason.STOP_STRING:
            message.stop_string = event.stop_string
        case _:
            pass
    return message


def model_message(
    model: ServedModel, *, max_message_bytes: int, gateway_version: str
) -> pb.GetModelResponse:
    info = model.info
    message = pb.GetModelResponse(
        model=info.name,
        architecture=info.architecture,
        dtype=info.dtype,
        device=info.device,
        vocab_size=info.vocab_size,
        max_context_tokens=info.max_context_tokens,
        default_max_tokens=info.default_max_tokens,
        eos_token_ids=info.eos_token_ids,
        has_chat_template=model.tokenizer.chat_template is not None,
        tokenizer_sha256=info.tokenizer_sha256,
        max_message_bytes=max_message_bytes,
        gateway_version=gateway_version,
        worker_version=info.worker_version,
        overlap_scheduling=info.overlap_scheduling,
    )
    if model.tokenizer.bos_token_id is not None:
        message.bos_token_id = model.tokenizer.bos_token_id
    return message


def load_message(address: str, ready: bool, load: worker_pb2.GetLoadResponse) -> pb.WorkerLoad:
    return pb.WorkerLoad(
        address=address,
        ready=ready and load.ready,
        running=load.running,
        waiting=load.waiting,
        pages_total=load.pages_total,
        pages_free=load.pages_free,
        pages_cached=load.pages_cached,
        pages_held=load.pages_held,
        steps=load.steps,
        preemptions=load.preemptions,
    )
