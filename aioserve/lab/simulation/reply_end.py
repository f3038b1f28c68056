"""How a reply ends in the lab: as it does in life, by an end token that only the runner foresees.

The simulated runner is told the true lengths; a real one is wrapped, and its tokens are changed so
that replies end where the workload says. The engine and its policy learn an end when it comes.
"""

import asyncio
from collections.abc import Collection, Mapping

from aioserve.lab.simulation.delegating_runner import DelegatingRunner
from aioserve.model_info import ModelInfo
from aioserve.outputs import ModelRunnerOutput
from aioserve.runner.interface import RunnerInterface
from aioserve.scheduler.output import SchedulerOutput


def extra_stop_ids(model_info: ModelInfo) -> tuple[int, ...]:
    """The token that ends replies of a model that states no end token: the last of its ids."""
    return () if model_info.eos_token_ids else (model_info.vocab_size - 1,)


class ReplyEndRunner(DelegatingRunner):
    """Passes steps on to a real runner and changes what it sampled: the last token of a reply is an
    end token, and no token before it is one.

    The runner itself goes on from the token that it sampled: one id of a text is another, which
    changes no shape and no time.
    """

    def __init__(
        self,
        runner: RunnerInterface,
        output_tokens: Mapping[str, int],
        end_token_ids: Collection[int],
    ) -> None:
        """`output_tokens` is the length of each reply by request id; other requests are left as
        they are. `end_token_ids` are those of the model, at least one.
        """
        super().__init__(runner)
        self._output_tokens = output_tokens
        self._end_token_ids = frozenset(end_token_ids)
        self._end_token_id = min(end_token_ids)
        self._plain_token_id = next(i for i in range(2**31) if i not in self._end_token_ids)
        self._num_prompt: dict[str, int] = {}  # tokens, of the requests in the batch

    def execute_model(
        self, scheduler_output: SchedulerOutput
    ) -> "asyncio.Future[ModelRunnerOutput]":
        first_places = self._note(scheduler_output)
        sampled = super().execute_model(scheduler_output)
        ended: asyncio.Future[ModelRunnerOutput] = sampled.get_loop().create_future()

        def pass_on(future: "asyncio.Future[ModelRunnerOutput]") -> None:
            if ended.done():
                return
            if future.cancelled():
                ended.cancel()
            elif (error := future.exception()) is not None:
                ended.set_exception(error)
            else:
                output = future.result()
                for request_id, token_ids in zip(
                    output.req_ids, output.sampled_token_ids, strict=True
                ):
                    if token_ids and (place := first_places.get(request_id)) is not None:
                        self._end(token_ids, self._output_tokens[request_id] - place)
                ended.set_result(output)

        sampled.add_done_callback(pass_on)
        return ended

    def _note(self, scheduler_output: SchedulerOutput) -> dict[str, int]:
        """The place in its reply of the first token that each row of the step may sample."""
        for request_id in scheduler_output.finished_req_ids:
            self._num_prompt.pop(request_id, None)
        computed: dict[str, int] = {}
        for new in scheduler_output.scheduled_new_reqs:
            computed[new.request_id] = new.num_computed_tokens
            if new.request_id in self._output_tokens:
                self._num_prompt[new.request_id] = new.num_prompt_tokens
        cached = scheduler_output.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        drafts = scheduler_output.scheduled_spec_decode_tokens
        return {
            request_id: computed[request_id]
            + num_tokens
            - len(drafts.get(request_id, ()))
            - self._num_prompt[request_id]
            for request_id, num_tokens in scheduler_output.num_scheduled_tokens.items()
            if request_id in self._num_prompt
        }

    def _end(self, token_ids: list[int], num_left: int) -> None:
        """Let the reply, which has `num_left` tokens to come, end there and not before."""
        for i, token_id in enumerate(token_ids):
            if i == num_left - 1:
                token_ids[i] = self._end_token_id
            elif token_id in self._end_token_ids:
                token_ids[i] = self._plain_token_id
