"""What the process of a candidate does: rules of the contract, and plans for a simulation.

Each job takes the policy's class and returns plain data, or raises `Failed` with a story. Nothing
of a workload is here. A result of the contract comes from the process of the policy itself; what a
policy gains is measured in another one.
"""

from functools import cache

from aioserve.errors import AioserveError
from aioserve.lab.evaluate.enclosure import Failed
from aioserve.lab.evaluate.plans import serve_plans
from aioserve.scheduler import BaseScheduler, load_policy

PLANNING = serve_plans.__name__  # the job that talks over the line itself
#: Rules of the contract that are tried first: they take a second together, and most candidates that
#: break a rule break a rule of this list.
FIRST_RULES = (
    "test_every_request_ends_with_the_tokens_it_would_get_alone",
    "test_a_pool_for_exactly_one_request_serves_all",
    "test_stop_tokens_end_a_request_but_not_before_min_tokens",
    "test_a_deadline_ends_a_request_with_a_timeout",
    "test_a_shared_prefix_is_read_only_when_it_is_there",
    "test_a_promise_to_keep_decoding_is_kept",
    "test_no_plan_tells_how_long_a_reply_will_be",
    "test_no_plan_tells_how_long_the_replies_that_run_will_be",
    "test_offline_requests_get_what_others_leave",
    "test_a_request_that_is_turned_away_may_come_again",
    "test_admission_respects_declared_order",
    "test_time_and_chance_are_the_policys_own",
    "test_a_policy_looks_at_what_it_is_given_alone",
)
RANDOM_RULE = "test_no_rule_is_broken_under_random_traffic"
NOT_HERE = ("test_plans_are_the_same_in_every_process",)  # it starts two processes
MAX_STORY = 6000  # characters


def policy_of(module: str) -> type[BaseScheduler]:
    """Return the only policy of a module. Raises `Failed` if it has none, or cannot be imported."""
    try:
        found = load_policy(module)
    except AioserveError as error:
        raise Failed("failed", str(error)) from error
    if not issubclass(found, BaseScheduler):
        raise Failed("refused", f"{found.__name__} does not derive from BaseScheduler")
    return found


# The contract.


@cache
def rules() -> tuple[str, ...]:
    """Return the rules of the contract without random traffic, those that are tried first first."""
    from aioserve.testing.contract import PolicyContract

    found = [name for kind in PolicyContract.__mro__ for name in vars(kind)]
    apart = (*FIRST_RULES, RANDOM_RULE, *NOT_HERE)
    return (*FIRST_RULES, *(n for n in found if n.startswith("test_") and n not in apart))


def one_rule(policy: type[BaseScheduler]) -> None:
    """Try the first rule alone. Raises `Failed` if it is broken."""
    _check(policy, FIRST_RULES[0])


def first_rules(policy: type[BaseScheduler]) -> int:
    """Return how many rules of the contract were tried, those that fail soonest. Raises `Failed`
    for the first rule that is broken, with the story of it.
    """
    for name in FIRST_RULES:
        _check(policy, name)
    return len(FIRST_RULES)


def other_rules(policy: type[BaseScheduler]) -> int:
    """Return how many other rules of the contract were tried. Raises `Failed` as `first_rules`."""
    others = rules()[len(FIRST_RULES) :]
    for name in others:
        _check(policy, name)
    return len(others)


def random_traffic(policy: type[BaseScheduler], days: int) -> int:
    """Return how many random days were tried at each pipeline depth. Raises `Failed` for the first
    rule that is broken, with its story.
    """
    _check(policy, RANDOM_RULE, days)
    return days


def _check(policy: type[BaseScheduler], name: str, days: int = 1) -> None:
    from aioserve.testing.contract import PolicyContract, Subject
    from aioserve.testing.violation import ContractViolation

    subject = Subject(policy, max_examples=days, shrink=False)
    for depth in (1, 2):
        try:
            getattr(PolicyContract(), name)(subject, depth)
        except (ContractViolation, AioserveError) as error:
            raise Failed("broken", _story(name, error)) from error


def _story(name: str, error: Exception) -> str:
    lines = "\n".join([str(error), *getattr(error, "__notes__", [])]).splitlines()
    program = lines.index("To reproduce:") if "To reproduce:" in lines else len(lines)
    rule = name.removeprefix("test_").replace("_", " ")
    return "\n".join([f"Broken rule: {rule}", *lines[:program]])[:MAX_STORY]
