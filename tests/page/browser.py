"""A headless Chromium, driven by its DevTools protocol over a websocket: no driver in between.

Knows a page's JavaScript; knows nothing about what the page shows.
"""

import asyncio
import base64
import itertools
import json
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
SECONDS = 60.0  # until something that has to come counts as missing: the machine may be busy

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-port=0",
)


class Tab:
    """One page of a browser."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.problems: list[str] = []  # what the page raised, logged as an error, or was refused
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._reader = asyncio.create_task(self._read())

    async def call(self, method: str, **params: Any) -> Any:
        """A command of the protocol."""
        number = next(self._numbers)
        self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        async with asyncio.timeout(SECONDS):
            answer = await self._answers[number]
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    async def run(self, code: str) -> Any:
        """The value of an expression, which may be a promise. Raises what it does."""
        answer = await self.call(
            "Runtime.evaluate",
            expression=code,
            awaitPromise=True,
            returnByValue=True,
            userGesture=True,
        )
        if "exceptionDetails" in answer:
            raise AssertionError(f"{code}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    async def until(self, code: str) -> Any:
        """Wait until an expression is true; its value."""
        try:
            async with asyncio.timeout(SECONDS):
                while not (value := await self.run(code)):  # noqa: ASYNC110 - another process
                    await asyncio.sleep(0.05)
        except TimeoutError:
            text = await self.run("document.body.innerText")
            raise AssertionError(f"never true: {code}\n{self.problems}\n{text}") from None
        return value

    async def go(self, url: str) -> None:
        """Open it, and wait until it is loaded."""
        await self.call("Page.navigate", url=url)
        await self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    async def type(self, text: str) -> None:
        """Into what has the focus."""
        await self.call("Input.insertText", text=text)

    async def press(self, key: str, code: int) -> None:
        """A key, by its name and its number on Windows."""
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            await self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=code,
                **(text if kind == "keyDown" else {}),
            )

    async def shape(self, width: int, height: int, *, is_phone: bool = False) -> None:
        """The size of the window, in CSS pixels."""
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=is_phone,
        )

    async def prefer(self, **features: str) -> None:
        """What media queries say, as `prefers-color-scheme`, with underscores."""
        listed = [{"name": k.replace("_", "-"), "value": v} for k, v in features.items()]
        await self.call("Emulation.setEmulatedMedia", features=listed)

    async def picture(self) -> bytes:
        """What there is to see, as a PNG."""
        answer = await self.call("Page.captureScreenshot", format="png")
        return base64.b64decode(answer["data"])

    async def close(self) -> None:
        self._reader.cancel()
        with suppress(asyncio.CancelledError):
            await self._reader
        await self._socket.close()

    async def _read(self) -> None:
        async for message in self._socket:
            said = json.loads(message.data)
            if "id" in said:
                future = self._answers.pop(said["id"])
                if not future.done():
                    future.set_result(said)
                continue
            match said["method"]:
                case "Runtime.exceptionThrown":
                    details = said["params"]["exceptionDetails"]
                    self.problems.append(str(details.get("exception", details)))
                case "Log.entryAdded" if said["params"]["entry"]["level"] == "error":
                    self.problems.append(str(said["params"]["entry"]))


class Browser:
    """A running one."""

    def __init__(self, address: str, session: aiohttp.ClientSession) -> None:
        self._address = address
        self._session = session

    @asynccontextmanager
    async def tab(self, url: str) -> AsyncIterator[Tab]:
        """A new one; closed after the block."""
        async with self._session.put(f"{self._address}/json/new?about:blank") as response:
            target = await response.json(content_type=None)
        socket = await self._session.ws_connect(
            target["webSocketDebuggerUrl"], max_msg_size=0, heartbeat=None
        )
        tab = Tab(socket)
        try:
            for domain in ("Page", "Runtime", "Log"):
                await tab.call(f"{domain}.enable")
            await tab.call("Emulation.setFocusEmulationEnabled", enabled=True)
            await tab.go(url)
            yield tab
        finally:
            await tab.close()
            async with self._session.get(f"{self._address}/json/close/{target['id']}"):
                pass


@asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    """A new one, without a history; ended after the block."""
    assert CHROMIUM is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        process = await asyncio.create_subprocess_exec(
            CHROMIUM,
            *FLAGS,
            f"--user-data-dir={folder}",
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            port_file = Path(folder) / "DevToolsActivePort"
            async with asyncio.timeout(SECONDS):
                while not (port_file.exists() and "\n" in port_file.read_text()):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            port = port_file.read_text().splitlines()[0]
            async with aiohttp.ClientSession() as session:
                yield Browser(f"http://127.0.0.1:{port}", session)
        finally:
            if process.returncode is None:
                process.terminate()
            await process.wait()
