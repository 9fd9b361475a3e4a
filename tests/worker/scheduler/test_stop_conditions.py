"""What ends a request by itself, and what is counted."""

import pytest

from shared.types import FinishReason
from tests.fakes import TokenModel, echo_model, scripted_model
from tests.worker.scheduler.driver import EOS, Driver
from worker.messages import Finished


def run(
    prompt: list[int],
    *,
    model: TokenModel | None = None,
    eos: tuple[int, ...] = (EOS,),
    max_tokens: int = 20,
    stop_token_ids: tuple[int, ...] = (),
    ignore_eos: bool = False,
) -> tuple[list[int], Finished]:
    driver = Driver(model=model or echo_model(EOS), eos=eos)
    uid = driver.submit(prompt, max_tokens, stop_token_ids=stop_token_ids, ignore_eos=ignore_eos)
    driver.run()
    return driver.tokens(uid), driver.outcomes[uid].finished


def test_eos_is_counted_and_not_shown() -> None:
    token_ids, end = run([5, 6, 8])
    assert token_ids == [5, 6, 8]
    assert (end.reason, end.matched_token_id, end.completion_tokens) == (FinishReason.EOS, EOS, 4)


def test_any_of_several_eos_ids_ends_it() -> None:
    token_ids, end = run([4, 5, 6, 7, 8], eos=(EOS, 7))
    assert token_ids == [4, 5, 6]
    assert (end.reason, end.matched_token_id) == (FinishReason.EOS, 7)


def test_ignored_eos_runs_to_the_length_and_is_shown() -> None:
    token_ids, end = run([4, 7, 5], eos=(EOS, 7), max_tokens=6, ignore_eos=True)
    assert token_ids == [4, 7, 5, EOS, EOS, EOS]
    assert (end.reason, end.matched_token_id) == (FinishReason.LENGTH, -1)
    assert end.completion_tokens == 6


def test_a_stop_token_ends_it() -> None:
    token_ids, end = run([4, 5, 6], stop_token_ids=(9, 6, 3, 2, 1))
    assert token_ids == [4, 5]
    assert (end.reason, end.matched_token_id) == (FinishReason.STOP_TOKEN, 6)
    assert end.completion_tokens == 3


def test_an_ignored_eos_can_be_a_stop_token() -> None:
    token_ids, end = run([4, 5], stop_token_ids=(EOS,), ignore_eos=True)
    assert token_ids == [4, 5]
    assert end.reason is FinishReason.STOP_TOKEN


def test_eos_as_the_last_token_allowed_is_still_eos() -> None:
    token_ids, end = run([4, 5], max_tokens=3)
    assert token_ids == [4, 5]
    assert (end.reason, end.completion_tokens) == (FinishReason.EOS, 3)


def test_stop_tokens_of_a_former_request_do_not_stick_to_its_row() -> None:
    driver = Driver(model=echo_model(EOS))
    driver.submit([4, 5], stop_token_ids=(4, 6))
    driver.run()
    uid = driver.submit([4, 6], stop_token_ids=(9,))
    plain = driver.submit([4, 6])
    driver.run()
    assert driver.tokens(uid) == driver.tokens(plain) == [4, 6]


@pytest.mark.parametrize("max_tokens", [1, 2, 5])
def test_the_length_is_exact(max_tokens: int) -> None:
    token_ids, end = run([1], model=scripted_model({1: [3]}), max_tokens=max_tokens)
    assert token_ids == [3] * max_tokens
    assert (end.reason, end.completion_tokens) == (FinishReason.LENGTH, max_tokens)
