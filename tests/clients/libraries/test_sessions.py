"""Sessions of each library's agent, over each wire format: whole, streamed, left, resumed."""

import asyncio
import urllib.request

import pytest

# The folder is on the path where the clients are installed, and nowhere else.
pytest.importorskip("agent_session", reason="make test-clients installs it")

from agent_session import (
    ANSWER,
    FIRST,
    INSTRUCTIONS,
    LATER,
    SECOND,
    THOUGHT,
    Place,
    call,
    check_order,
    first_script,
    second_script,
)


def counted(url):
    """By name and labels: the metrics of the server."""
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return {
        name: float(value)
        for name, _, value in (line.rpartition(" ") for line in lines)
        if name[:1] != "#"
    }


async def until_idle(url):
    """The metrics once no request runs or waits."""
    while True:
        found = await asyncio.to_thread(counted, url)
        if not found["aioserve_num_requests_running"] + found["aioserve_num_requests_waiting"]:
            return found
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
async def test_a_session_calls_tools_and_goes_on_later(scripted_for_agents, driver_of, is_streamed):
    url, say = scripted_for_agents
    agent = driver_of(url)
    say(*first_script(agent))
    assert ANSWER in await agent.told(FIRST, is_streamed=is_streamed)
    asked = say.prompts()
    assert len(asked) == 3
    thought = THOUGHT if agent.hands_back_reasoning else ""
    words = agent.words.strip()
    said = [INSTRUCTIONS, FIRST, thought, words, "Paris", "rain in Paris", "Rome", "rain in Rome"]
    check_order(said, asked[-1])
    assert asked[-1].count("the sum is 5") == 1
    later = agent.resumed()
    say(*second_script(later))
    assert LATER in await later.told(SECOND, is_streamed=is_streamed)
    asked = say.prompts()
    assert len(asked) == 2
    check_order([*said, ANSWER, SECOND, "Oslo", "rain in Oslo"], asked[-1])


async def test_a_stream_that_is_left_runs_no_longer_and_the_next_is_served(
    scripted_for_agents, driver_of
):
    url, say = scripted_for_agents
    agent = driver_of(url)
    aborted = 'aioserve_requests_finished_total{reason="abort"}'
    before = (await until_idle(url))[aborted]
    say(agent.says("plover " * 2000), slowdown=20)  # or the client would read without a pause
    await agent.leave(FIRST)
    assert (await until_idle(url))[aborted] == before + 1
    say(agent.says(ANSWER))
    assert ANSWER in await agent.told(SECOND, is_streamed=True)


async def test_an_image_that_a_tool_returns_reaches_the_model(scripted_that_sees, driver_of):
    if not driver_of.shows_images:
        pytest.skip("the library shows the model no images of tools")
    url, say = scripted_that_sees
    agent = driver_of(url)
    say(call("look"), ANSWER)
    assert await agent.ask(FIRST) == ANSWER
    check_order([FIRST, "tool_call", "<image>"], say.prompts()[-1])


async def test_an_answer_is_of_the_type_that_is_asked_for(model_url, driver_of):
    if not driver_of.has_outputs:
        pytest.skip("the library has no types of answers")
    answer = await driver_of(model_url, "smollm2", Place).ask("Where is it warm?")
    assert isinstance(answer, Place)
