"""An engine inside a FastAPI program: one process, one event loop, texts as they are made.

    pip install fastapi uvicorn
    uvicorn --app-dir examples fastapi_app:app --port 8010
    curl -N 'http://127.0.0.1:8010/say?prompt=To%20be'

A client that leaves ends its request; a full queue is a 503; the engine ends with the program.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, HTTPException
from fastapi.responses import StreamingResponse

from aioserve import AsyncEngine, EngineConfig, SamplingParams
from aioserve.errors import EngineOverloadedError, RequestError


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """The engine runs as long as the program does."""
    async with AsyncEngine(EngineConfig()) as app.state.engine:
        yield


app = FastAPI(lifespan=lifespan)


@app.get("/say")
async def say(prompt: str, max_tokens: int = 40) -> StreamingResponse:
    """The text that goes on from `prompt`, piece by piece."""
    engine: AsyncEngine = app.state.engine
    try:
        params = SamplingParams(max_tokens=max_tokens, temperature=0.7)
        outputs: Any = engine.generate(prompt, params)
        first = await anext(outputs)  # a refusal comes before there is an answer
    except EngineOverloadedError as error:
        raise HTTPException(503, str(error)) from error
    except RequestError as error:
        raise HTTPException(400, str(error)) from error

    async def pieces() -> AsyncIterator[str]:
        yield first.text
        async for output in outputs:
            yield output.text

    return StreamingResponse(pieces(), media_type="text/plain")
