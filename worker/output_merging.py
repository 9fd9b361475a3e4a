"""Events that wait, as fewer ones that say the same."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, groupby
from typing import cast

import numpy as np

from worker.messages import Event, Heartbeat, StepOutput

# Of steps in one message, and of their entries of log-probabilities, so that none takes its
# receiver long: at most 20 ms, and 2 MB of what a gateway is sent, unless one step has more.
_MOST_MERGED = 256
_MOST_LOGPROBS = 8192


def merged(events: Iterable[Event]) -> list[Event]:
    """In their order; steps in a row become one, and of signs of life the last is left."""
    result: list[Event] = []
    for kind, group in groupby(events, type):
        if kind is StepOutput:
            result.extend(map(_joined, _parted(cast(Iterable[StepOutput], group))))
        elif kind is Heartbeat:
            *_, last = group
            result.append(last)
        else:
            result.extend(group)
    return result


def _parted(outputs: Iterable[StepOutput]) -> Iterator[list[StepOutput]]:
    """In stretches that may be joined; one output that is too large is a stretch by itself."""
    stretch: list[StepOutput] = []
    num_logprobs = 0
    for output in outputs:
        its_logprobs = sum(len(part.uids) for part in output.logprobs)
        is_full = len(stretch) == _MOST_MERGED or num_logprobs + its_logprobs > _MOST_LOGPROBS
        if stretch and is_full:
            yield stretch
            stretch, num_logprobs = [], 0
        stretch.append(output)
        num_logprobs += its_logprobs
    yield stretch


def _joined(outputs: Sequence[StepOutput]) -> StepOutput:
    """Everything of all of them, each kind in order. Of merged steps the oldest tells the lag."""
    if len(outputs) == 1:
        return outputs[0]
    return StepOutput(
        uids=np.concatenate([output.uids for output in outputs]),
        token_ids=np.concatenate([output.token_ids for output in outputs]),
        started=tuple(chain.from_iterable(output.started for output in outputs)),
        finished=tuple(chain.from_iterable(output.finished for output in outputs)),
        failed=tuple(chain.from_iterable(output.failed for output in outputs)),
        load=outputs[-1].load,
        committed_at=next((o.committed_at for o in outputs if o.committed_at), 0.0),
        logprobs=tuple(chain.from_iterable(output.logprobs for output in outputs)),
    )
