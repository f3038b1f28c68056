"""The package smolagents: its agent that calls tools, over chat completions."""

import asyncio
import gc
from contextlib import suppress

from agent_session import INSTRUCTIONS, TOOLS, Driver, call
from smolagents import ChatMessageStreamDelta, OpenAIModel, ToolCallingAgent, tool

END = object()


class OverChat(Driver):
    """Every reply must call a tool, the last one `final_answer`."""

    words = ""
    hands_back_reasoning = shows_images = has_outputs = False

    def __init__(self, url, model="embedded", output=None, memory=None):
        self.url = url
        self.agent = ToolCallingAgent(
            [tool(each) for each in TOOLS],
            OpenAIModel(model, api_base=f"{url}/v1", api_key="none"),
            instructions=INSTRUCTIONS,
            stream_outputs=True,
            verbosity_level=0,
        )
        if memory is not None:
            self.agent.memory = memory

    def says(self, text):
        return call("final_answer", answer=text)

    async def ask(self, prompt):
        self.agent.stream_outputs = False
        return await asyncio.to_thread(self.agent.run, prompt, reset=False)

    async def stream(self, prompt):
        self.agent.stream_outputs = True
        run = self.agent.run(prompt, stream=True, reset=False)
        try:
            while (event := await asyncio.to_thread(next, run, END)) is not END:
                if isinstance(event, ChatMessageStreamDelta):
                    for each in event.tool_calls or ():
                        if each.function and each.function.arguments:
                            yield each.function.arguments
        finally:
            with suppress(RuntimeError):  # closed, it yields once more
                run.close()
            del run
            gc.collect()  # it refers to itself, and holds the stream of the server

    def resumed(self):
        return type(self)(self.url, memory=self.agent.memory)
