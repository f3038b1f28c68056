"""A request that replicas share: split behind its prompt, migrated, or gone on with after a death.

Each replica begins after the tokens of the one before it. The reader's stream, its text, stop
strings and counts stay where they are, in the ingress. Knows seats and lines, as `Call` does.
"""

import asyncio
import logging
from typing import Any

import msgspec

from aioserve.errors import EngineDeadError
from aioserve.outputs import EngineCoreOutput, FinishReason
from aioserve.ray.call import Call
from aioserve.ray.chooser import AccountSeat, OwnChooser, Seat
from aioserve.ray.movable import Movable
from aioserve.request import RequestSpec
from aioserve.routing import RoutedRequest, Wait
from aioserve.workers.messages import Abort

logger = logging.getLogger(__name__)


def may_move(spec: RequestSpec) -> bool:
    """Whether replicas can share the request: one reply, of which there is a token at least."""
    params = spec.sampling_params
    return spec.pooling_params is None and params.n == 1 and params.max_tokens != 0


def prompt_part(spec: RequestSpec) -> RequestSpec:
    """The request up to its first token, which is sampled as the whole request's is."""
    params = spec.sampling_params
    params = msgspec.structs.replace(params, max_tokens=1, min_tokens=min(params.min_tokens, 1))
    return msgspec.structs.replace(spec, sampling_params=params)


class MovingCall(Call, Movable):
    """One request, of which the tokens are kept. To be made where `may_move`."""

    def __init__(self, chooser: OwnChooser, max_model_len: int, *arguments: Any) -> None:
        """`arguments` are those of `Call`, behind the chooser."""
        super().__init__(chooser, *arguments)
        self._mover = chooser
        params, room = self._spec.sampling_params, max_model_len - len(self._spec.prompt_token_ids)
        self._room = min(room, params.max_tokens or room)  # for tokens of its reply
        self._token_ids: list[int] = []  # of its reply, so far
        self._goes_on = False  # with them, at the next replica
        self._source = ""  # name of the replica that had it before
        #: The end behind which another replica goes on; None: the replica has all that is left.
        self._leaves_by: FinishReason | None = None
        self._next: list[str] = []  # names of replicas that are tried before the router is asked

    def move(self, name: str) -> bool:
        """Have the replica of this name go on with it. False if the request is at none that could
        give it up now, or the other one is not there.
        """
        seat = self._seat
        if seat is None or seat.line.calls.get(self.request_id) is not self:
            return False
        is_busy = self._is_over or self._is_aborted or self._leaves_by is not None
        if is_busy or seat.line.name == name or not self._mover.has_room(name, self._num_tokens):
            return False
        self._leaves_by = FinishReason.ABORT
        self._next = [name, seat.line.name]
        seat.line.end.say(Abort(self.request_id))
        return True

    @property
    def _num_tokens(self) -> int:
        return len(self._spec.prompt_token_ids) + len(self._token_ids)

    # What the line tells.

    def keep(self, output: EngineCoreOutput) -> bool:
        self._token_ids += output.new_token_ids
        return output.finish_reason is not None and output.finish_reason is self._leaves_by

    def has_left(self) -> None:
        seat = self._seat
        if self._is_over or seat is None:
            return  # a stop string was in its last tokens
        seat.line.calls.pop(self.request_id, None)
        if self._is_aborted:  # by its client, meanwhile
            self._finish(FinishReason.ABORT)
            return
        seat.has_started()
        self._source, self._leaves_by, self._goes_on = seat.line.name, None, True
        self._num_attempts = 0
        self._sending = asyncio.create_task(self._send_again(None))

    def lost(self, error: EngineDeadError) -> None:
        """What its reader has heard goes on elsewhere; all else begins anew."""
        if not self._is_told or self._is_aborted or self._seat is None:
            self._goes_on, self._leaves_by, self._next = False, None, []
            super().lost(error)
            return
        self._source, self._leaves_by, self._goes_on = self._seat.line.name, None, True
        self._next = [name for name in self._next if name != self._source]
        self._leave_seat()
        self._sending = asyncio.create_task(self._send_again(error))

    # How it is sent.

    async def _choose(self, request: RoutedRequest) -> Seat | Wait:
        while self._next and self._seat is not None:
            seat = self._mover.moved(self._seat, self._next.pop(0))
            if seat is not None:
                return seat
        if self._seat is not None:  # the account of the replica that had it
            self._seat.has_ended()
            self._seat = None
        choice = await super()._choose(request)
        if self._goes_on and isinstance(choice, AccountSeat) and choice.decode:
            return self._mover.moved(choice, choice.decode) or choice
        return choice

    async def _submit(self, seat: Seat) -> None:
        if self._goes_on:
            tokens = tuple(self._token_ids)
            spec = msgspec.structs.replace(self._spec, output_token_ids=tokens)
            await self._add(seat, spec, lambda: self._has_arrived(seat))
            return
        self._token_ids = []
        if isinstance(seat, AccountSeat) and seat.decode and self._room > 1:
            self._leaves_by = FinishReason.LENGTH
            self._next = [seat.decode, seat.line.name]
            await self._add(seat, prompt_part(self._spec), self._register, hands_over=True)
        else:
            await super()._submit(seat)

    def _has_arrived(self, seat: Seat) -> None:
        """A replica has accepted it with its tokens so far."""
        self._next = []
        self._mover.has_moved(self._source, seat)

    def _leave_seat(self) -> None:
        """The account stays open while there is another replica to move it to."""
        if self._goes_on and self._next and self._seat is not None:
            self._avoid.add(self._seat.line.name)
        else:
            self._leaves_by, self._next = None, []
            super()._leave_seat()

    def _check_again(self, error: Exception) -> None:
        if self._goes_on and self._next:
            logger.warning("%s goes on at another replica: %s", self.request_id, error)
        else:
            super()._check_again(error)
