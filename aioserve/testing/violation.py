"""The error of the kit. Knows nothing about what was violated; the message says that."""


class ContractViolation(AssertionError):
    """A scheduler broke a rule; the message names the rule, the step and the request."""
