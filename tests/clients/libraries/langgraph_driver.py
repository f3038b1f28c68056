"""LangGraph's agent, as LangChain makes it, over each of its wire formats."""

import base64

from agent_session import INSTRUCTIONS, PNG, TOOLS, Driver
from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy
from langchain_anthropic import ChatAnthropic
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver

THREAD = {"configurable": {"thread_id": "1"}}


def look() -> list[dict[str, str]]:
    """What the camera shows."""
    image = {"base64": base64.b64encode(PNG).decode(), "mime_type": "image/png"}
    return [{"type": "text", "text": "It shows:"}, {"type": "image", **image}]


class OverChat(Driver):
    uses_responses = is_stored = hands_back_reasoning = False

    def __init__(self, url, model="embedded", output=None, saved=None):
        self.url, self.saved = url, saved or InMemorySaver()
        self.agent = create_agent(
            self.model_of(url, model),
            [] if output else [*TOOLS, look],
            system_prompt=INSTRUCTIONS,
            response_format=ProviderStrategy(output) if output else None,
            checkpointer=self.saved,
        )

    def model_of(self, url, model):
        return ChatOpenAI(
            model=model,
            base_url=f"{url}/v1",
            api_key="none",
            max_retries=0,
            use_responses_api=self.uses_responses,
            use_previous_response_id=self.is_stored,
            reasoning={"summary": "auto"} if self.uses_responses else None,  # else it drops it
        )

    async def ask(self, prompt):
        asked = {"messages": [{"role": "user", "content": prompt}]}
        state = await self.agent.ainvoke(asked, THREAD)
        return state.get("structured_response") or state["messages"][-1].text

    async def stream(self, prompt):
        asked = {"messages": [{"role": "user", "content": prompt}]}
        async for piece, where in self.agent.astream(asked, THREAD, stream_mode="messages"):
            if where["langgraph_node"] == "model" and piece.text:
                yield piece.text

    def resumed(self):
        return type(self)(self.url, saved=self.saved)


class OverResponses(OverChat):
    uses_responses = hands_back_reasoning = True


class OverStoredResponses(OverResponses):
    """The server keeps what was said."""

    is_stored = True


class OverMessages(OverChat):
    hands_back_reasoning = True

    def model_of(self, url, model):
        where = {"base_url": url, "api_key": "none", "max_retries": 0}
        thinking = {"type": "enabled", "budget_tokens": 1024}
        return ChatAnthropic(model=model, max_tokens=4096, thinking=thinking, **where)
