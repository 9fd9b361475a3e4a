"""Events that wait, as fewer ones that say the same."""

from collections.abc import Iterable, Sequence
from itertools import chain, groupby
from typing import cast

import numpy as np

from worker.messages import Event, Heartbeat, StepOutput

# Of steps in one message, so that none takes its receiver long.
_MOST_MERGED = 256


def merged(events: Iterable[Event]) -> list[Event]:
    """In their order; steps in a row become one, and of signs of life the last is left."""
    result: list[Event] = []
    for kind, group in groupby(events, type):
        if kind is StepOutput:
            outputs = cast(list[StepOutput], list(group))
            for begin in range(0, len(outputs), _MOST_MERGED):
                result.append(_joined(outputs[begin : begin + _MOST_MERGED]))
        elif kind is Heartbeat:
            *_, last = group
            result.append(last)
        else:
            result.extend(group)
    return result


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
