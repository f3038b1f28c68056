"""A program that generates text without asyncio: it waits for an engine in another process."""

from aioserve import EngineConfig, EngineProcess, SamplingParams
from aioserve.errors import EngineOverloadedError, PromptsFailedError

with EngineProcess(EngineConfig()) as engine:
    try:
        for output in engine.generate_all(["a", [1, 2]], SamplingParams(max_tokens=4)):
            print(output.text, output.times.to_first_token)
    except PromptsFailedError as failed:
        print([result.text for result in failed.results if not isinstance(result, Exception)])
    except EngineOverloadedError as error:
        print(error.retry_after + 1.0)
