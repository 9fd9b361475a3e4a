"""Protobuf and pipe messages mean the same."""

import time

import numpy as np
import pytest

from shared.pb.tandem.worker.v1 import worker_pb2 as pb
from shared.types import FinishReason
from tests.worker.front.harness import neutral_sampling
from worker.convert import fill_step_output, to_new_request, uid_of
from worker.messages import Finished, NewRequest
from worker.step import EngineInfo

ENGINE = EngineInfo(num_pages=8, page_size=16, max_rows=4, max_context=128, vocab_size=1000)


def convert(submit: pb.Submit) -> NewRequest:
    return to_new_request(submit, uid_of(3, submit.handle), ENGINE, now=100.0)


def test_every_field_that_is_served_arrives() -> None:
    request = convert(
        pb.Submit(
            handle=7,
            request_id="r",
            prompt_token_ids=[1, 2, 999],
            max_tokens=9,
            sampling=neutral_sampling(temperature=0.5, top_k=4, seed=2**64 - 1),
            stop_token_ids=[5, 6],
            ignore_eos=True,
            cache_salt="pepper",
            time_limit_ms=1500,
            timeout_ms=2500,
        )
    )
    assert request.uid == (3 << 32) + 7
    assert request.prompt_token_ids.dtype == np.int32
    assert request.prompt_token_ids.tolist() == [1, 2, 999]
    assert (request.max_tokens, request.stop_token_ids, request.ignore_eos) == (9, (5, 6), True)
    assert (request.cache_salt, request.arrived_at) == ("pepper", 100.0)
    assert (request.time_limit, request.deadline) == (101.5, 102.5)
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.5, 4, 1.0)
    assert sampling.seed == 2**64 - 1


def test_no_deadline_and_no_limit_are_none() -> None:
    sampling = neutral_sampling()
    request = convert(
        pb.Submit(request_id="r", prompt_token_ids=[1], max_tokens=1, sampling=sampling)
    )
    assert request.deadline is None and request.time_limit is None


@pytest.mark.parametrize("reason", [r for r in FinishReason if r is not FinishReason.STOP_STRING])
def test_finish_reasons_have_the_same_names_on_the_wire(reason: FinishReason) -> None:
    finished = Finished(uid_of(3, 7), reason, -1, 1, 2, 0.25, 0.5, 0.75)
    output = pb.StepOutput()
    fill_step_output(
        output,
        handles=[7],
        token_ids=[5],
        started=(),
        ended=(finished,),
        committed_at=time.monotonic() - 2,
    )
    entry = output.finished[0]
    assert pb.FinishReason.Name(entry.reason) == f"FINISH_REASON_{reason.name}"
    assert (entry.handle, entry.matched_token_id) == (7, 0)
    assert (entry.queue_ms, entry.prefill_ms, entry.decode_ms) == (250, 500, 750)
    lag_s = time.time() - output.committed_unix_us / 1e6
    assert lag_s == pytest.approx(2, abs=0.1)
