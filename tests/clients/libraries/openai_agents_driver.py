"""The package openai-agents over both of its wire formats."""

import base64
import json

import openai
from agent_session import INSTRUCTIONS, PNG, TOOLS, Driver
from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    ToolOutputImage,
    function_tool,
)

QUIET = RunConfig(tracing_disabled=True)


@function_tool
def look() -> ToolOutputImage:
    """What the camera shows."""
    return ToolOutputImage(image_url=f"data:image/png;base64,{base64.b64encode(PNG).decode()}")


class OverChat(Driver):
    hands_back_reasoning = shows_images = False
    model_class = OpenAIChatCompletionsModel

    def __init__(self, url, model="embedded", output=None):
        self.url, self.history = url, []
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        self.agent = Agent(
            name="weather",
            instructions=INSTRUCTIONS,
            model=self.model_class(model=model, openai_client=client),
            tools=[] if output else [*(function_tool(tool) for tool in TOOLS), look],
            output_type=output,
        )

    def asked(self, prompt):
        messages = [*self.history, {"role": "user", "content": prompt}]
        return {"input": messages, "run_config": QUIET}

    def keep(self, result):
        self.history = json.loads(json.dumps(result.to_input_list()))

    async def ask(self, prompt):
        result = await Runner.run(self.agent, **self.asked(prompt))
        self.keep(result)
        return result.final_output

    async def stream(self, prompt):
        result = Runner.run_streamed(self.agent, **self.asked(prompt))
        try:
            async for event in result.stream_events():
                if event.type == "raw_response_event":
                    if event.data.type == "response.output_text.delta":
                        yield event.data.delta
        finally:
            result.cancel()
        self.keep(result)

    def resumed(self):
        other = type(self)(self.url)
        other.history = self.history
        return other


class OverResponses(OverChat):
    hands_back_reasoning = shows_images = True
    model_class = OpenAIResponsesModel


class OverStoredResponses(OverResponses):
    """The server keeps what was said."""

    def asked(self, prompt):
        before = {"previous_response_id": self.history or None, "auto_previous_response_id": True}
        return {"input": prompt, "run_config": QUIET, **before}

    def keep(self, result):
        self.history = result.last_response_id
