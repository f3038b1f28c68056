"""Sessions through LiteLLM's proxy, which asks the server over chat completions and responses."""

import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

pytest.importorskip("agent_session", reason="make test-clients installs it")

from agent_session import (
    ANSWER,
    FIRST,
    LATER,
    SECOND,
    THOUGHT,
    check_order,
    first_script,
    second_script,
)

LITELLM = Path(sys.prefix).parent / "clients" / "bin" / "litellm"
CONFIG = """
model_list:
  - model_name: embedded
    litellm_params: {{model: hosted_vllm/embedded, api_base: {url}/v1, api_key: none}}
general_settings: {{dangerously_permit_weak_or_unset_master_key: true}}
"""


@pytest.fixture(scope="session")
def proxied(scripted_for_agents, tmp_path_factory):
    """The URL of a proxy before the scripted model, which is the other part."""
    if not LITELLM.exists():
        pytest.skip("make test-clients installs it")
    url, say = scripted_for_agents
    config = tmp_path_factory.mktemp("proxy") / "config.yaml"
    config.write_text(CONFIG.format(url=url))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    where = ("--host", "127.0.0.1", "--port", port)
    command = [str(LITELLM), "--config", str(config), *where, "--telemetry", "False"]
    log = config.with_suffix(".log")
    with (
        log.open("w") as output,
        subprocess.Popen(command, stdout=output, stderr=output) as process,
    ):
        try:
            while not is_up(f"http://127.0.0.1:{port}/health/liveliness"):
                assert process.poll() is None, log.read_text()
                time.sleep(0.2)
            yield f"http://127.0.0.1:{port}", say
        finally:
            process.kill()


def is_up(url):
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except (urllib.error.URLError, TimeoutError):
        return False


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
async def test_a_session_through_a_proxy_is_as_without_one(proxied, driver_of, is_streamed):
    url, say = proxied
    agent = driver_of(url)
    say(*first_script(agent))
    assert ANSWER in await agent.told(FIRST, is_streamed=is_streamed)
    later = agent.resumed()
    say(*second_script(later))
    assert LATER in await later.told(SECOND, is_streamed=is_streamed)
    thought = THOUGHT if agent.hands_back_reasoning else ""
    told = [FIRST, thought, "rain in Paris", "rain in Rome", ANSWER, SECOND, "rain in Oslo"]
    check_order(told, say.prompts()[-1])
