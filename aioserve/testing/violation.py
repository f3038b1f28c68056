"""The errors of the kit. Know nothing about what was violated; the message says that."""


class ContractViolation(AssertionError):
    """A scheduler broke a rule; the message names the rule, the step and the request."""


class FormatViolation(AssertionError):
    """A format of replies broke a rule; the message names the rule and the text."""


class RouterViolation(AssertionError):
    """A router broke a rule; the message names the rule, and a replica or request."""


class Starvation(ContractViolation):
    """A request is never served, or never to its end."""


class HashOrder(ContractViolation):
    """The same events give other plans in a process where strings have other hashes."""


class NoReturn(ContractViolation):
    """A call of the policy did not come back in its time: it was ended from outside."""
