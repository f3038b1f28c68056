"""What every session needs: an agent of each library, over each wire format that it speaks."""

import pytest

#: The classes of each driver's module.
FORMATS = {
    "openai_agents": ("OverChat", "OverResponses", "OverStoredResponses"),
    "pydantic_ai": ("OverChat", "OverResponses", "OverStoredResponses", "OverMessages"),
    "langgraph": ("OverChat", "OverResponses", "OverStoredResponses", "OverMessages"),
    "smolagents": ("OverChat",),
}


@pytest.fixture(params=[f"{name}-{form}" for name, forms in FORMATS.items() for form in forms])
def driver_of(request):
    """The class of an agent. Skips where its library is not installed."""
    name, _, form = request.param.partition("-")
    module = pytest.importorskip(f"{name}_driver", reason="make test-clients installs it")
    return getattr(module, form)
