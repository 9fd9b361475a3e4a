"""One generation over all its attempts: what to send, what to show, what to try again. Pure."""

import uuid

from shared.pb.tandem.v1 import inference_pb2 as pb
from tandem_client.answers import event_of
from tandem_client.errors import TandemError
from tandem_client.events import Event, Started
from tandem_client.options import GenerateOptions, Prompt
from tandem_client.requests import generate_request
from tandem_client.retries import Attempts


class Generation:
    """The state of one stream, whichever way its messages travel."""

    def __init__(
        self, prompt: Prompt, n: int, options: GenerateOptions, attempts: Attempts
    ) -> None:
        # Ours rather than the server's, so that it is known from the beginning and stays the
        # same when the request is sent again.
        self.request_id = options.get("request_id") or uuid.uuid4().hex
        self.request = generate_request(prompt, self.request_id, n, options)
        self._attempts = attempts
        self._started: set[int] = set()
        self._has_text = False

    def remaining_s(self) -> float | None:
        """What the next attempt may take; None: as long as it takes."""
        return self._attempts.remaining_s()

    def take(self, response: pb.GenerateStreamResponse) -> Event | None:
        """The event to show, if this message makes one."""
        event = event_of(response)
        if isinstance(event, Started):
            # A second attempt starts anew; its caller has heard of that.
            if event.index in self._started:
                return None
            self._started.add(event.index)
        elif event is not None:
            self._has_text = True
        return event

    def wait_s(self, error: TandemError) -> float | None:
        """How long to wait before the request is sent again; None when the error is final."""
        # Another attempt might sample other text than what was shown.
        return None if self._has_text else self._attempts.wait_s(error)
