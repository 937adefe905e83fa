"""generate's streamer, for an adapter's clock."""

from __future__ import annotations

from adapter import Clock


class Arrivals:
    """First gets the prompt, then each token as soon as it is chosen."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.has_prompt = False

    def put(self, _: object) -> None:
        if self.has_prompt:
            self.clock.token()
        self.has_prompt = True

    def end(self) -> None:
        pass
