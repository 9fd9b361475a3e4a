"""Protobuf and pipe messages mean the same."""

import time
from typing import Any

import numpy as np
import pytest

from shared.errors import InvalidArgumentError
from shared.pb.tandem.worker.v1 import worker_pb2 as pb
from shared.types import FinishReason, StructuredOutput, StructureKind
from tests.worker.front.harness import neutral_sampling
from worker.convert import add_token_logprobs, fill_step_output, to_new_request, uid_of
from worker.messages import Finished, NewRequest, TokenLogprobs
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
            sampling=neutral_sampling(
                temperature=0.5,
                top_k=4,
                min_p=0.25,
                frequency_penalty=0.5,
                presence_penalty=-0.5,
                seed=2**64 - 1,
                logit_bias={9: 1.5, 4: -2.0, 6: 0.0},
                allowed_token_ids=[9, 4, 9],
            ),
            stop_token_ids=[5, 6],
            ignore_eos=True,
            min_tokens=3,
            priority=-7,
            logprobs=0,
            prompt_logprobs=20,
            index=7,
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
    assert (sampling.min_p, sampling.repetition_penalty) == (0.25, 1.0)
    assert (sampling.frequency_penalty, sampling.presence_penalty) == (0.5, -0.5)
    assert sampling.seed == 2**64 - 1
    assert sampling.logit_bias == ((4, -2.0), (9, 1.5))
    assert sampling.allowed_token_ids == (9, 4)
    assert (request.min_tokens, request.priority, request.index) == (3, -7, 7)
    assert (request.logprobs, request.prompt_logprobs) == (0, 20)


def test_no_deadline_and_no_limit_are_none() -> None:
    sampling = neutral_sampling()
    request = convert(
        pb.Submit(request_id="r", prompt_token_ids=[1], max_tokens=1, sampling=sampling)
    )
    assert request.deadline is None and request.time_limit is None
    assert request.logprobs is None and request.prompt_logprobs is None
    assert request.structured_output is None


def test_all_ids_allowed_is_nothing_forbidden() -> None:
    sampling = neutral_sampling(allowed_token_ids=range(1000))
    request = convert(
        pb.Submit(request_id="r", prompt_token_ids=[1], max_tokens=1, sampling=sampling)
    )
    assert not request.sampling.adjusts_logits


def with_rule(rule: pb.StructuredOutput, **fields: Any) -> pb.Submit:
    values = {"sampling": neutral_sampling(), "max_tokens": 4, **fields}
    return pb.Submit(request_id="r", prompt_token_ids=[1], structured_output=rule, **values)


@pytest.mark.parametrize("kind", StructureKind)
def test_kinds_of_structured_output_have_the_same_names_on_the_wire(kind: StructureKind) -> None:
    rule = pb.StructuredOutput(kind=f"KIND_{kind.name}", text="t", choices=["a", "b"])
    request = convert(with_rule(rule))
    assert request.structured_output == StructuredOutput(kind, "t", ("a", "b"))


_REGEX = pb.StructuredOutput.KIND_REGEX


@pytest.mark.parametrize(
    ("submit", "field"),
    [
        (with_rule(pb.StructuredOutput()), "structured_output"),
        (with_rule(pb.StructuredOutput(kind=_REGEX, text="x" * 65537)), "structured_output"),
        (
            with_rule(
                pb.StructuredOutput(kind=pb.StructuredOutput.KIND_CHOICE, choices=["a"] * 1025)
            ),
            "structured_output.choice",
        ),
        (with_rule(pb.StructuredOutput(kind=_REGEX), ignore_eos=True), "stopping.ignore_eos"),
        (with_rule(pb.StructuredOutput(kind=_REGEX), min_tokens=1), "stopping.min_tokens"),
        (
            with_rule(
                pb.StructuredOutput(kind=_REGEX), sampling=neutral_sampling(allowed_token_ids=[4])
            ),
            "sampling.allowed_token_ids",
        ),
    ],
)
def test_rules_that_cannot_be_served_are_refused(submit: pb.Submit, field: str) -> None:
    with pytest.raises(InvalidArgumentError) as refusal:
        convert(submit)
    assert refusal.value.field == field


def test_entries_of_a_request_are_in_one_message_with_as_many_likeliest_as_it_asked() -> None:
    entries = TokenLogprobs(
        is_prompt=True,
        uids=np.array([uid_of(3, 7), uid_of(3, 7), uid_of(4, 7), uid_of(3, 9)], np.int64),
        token_ids=np.array([10, 11, 12, 13], np.int32),
        logprobs=np.array([-1, -2, -3, -4], np.float32),
        ranks=np.array([1, 2, 3, 4], np.int32),
        num_top=np.array([1, 1, 2, 0], np.int32),
        top_ids=np.arange(8, dtype=np.int32).reshape(4, 2),
        top_logprobs=-np.arange(8, dtype=np.float32).reshape(4, 2),
    )
    mine = entries.uids >> 32 == 3
    output = pb.StepOutput()
    add_token_logprobs(output, entries, mine)
    first, second = output.logprobs
    assert (first.handle, first.prompt, first.num_top) == (7, True, 1)
    assert (list(first.token_ids), list(first.logprobs)) == ([10, 11], [-1, -2])
    assert list(first.ranks) == [1, 2]
    assert (list(first.top_token_ids), list(first.top_logprobs)) == ([0, 2], [0, -2])
    assert (second.handle, list(second.token_ids), second.num_top) == (9, [13], 0)
    assert not second.top_token_ids


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
