"""The package pydantic-ai over each of its three wire formats."""

from agent_session import INSTRUCTIONS, PNG, TOOLS, Driver
from pydantic_ai import (
    Agent,
    AgentRunResultEvent,
    BinaryContent,
    ModelMessagesTypeAdapter,
    NativeOutput,
    ToolOutput,
)
from pydantic_ai.messages import PartDeltaEvent, PartStartEvent, TextPart, TextPartDelta
from pydantic_ai.models.anthropic import AnthropicModel, AnthropicModelSettings
from pydantic_ai.models.openai import (
    OpenAIChatModel,
    OpenAIResponsesModel,
    OpenAIResponsesModelSettings,
)
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider


def look() -> BinaryContent:
    """What the camera shows."""
    return BinaryContent(PNG, media_type="image/png")


class OverChat(Driver):
    settings = None
    output_kind = NativeOutput

    def __init__(self, url, model="embedded", output=None):
        self.url, self.history = url, []
        self.agent = Agent(
            self.model_of(url, model),
            instructions=INSTRUCTIONS,
            tools=() if output else (*TOOLS, look),
            output_type=self.output_kind(output) if output else str,
        )
        if output:  # no call can be forced of a model that thinks
            self.settings = None

    def model_of(self, url, model):
        provider = OpenAIProvider(base_url=f"{url}/v1", api_key="none")
        return OpenAIChatModel(model, provider=provider)

    def asked(self):
        return {"message_history": self.history, "model_settings": self.settings}

    def keep(self, result):
        self.history = ModelMessagesTypeAdapter.validate_json(result.all_messages_json())

    async def ask(self, prompt):
        result = await self.agent.run(prompt, **self.asked())
        self.keep(result)
        return result.output

    async def stream(self, prompt):
        async with self.agent.run_stream_events(prompt, **self.asked()) as events:
            async for event in events:
                match event:
                    case PartStartEvent(part=TextPart(content=text)) if text:
                        yield text
                    case PartDeltaEvent(delta=TextPartDelta(content_delta=text)):
                        yield text
                    case AgentRunResultEvent(result=result):
                        self.keep(result)

    def resumed(self):
        other = type(self)(self.url)
        other.history = self.history
        return other


class OverResponses(OverChat):
    def model_of(self, url, model):
        provider = OpenAIProvider(base_url=f"{url}/v1", api_key="none")
        return OpenAIResponsesModel(model, provider=provider)


class OverStoredResponses(OverResponses):
    """The server keeps what was said."""

    settings = OpenAIResponsesModelSettings(openai_previous_response_id="auto")


class OverMessages(OverChat):
    settings = AnthropicModelSettings(anthropic_thinking={"type": "adaptive"})
    output_kind = ToolOutput

    def model_of(self, url, model):
        return AnthropicModel(model, provider=AnthropicProvider(base_url=url, api_key="none"))
