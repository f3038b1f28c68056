"""Requests of which an ingress keeps the tokens, since another replica may go on with them.

Stands between a line and the delivery of what comes by it. Knows no replica.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping

import msgspec

from aioserve.outputs import EngineCoreOutput
from aioserve.workers.messages import ToWorker


class Movable(ABC):
    """A request whose replica may end its part before the reply is complete."""

    @abstractmethod
    def keep(self, output: EngineCoreOutput) -> bool:
        """Keep the tokens of an output. Whether its end is that of the replica's part alone."""

    @abstractmethod
    def has_left(self) -> None:
        """The replica has ended its part, and all tokens of it have been delivered."""


def keep_tokens(calls: Mapping[str, object], said: ToWorker) -> tuple[ToWorker, list[Movable]]:
    """What readers are to hear of `said`, and the requests that have left the replica by it;
    `calls` are the requests of the replica, by id.
    """
    left: list[Movable] = []
    outputs: list[EngineCoreOutput] = []
    for output in said.outputs:
        call = calls.get(output.request_id)
        if isinstance(call, Movable) and call.keep(output):
            left.append(call)
            if not output.new_token_ids:
                continue
            output = msgspec.structs.replace(output, finish_reason=None, stop_reason=None)
        outputs.append(output)
    return (msgspec.structs.replace(said, outputs=outputs) if left else said), left
