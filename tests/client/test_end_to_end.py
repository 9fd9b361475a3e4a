"""Both clients against a worker and a gateway that are processes of their own."""

from tandem_client import FinishReason
from tests.client.callers import collect
from tests.client.conftest import MakeCaller
from tests.integration.pair import Pair


async def test_text_goes_there_and_back(echo_pair: Pair, make_caller: MakeCaller) -> None:
    prompt = "héllo 世界 😀 STOP and on"
    async with make_caller(echo_pair.address, timeout_s=60) as caller:
        assert await caller.call("health") is True
        model = await caller.call("model")
        ids = await caller.call("tokenize", prompt, add_special_tokens=False)
        assert await caller.call("detokenize", ids) == prompt
        whole = await caller.call("generate", prompt)
        assert (whole.text, list(whole.token_ids)) == (prompt, ids)
        assert whole.finish_reason is FinishReason.STOP
        assert whole.finished.eos_token_id in model.eos_token_ids
        told = await caller.call("generate", prompt, logprobs=2, prompt_logprobs=0, max_tokens=5)
        told_bytes = b"".join(entry.chosen.token_bytes for entry in told.logprobs)
        assert told_bytes.decode(errors="replace") == told.text
        assert [entry.chosen.token_id for entry in told.logprobs] == list(told.token_ids)
        assert len(told.prompt_logprobs) == told.usage.prompt_tokens - 1
        stopped = await caller.call("generate", prompt, stop_strings=["STOP"])
        assert stopped.text == "héllo 世界 😀 "


async def test_completions_of_one_prompt_share_its_id(
    echo_pair: Pair, make_caller: MakeCaller
) -> None:
    async with make_caller(echo_pair.address, timeout_s=60) as caller:
        completions = await caller.call("generate_many", "one two", 3, seed=7)
    assert [completion.index for completion in completions] == [0, 1, 2]
    assert [completion.seed for completion in completions] == [7, 8, 9]
    assert {completion.text for completion in completions} == {"one two"}
    assert len({completion.request_id for completion in completions}) == 1


async def test_a_request_that_was_left_runs_no_longer(
    echo_pair: Pair, make_caller: MakeCaller
) -> None:
    async with make_caller(echo_pair.address, timeout_s=60) as caller:
        stream = caller.stream("on and on " * 300, max_tokens=1000, ignore_eos=True)
        async for _ in stream:
            break
        stream.close()
        assert await collect(stream) == []
        load = await caller.call("load")
        while load.live_requests or any(worker.running for worker in load.workers):
            load = await caller.call("load")
        assert all(worker.pages_held == 0 for worker in load.workers)
