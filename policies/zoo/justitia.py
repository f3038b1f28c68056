"""Agents in the order in which fair sharing would complete them (Justitia, 2025).

Paper: Yang et al., "Justitia: Fair and Efficient Scheduling of Task-parallel LLM Agents with
Selective Pampering", 2025, arXiv 2510.17015.

Aim: agents end early, none much later than under fair sharing.

Says: an agent costs the memory that it holds over time: for each call the prompt times the steps,
and half the square of the reply. If all agents shared the memory equally, each would end at some
virtual time. The one that would end first gets all it can use: most end earlier, none much later.

Simplified: the cost of an agent is the mean of earlier ones of its client and class; the paper
predicts it from the prompt. An agent has ended after `idle_after` seconds without a request.

Cost: O(log n) for each request that enters a queue of n; constant per step.

Needs: agents (hint `program`, else `session`); helped by `slo_class`, `predicted_output_tokens`.
"""

from dataclasses import dataclass, field
from typing import Any

from aioserve.scheduler import (
    BaseScheduler,
    PolicyOptions,
    PositiveFloat,
    PositiveInt,
    Request,
    SchedulerOutput,
    hinted_number,
    hinted_text,
)

MAX_KINDS = 1024  # clients and classes whose costs are remembered, the latest


@dataclass
class Agent:
    """An agent that has requests, or had one a short time ago."""

    kind: tuple[str, str]  # its client and class
    tag: float  # the virtual time at which fair sharing would complete it
    cost: float = 0.0  # of its calls that ended, in KV tokens times steps
    ended: float = 0.0  # when its last request ended
    present: set[Request] = field(default_factory=set)  # that wait or run


class JustitiaScheduler(BaseScheduler):
    """Decodes, running prompts, then calls of the agent that fair sharing would complete first."""

    admits_in_order = "all"

    class Options(PolicyOptions):
        usual: PositiveFloat = 200.0  # tokens of a reply of which nothing is predicted
        usual_calls: PositiveFloat = 5.0  # calls of an agent of a kind that was never seen
        idle_after: PositiveFloat = 60.0  # seconds without a request that end an agent
        chunk_size: PositiveInt | None = None  # tokens per step (default: max_num_batched_tokens)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.virtual = 0.0  # memory over time that each agent would have had by now
        self.num_active = 0  # agents with requests
        self.agents: dict[tuple[str, str], Agent] = {}  # the one that ended longest ago first
        self.costs: dict[tuple[str, str], tuple[int, float]] = {}  # by kind: how many, their mean

    def order(self, request: Request) -> float:
        name = self.name(request)
        if (agent := self.agents.get(name)) is None:
            self.retire()
            kind = (request.user, hinted_text(request, "slo_class"))
            reply = hinted_number(request, "predicted_output_tokens", self.options.usual)
            guess = self.options.usual_calls * memory_time(request, reply)
            tag = self.virtual + self.costs.get(kind, (0, guess))[1]
            agent = self.agents[name] = Agent(kind, tag)
        self.num_active += not agent.present
        agent.present.add(request)
        return agent.tag

    def name(self, request: Request) -> tuple[str, str]:
        named = hinted_text(request, "program") or hinted_text(request, "session")
        return request.user, named or f"request {request.request_id}"

    def schedule(self) -> SchedulerOutput:
        step = self.new_step(self.options.chunk_size)
        for request in sorted(step.run_decodes(), key=lambda r: r.order_key):
            step.run(request)
        for request in self.waiting:
            if not step.admit(request):
                break
        if self.running:
            self.virtual += self.memory.total / max(self.num_active, 1)
        return step.output()

    def on_finish(self, request: Request, reason: str) -> None:
        name = self.name(request)
        agent = self.agents[name]
        agent.present.discard(request)
        agent.cost += memory_time(request, request.num_output_tokens)
        if not agent.present:
            self.num_active -= 1
            agent.ended = self.clock()
            self.agents[name] = self.agents.pop(name)  # as the last that ended

    def retire(self) -> None:
        """Learn from the agents that are over, and forget them."""
        over = self.clock() - self.options.idle_after
        while self.agents:
            name, agent = next(iter(self.agents.items()))
            if agent.present or agent.ended > over:
                break
            del self.agents[name]
            count, mean = self.costs.pop(agent.kind, (0, 0.0))
            self.costs[agent.kind] = (count + 1, mean + (agent.cost - mean) / (count + 1))
            if len(self.costs) > MAX_KINDS:
                del self.costs[next(iter(self.costs))]


def memory_time(request: Request, reply: float) -> float:
    """Return what a call holds until it has `reply` tokens, in KV tokens times steps."""
    return request.num_prompt_tokens * reply + reply * reply / 2
