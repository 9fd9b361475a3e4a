"""What the services add to one stream's times: `python -m tests.bench.latency`.

An echo engine with a step of its own length serves one stream at a time. Of each stream the
client takes the time to its first token and the times between messages; the engine says of
the same stream how long it took itself: from its arrival there to its first token, and from
there to its last. The difference is what gateway, hop, front and pipes add.

Last line: {"added_ttft_ms", "added_itl_ms", "itl_ms", "engine_itl_ms"}, p50 over all streams.
"""

import argparse
import asyncio
import statistics
import time
from dataclasses import dataclass

import grpc

from shared.pb.tandem.v1 import inference_pb2 as pb
from shared.pb.tandem.v1 import inference_pb2_grpc as pb_grpc
from tests.bench import report
from tests.bench.stream_pair import PairOptions, bench_pair


@dataclass(frozen=True, slots=True)
class Times:
    """One stream's, in milliseconds."""

    ttft: float
    itls: list[float]
    engine_ttft: float
    engine_itl: float


async def measure(step_ms: float, num_streams: int, num_tokens: int) -> list[Times]:
    options = PairOptions(step_ms, streams=1, processes=1, coalesce=True, is_pinned=False)
    async with bench_pair(options) as pair, grpc.aio.insecure_channel(pair.address) as channel:
        stub = pb_grpc.InferenceServiceStub(channel)
        # The first warms both sides up.
        return [await _one(stub, number, num_tokens) for number in range(1 + num_streams)][1:]


async def _one(stub: pb_grpc.InferenceServiceStub, number: int, num_tokens: int) -> Times:
    # Each has another beginning, so that no prefix is cached.
    ids = [1000 + number, *range(2000, 2000 + num_tokens)]
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=ids),
        max_tokens=num_tokens,
        sampling=pb.SamplingParams(temperature=0),
        stopping=pb.StopConditions(ignore_eos=True),
    )
    sent_at, arrivals = time.perf_counter(), []
    async for response in stub.GenerateStream(request):
        if response.HasField("delta"):
            arrivals.append(time.perf_counter())
        elif response.HasField("finished"):
            timings = response.finished.timings
    gaps = [1e3 * (end - begin) for begin, end in zip(arrivals, arrivals[1:], strict=False)]
    return Times(
        ttft=1e3 * (arrivals[0] - sent_at),
        itls=gaps,
        engine_ttft=timings.queue_ms + timings.prefill_ms,
        engine_itl=timings.decode_ms / (num_tokens - 1),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--step-ms", type=float, default=5.0)
    parser.add_argument("--streams", type=int, default=30)
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    report.header(f"Latency: one stream at a time, steps of {options.step_ms:g} ms")
    times = asyncio.run(measure(options.step_ms, options.streams, options.tokens))
    itl = statistics.median(gap for one in times for gap in one.itls)
    engine_itl = statistics.median(one.engine_itl for one in times)
    added_ttft = statistics.median(one.ttft - one.engine_ttft for one in times)
    print(f"first token  {added_ttft:.2f} ms over the engine's own")
    print(f"next tokens  {itl:.3f} ms apart, the engine's {engine_itl:.3f}")
    report.result(
        {
            "added_ttft_ms": round(added_ttft, 3),
            "added_itl_ms": round(itl - engine_itl, 3),
            "itl_ms": round(itl, 3),
            "engine_itl_ms": round(engine_itl, 3),
        }
    )


if __name__ == "__main__":
    main()
