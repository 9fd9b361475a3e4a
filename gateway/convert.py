"""The gateway's values as messages of the public contract."""

from typing import assert_never

from gateway.completion import Delta, Event, Finished, Started
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
        case Delta(text, token_ids):
            return pb.GenerateStreamResponse(delta=pb.Delta(text=text, token_ids=token_ids))
        case Started():
            return pb.GenerateStreamResponse(
                started=pb.Started(
                    request_id=event.request_id,
                    prompt_tokens=event.prompt_tokens,
                    cached_tokens=event.cached_tokens,
                    queue_position=event.queue_position,
                )
            )
        case Finished():
            return pb.GenerateStreamResponse(finished=finished_message(event))
        case _:
            assert_never(event)


def finished_message(event: Finished) -> pb.Finished:
    timings = event.timings
    message = pb.Finished(
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
