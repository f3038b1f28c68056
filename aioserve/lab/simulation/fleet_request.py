"""The requests of a workload as a fleet's sender has them: for the engine, and for the router.

Knows how prompts are made. Knows no replica.
"""

import msgspec

from aioserve.lab.simulation.reply_end import extra_stop_ids
from aioserve.lab.simulation.stepped_engine import Blueprint
from aioserve.lab.workloads.workload import Workload, build_images, build_prompt
from aioserve.request import Request, RequestSpec
from aioserve.routing import RoutedRequest
from aioserve.sampling_params import SamplingParams


class Sent:
    """A request on its way to a replica."""

    __slots__ = ("avoid", "number", "request", "routed", "waits_since")

    def __init__(self, number: int, request: Request, routed: RoutedRequest) -> None:
        self.number = number  # in the workload
        self.request = request
        self.routed = routed
        self.avoid: set[str] = set()  # names of replicas that have failed it
        self.waits_since: float | None = None  # when the router first let it wait

    def has_failed_at(self, name: str) -> None:
        """The replica of this name was dead, or has died with it."""
        self.avoid.add(name)
        self.routed = msgspec.structs.replace(
            self.routed, num_attempts=self.routed.num_attempts + 1
        )

    def has_expired(self, now: float) -> bool:
        """Whether its deadline has passed while it waited for the router."""
        deadline = self.routed.deadline
        return self.waits_since is not None and deadline is not None and now >= deadline


class RoutedRequests:
    """Makes the requests of a workload, as they are sent."""

    def __init__(self, blueprint: Blueprint, workload: Workload, *, with_hashes: bool) -> None:
        self._workload = workload
        self._info = blueprint.model_info
        self._hasher = blueprint.make_kv_cache()  # an empty one: only hashes are wanted
        self._with_hashes = with_hashes
        self._max_tokens = workload.max_tokens(blueprint.max_request_tokens)
        self._stop_token_ids = extra_stop_ids(self._info)
        #: Token ids of replies that later prompts hold, by the number of the request.
        self.replies: dict[int, list[int]] = {}

    def make(self, i: int, arrival: float, num_attempts: int = 0) -> Sent:
        """Request number `i`, anew each time; `num_attempts` replicas have lost it."""
        asked = self._workload.requests[i]
        spec = RequestSpec(
            str(i),
            build_prompt(asked, self._info.vocab_size, self.replies),
            SamplingParams(
                max_tokens=self._max_tokens[i],
                stop_token_ids=self._stop_token_ids,
                temperature=0,
                detokenize=False,
            ),
            arrival_time=arrival,
            eos_token_ids=self._info.eos_token_ids,
            priority=asked.priority,
            user=asked.user,
            hints=asked.all_hints,
            encoder_inputs=build_images(asked),
            deadline=None if asked.timeout is None else arrival + asked.timeout,
            adapter_id=asked.adapter,
        )
        request = Request(spec)
        if self._with_hashes:
            self._hasher.estimate_cached_tokens(request)  # which leaves it with its hashes
        routed = RoutedRequest(
            request_id=spec.request_id,
            num_tokens=request.num_tokens,
            max_tokens=self._max_tokens[i],
            arrival_time=arrival,
            deadline=spec.deadline,
            user=spec.user,
            priority=spec.priority,
            session=f"{asked.session} {asked.crowd}" if asked.session >= 0 else "",
            adapter=asked.adapter,
            hints=spec.hints,
            block_hashes=request.block_hashes,
            block_size=self._hasher.block_size,
            num_attempts=num_attempts,
        )
        return Sent(i, request, routed)
