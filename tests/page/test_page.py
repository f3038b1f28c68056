"""The page in a real browser, before a real server: `make test-page`."""

import asyncio
from collections import Counter
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from aioserve.config import (
    AccessConfig,
    CacheConfig,
    EngineConfig,
    RunnerConfig,
    SchedulerConfig,
    ServerConfig,
    ShadowConfig,
)
from aioserve.engine.live_feed import shown_id
from tests.server.serving import running

CONFIG = EngineConfig(
    runner=RunnerConfig(runner="simulated", step_base_ms=5),
    scheduler=SchedulerConfig(policy="chunked_prefill", options={"chunk_size": 64}),
    server=ServerConfig(enable_admin=True),
)
TOOL_PAUSES = f"{Path(__file__).parents[2]}/examples/recipes/tool_pauses.py:ToolPausesScheduler"
LIVE = "document.getElementById('connection').textContent === 'live'"

SHADOW = "document.getElementById('shadow').innerText"
WORDS = "document.getElementById('report-words').textContent"


def text_of(name):
    return f"document.getElementById('{name}').innerText"


@asynccontextmanager
async def page(browser, **sections):
    """A server with these settings, and its page, which raised and logged nothing wrong."""
    config = msgspec.structs.replace(CONFIG, **sections)
    async with running(config) as server, browser.tab(server.url) as tab:
        await tab.until(LIVE)
        yield server, tab
        assert tab.problems == []


async def click(tab, name):
    await tab.run(f"document.getElementById('{name}').click()")


async def choose_policy(tab, name):
    await tab.run(
        "(() => { const select = document.getElementById('policies');"
        f" select.value = '{name}'; select.dispatchEvent(new Event('change')); }})()"
    )


async def ask(tab, text):
    await tab.run("document.getElementById('prompt').focus()")
    await tab.type(text)
    await tab.press("Enter", 13)


async def test_a_prompt_is_typed_and_its_tokens_come_coloured_by_their_steps(browser):
    async with page(browser) as (_, tab):
        assert await tab.until("!document.getElementById('empty').hidden")
        await tab.run("document.getElementById('max-tokens').value = '64'")
        await ask(tab, "What news, my lord?")
        # Its lane appears while it runs.
        await tab.until(
            "aioserve.now.lanes.shown.flat().some((life) => life.id.startsWith('page-'))"
        )
        await tab.until(f"/^The reply/.test({text_of('chat-status')})")
        await tab.until("document.querySelectorAll('#talk .token[data-step]').length > 3")
        tokens = "[...document.querySelectorAll('#talk .token')]"
        await tab.until(f"{tokens}.every((token) => token.dataset.step)")
        steps = await tab.run(f"{tokens}.map((token) => Number(token.dataset.step))")
        assert steps == sorted(steps)
        [life] = await tab.run("[...aioserve.story.lives.values()].map((life) => life.output)")
        reply = await tab.run(f"{tokens}.map((token) => token.textContent).join('')")
        assert reply.strip()
        assert life == 64
        assert "was cut after 64 tokens" in await tab.run(text_of("chat-status"))
        assert "What news, my lord?" in await tab.run(text_of("talk"))
        classes = await tab.run(f"{tokens}.map((token) => token.className)")
        assert classes == [f"token s{step % 6}" for step in steps]
        await tab.run(f"{tokens}[1].click()")
        assert f"step {steps[1]}" in await tab.run(text_of("token"))
        # And leaves, when it has moved out of the window.
        await tab.run("document.getElementById('window').value = '2'")
        await tab.until("!document.getElementById('empty').hidden")


async def test_one_button_brings_sixty_requests_of_mixed_kinds(browser):
    async with page(browser) as (_, tab):
        words = await tab.until(text_of("empty"))
        assert "python -m aioserve chat" in words
        assert await tab.run("document.getElementById('base-url').textContent") in words
        await tab.run("document.querySelector('#empty .traffic').click()")
        await tab.until("aioserve.story.lives.size === 60")
        await tab.until("[...aioserve.story.lives.values()].every((life) => life.end !== null)")
        ended = await tab.run(
            "[...aioserve.story.lives.values()].map((life) => [life.user, life.finish])"
        )
        kinds = Counter(user for user, _ in ended)
        assert kinds == {
            "long replies": 16,
            "short questions": 24,
            "long prompts": 12,
            "leave early": 8,
        }
        assert {user for user, finish in ended if finish == "abort"} == {"leave early"}
        await tab.until(f"/60 requests were sent and have ended/.test({text_of('traffic-status')})")
        # The picture rests on them, from the first to the last, and they can still be seen.
        await tab.until("!aioserve.now.view().isMoving")
        assert await tab.run("aioserve.now.lanes.shown.flat().length") == 60
        assert not await tab.run("document.getElementById('empty').checkVisibility()")


async def test_sixty_requests_can_be_stopped(browser):
    runner = msgspec.structs.replace(CONFIG.runner, step_base_ms=200)
    async with page(browser, runner=runner) as (_, tab):
        await tab.run("document.querySelector('#empty .traffic').click()")
        await tab.until("aioserve.story.gauges?.num_running > 0")
        await tab.run("document.querySelector('.traffic').click()")
        await tab.until(f"/Stopped/.test({text_of('traffic-status')})")
        await tab.until("[...aioserve.story.lives.values()].every((life) => life.end !== null)")
        assert await tab.run("aioserve.story.lives.size") < 60


async def test_a_reply_of_milliseconds_fills_the_picture_when_all_is_quiet(browser):
    runner = msgspec.structs.replace(CONFIG.runner, step_base_ms=1)
    async with page(browser, runner=runner) as (server, tab):
        await server.complete(max_tokens=20, ignore_eos=True)  # at least as many milliseconds
        await tab.until("aioserve.story.lives.size && !aioserve.now.view().isMoving")
        share = await tab.run(
            "(() => { const [life] = aioserve.story.lives.values();"
            " return (life.end - life.arrival) / aioserve.now.view().window; })()"
        )
        assert 0.5 < share <= 1
        labels = "aioserve.now.view().ticks.map(({ label }) => label)"
        first, *others = await tab.run(labels)
        assert first == ""  # the time of day has this place
        assert others
        assert all(label.endswith(" ms") for label in others)
        await tab.run("document.getElementById('window').value = '2'")  # which moves, and is over
        await tab.until("aioserve.now.view().isMoving")
        moving = await tab.run(labels)
        assert moving[0] == "now"
        assert moving[1].startswith("\N{MINUS SIGN}0.")
        await tab.until("!document.getElementById('empty').hidden")
        assert "No request in these seconds" in await tab.run(text_of("empty"))


async def test_a_reply_is_stopped_and_the_server_hears_of_it(browser):
    async with page(browser) as (_, tab):
        await tab.run("document.getElementById('max-tokens').value = '3000'")
        await ask(tab, "Go on")
        await tab.until("document.querySelectorAll('#talk .token').length > 3")
        await click(tab, "send")
        await tab.until(f"{text_of('chat-status')} === 'Stopped.'")
        await tab.until(
            "[...aioserve.story.lives.values()].every((life) => life.finish === 'abort')"
        )


# Notes what the chat asks for; replies with these deltas where there are any.
TAP = """(() => {
  const real = window.fetch;
  window.asked = [];
  window.deltas = null;
  window.fetch = (path, options) => {
    if (!String(path).startsWith("v1/chat")) return real(path, options);
    window.asked.push(JSON.parse(options.body));
    if (!window.deltas) return real(path, options);
    const events = window.deltas.map((delta, i) => "data: " + JSON.stringify({ choices: [{
      delta, finish_reason: i === window.deltas.length - 1 ? "stop" : null }] }) + "\\n\\n");
    return Promise.resolve(new Response(events.join("")));
  };
})()"""


async def test_the_chat_leaves_sampling_to_the_server_unless_it_is_told(browser):
    async with page(browser) as (_, tab):
        await tab.run(TAP)
        await tab.run("document.getElementById('max-tokens').value = '3'")
        await ask(tab, "First")
        await tab.until(f"/^The reply was cut after 3 tokens/.test({text_of('chat-status')})")
        await tab.run("document.getElementById('temperature').value = '0.3'")
        await ask(tab, "Second")
        await tab.until("asked.length === 2 && !aioserve.chat.running")
        first, second = await tab.run("asked")
        assert not first.keys() & {"temperature", "top_p", "top_k"}
        assert second["temperature"] == 0.3


async def test_thoughts_are_shown_and_stay_out_of_the_history(browser):
    async with page(browser) as (_, tab):
        await tab.run(TAP)
        await tab.run(
            "deltas = [{reasoning_content: 'Hm, a '}, {reasoning_content: 'greeting.'},"
            " {content: '**Hel'}, {content: 'lo** you.'}]"
        )
        await ask(tab, "Hi")
        await tab.until(f"{text_of('chat-status')} === 'The reply is complete.'")
        assert "Hm, a greeting." in await tab.run(text_of("talk"))
        assert await tab.run("document.querySelectorAll('#talk .thought').length") == 2
        bold = "[...document.querySelectorAll('#talk .md-strong')].map((n) => n.innerText).join('')"
        assert await tab.run(bold) == "Hello"
        assert "**" not in await tab.run(text_of("talk"))
        await ask(tab, "And?")
        await tab.until("asked.length === 2 && !aioserve.chat.running")
        assert await tab.run("asked[1].messages") == [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "**Hello** you."},
            {"role": "user", "content": "And?"},
        ]


async def test_a_message_is_edited_and_a_reply_made_again(browser):
    async with page(browser) as (_, tab):
        await tab.run(TAP)
        await tab.run("deltas = [{content: 'One.'}]")
        await ask(tab, "Hi")
        await tab.until("asked.length === 1 && !aioserve.chat.running")
        await ask(tab, "And?")
        await tab.until("asked.length === 2 && !aioserve.chat.running")
        buttons = "[...document.querySelectorAll('#talk .actions button')]"
        words = await tab.run(f"{buttons}.map((button) => button.textContent)")
        assert words == ["Edit", "Again", "Edit", "Again"]
        await tab.run("deltas = [{content: 'Two.'}]")
        await tab.run(f"{buttons}[1].click()")
        await tab.until("asked.length === 3 && !aioserve.chat.running")
        assert await tab.run("asked[2].messages") == [{"role": "user", "content": "Hi"}]
        assert await tab.run("aioserve.chat.messages.at(-1).content") == "Two."
        assert "One." not in await tab.run(text_of("talk"))
        await tab.run(f"{buttons}[0].click()")
        assert await tab.run("document.getElementById('prompt').value") == "Hi"
        assert await tab.run("aioserve.chat.messages.length") == 0


async def test_what_looks_like_html_in_a_reply_stays_text(browser):
    async with page(browser) as (_, tab):
        await tab.run(TAP)
        await tab.run("deltas = [{content: '`<img src=x onerror=alert(1)>` <b>x</b>'}]")
        await ask(tab, "Hi")
        await tab.until(f"{text_of('chat-status')} === 'The reply is complete.'")
        assert await tab.run("document.querySelectorAll('#talk img, #talk b').length") == 0
        assert "<b>x</b>" in await tab.run(text_of("talk"))


async def test_the_limit_of_a_step_is_that_of_the_policy(browser):
    async with page(browser) as (server, tab):
        await server.complete([5] * 200, max_tokens=3, ignore_eos=True)
        await tab.until(f"/of at most 64$/.test({text_of('step-title')})")


async def test_a_simulated_server_says_so(browser):
    async with page(browser) as (_, tab):
        assert "no model computes" in await tab.until(text_of("simulated"))


async def test_the_policy_is_switched_and_a_bad_option_is_said(browser):
    async with page(browser) as (server, tab):
        await tab.until(f"{text_of('policy')} === 'chunked_prefill'")
        await choose_policy(tab, "chunked_prefill")
        chunk = "document.querySelector('#option-fields [name=chunk_size]')"
        assert not await tab.run("document.getElementById('options').checkVisibility()")
        assert await tab.run(f"{chunk}.value") == "64"  # as it is
        assert await tab.run(f"{chunk}.placeholder") == "512"  # by default
        assert "tokens per step" in await tab.run(f"{chunk}.closest('label').title")
        await tab.run(f"{chunk}.value = 'x'")
        await click(tab, "do-switch")
        await tab.until(f"/chunk_size/.test({text_of('switch-status')})")
        tab.problems.clear()  # a browser logs every 400
        await tab.run(f"{chunk}.value = '128'")
        await click(tab, "do-switch")
        await tab.until("aioserve.story.about.options.chunk_size === 128")
        assert server.engine.config.scheduler.options == {"chunk_size": 128}
        await choose_policy(tab, "fcfs")
        assert await tab.run("document.getElementById('options').value") == ""
        assert await tab.run("document.getElementById('options').checkVisibility()")
        await click(tab, "do-switch")
        await tab.until(f"{text_of('policy')} === 'fcfs'")
        assert server.engine.config.scheduler.policy == "fcfs"
        assert "before, it was chunked_prefill" in await tab.run(text_of("switch-status"))


async def test_a_policy_of_a_file_takes_over(browser, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("from aioserve.policies.fcfs import FCFSScheduler\n")
    async with page(browser) as (server, tab):
        assert not await tab.run("document.getElementById('policy-file').checkVisibility()")
        await choose_policy(tab, "")
        await tab.run("document.getElementById('policy-file').focus()")
        await tab.type(f"{path}:FCFSScheduler")
        await tab.run("document.getElementById('options').value = 'x'")
        await click(tab, "do-switch")
        await tab.until(f"/must be a JSON object/.test({text_of('switch-status')})")
        await tab.run("document.getElementById('options').value = ''")
        await click(tab, "do-switch")
        await tab.until(f"/before, it was chunked_prefill/.test({text_of('switch-status')})")
        assert server.engine.config.scheduler.policy == f"{path}:FCFSScheduler"
        assert await tab.until(f"{text_of('policy')}.endsWith('mine.py:FCFSScheduler')")


async def test_without_admin_routes_the_buttons_are_grey_beside_the_line_that_turns_them_on(
    browser,
):
    async with page(browser, server=ServerConfig()) as (_, tab):
        await tab.until(f"/--enable-admin/.test({text_of('no-trials')})")
        for name in ("try", "do-switch"):
            assert await tab.run(f"document.getElementById('{name}').disabled")
        assert await tab.run("document.getElementById('no-trials').offsetHeight > 0")
    async with page(browser) as (_, tab):
        for name in ("try", "do-switch"):
            assert not await tab.run(f"document.getElementById('{name}').disabled")
        assert await tab.run("document.getElementById('no-trials').offsetHeight == 0")


async def test_a_policy_is_tried_on_live_requests_and_the_report_is_shown(browser):
    async with page(browser) as (server, tab):

        async def load():
            while True:
                asked = [server.complete([i + 5] * 40, max_tokens=30) for i in range(4)]
                await asyncio.gather(*asked)

        loading = asyncio.create_task(load())
        await tab.until("aioserve.story.steps.length > 20")
        await choose_policy(tab, "fcfs")
        await tab.run("document.getElementById('requests').value = '20'")
        await click(tab, "try")
        await tab.until("/Stop [(][0-9]+ of 20/.test(document.getElementById('try').textContent)")
        await tab.until("!document.getElementById('report').hidden")
        loading.cancel()
        assert "fcfs" in await tab.run(WORDS)
        missing = "/need [0-9]+ requests more/"
        await tab.until(f"{missing}.test({text_of('switch-status')})")
        verdict = await tab.run(text_of("switch-status"))
        assert "Recorded is what the server measured under chunked_prefill" in await tab.run(WORDS)
        report = await tab.run("document.getElementById('report-link').href")
        await tab.go(report)
        await tab.until("document.querySelectorAll('svg').length > 2")  # drawn, in its sandbox
        of_these = await tab.run("document.querySelector('p.these').innerText")
        assert of_these.startswith("On these ")
        assert verdict.startswith(f"{of_these} The numbers are exact")
        assert await tab.run("window.origin") == "null"
        assert tab.problems == []


async def test_another_policy_than_the_live_one_is_offered_and_the_same_one_is_not_tried(browser):
    async with page(browser) as (_, tab):
        await tab.until(f"{text_of('policy')} === 'chunked_prefill'")
        assert await tab.run("document.getElementById('policies').value") == "fcfs"
        await choose_policy(tab, "chunked_prefill")
        await click(tab, "try")
        await tab.until(f"/is what runs now: choose another/.test({text_of('switch-status')})")
        assert await tab.run(text_of("try")) == "Try"
        await tab.run("document.querySelector('#option-fields [name=chunk_size]').value = '16'")
        await click(tab, "try")
        await tab.until(f"/^Recording until /.test({text_of('switch-status')})")
        await click(tab, "try")
        await tab.until(f"{text_of('switch-status')} === 'Stopped.'")
        assert tab.problems == []


async def test_why_a_request_waited_and_what_was_served_instead(browser):
    scheduler = msgspec.structs.replace(CONFIG.scheduler, max_num_seqs=1)
    async with page(browser, scheduler=scheduler) as (server, tab):
        first = asyncio.create_task(
            server.complete([5] * 200, max_tokens=150, ignore_eos=True, request_id="the-first")
        )
        await tab.until(f"aioserve.story.byId.get('{shown_id('the-first')}')?.state === 'decode'")
        second = asyncio.create_task(
            server.complete([6] * 20, max_tokens=5, ignore_eos=True, request_id="the-second")
        )
        await asyncio.gather(first, second)
        await tab.until(f"aioserve.story.byId.get('{shown_id('the-second')}')?.state === 'done'")
        await tab.run("document.getElementById('table').open = true")
        await tab.run("document.getElementById('choose').focus()")
        await tab.run(
            "(() => { const select = document.getElementById('choose');"
            f" select.value = aioserve.story.byId.get('{shown_id('the-second')}').number;"
            " select.dispatchEvent(new Event('change')); })()"
        )
        rows = await tab.until(
            "[...document.querySelectorAll('#life tbody tr')].map((row) => row.innerText)"
        )
        waited = [row for row in rows if "all seats are taken" in row]
        assert len(waited) == 1
        assert "decode tokens of requests that ran" in waited[0]
        assert "20 tokens of its prompt" in rows[-2]
        assert "4 steps of decoding" in rows[-1]
        assert "it ran alone" in rows[-1]
        await tab.run("document.querySelector('#life tbody button').click()")
        steps = await tab.run("document.querySelectorAll('#life tbody li').length")
        assert steps > 3


async def test_the_shadow_stands_beside_the_live_policy(browser):
    async with page(browser, shadow=ShadowConfig(shadow_policy="fcfs")) as (server, tab):
        await tab.until(f"/fcfs follows the live chunked_prefill/.test({text_of('shadow')})")
        await server.complete(max_tokens=3, ignore_eos=True)
        await tab.until(f"/first token p50\\s+≤/.test({text_of('shadow')})")


async def test_the_shadow_has_a_verdict_from_fifty_requests_on(browser):
    async with page(browser, shadow=ShadowConfig(shadow_policy="fcfs")) as (server, tab):
        verdicts = (
            "[...document.querySelectorAll('#shadow tbody tr')].slice(0, 6)"
            ".map((row) => row.lastChild.innerText)"
        )
        await server.complete(max_tokens=3, ignore_eos=True)
        await tab.until(f"/needs 50 requests of each, and there are 1 and 1/.test({SHADOW})")
        assert set(await tab.run(verdicts)) == {"\N{EN DASH}"}
        assert "of 2" in await tab.run(SHADOW)  # gaps
        asked = [server.complete([i + 5] * 9, max_tokens=3) for i in range(50)]
        await asyncio.gather(*asked)
        await tab.until(f"!/No verdict/.test({SHADOW})")
        assert set(await tab.run(verdicts)) <= {"shorter", "longer", "as long"}


async def test_lanes_have_the_names_of_users_or_the_numbers_of_requests(browser):
    async with page(browser) as (server, tab):
        fields = {"max_tokens": 5, "ignore_eos": True}
        asked = [server.complete(user=name, **fields) for name in ("ann", "bob", "ann")]
        await asyncio.gather(*asked)
        await server.complete(**fields)  # the fourth, whatever the order of the others
        await tab.until("aioserve.now.lanes.shown.flat().length === 4")
        names = (
            "(async () => { const { nameLane } = await import('/page/words.js');"
            " return aioserve.now.lanes.shown.map("
            "(lane) => nameLane(lane, aioserve.story.own, 18)); })()"
        )
        assert sorted(await tab.run(names)) == ["ann", "ann", "bob", "request 4"]
        await server.complete(user="ann", **fields)
        await server.complete(**fields)
        await tab.until("aioserve.now.lanes.shown.flat().length === 6")
        found = sorted(await tab.run(names))  # each took a lane that was its own before
        await tab.run("aioserve.story.lives.delete(1)")  # as if it had left the picture
        await tab.run("aioserve.now.draw()")
        assert all(await tab.run("aioserve.now.lanes.shown.map((lane) => lane?.length)"))
        assert found == ["ann", "ann", "bob", "requests 4\N{EN DASH}6"]


async def test_leases_are_shown_by_conversation_and_leave_when_they_end(browser):
    """A turn of ten blocks stays pinned for three seconds; its name opens nothing."""
    scheduler = SchedulerConfig(policy=TOOL_PAUSES, options={"ttl": 3.0})
    cache = CacheConfig(num_kv_blocks=40, block_size=16)
    async with page(browser, scheduler=scheduler, cache=cache) as (server, tab):
        prompt = list(range(10, 171))
        fields = {"max_tokens": 2, "ignore_eos": True}
        await server.complete(prompt, user="ann", session_id="agent-7", **fields)
        await tab.until("!document.getElementById('leases').hidden")
        told = await tab.run(text_of("leases"))
        assert told.startswith(
            f"1 lease holds 10 blocks that no request holds: ann {shown_id('agent-7')} 10 blocks, "
        )
        assert "agent-7" not in told.replace(shown_id("agent-7"), "")
        await tab.until("aioserve.story.kv.at(-1).leased === 10")
        await tab.shape(1100, 800)  # the policy's name, a path, is not wider than its place
        assert await tab.run("document.documentElement.scrollWidth <= innerWidth")
        await tab.until("document.getElementById('leases').hidden")  # no other request came
        await tab.until("aioserve.story.kv.at(-1).used === 0")


async def test_names_stand_beside_lanes_however_low(browser):
    async with page(browser) as (server, tab):
        drawn = "(() => { const pen = aioserve.now.lanes.pen, drawn = [];"
        drawn += " const own = pen.fillText; pen.fillText = (...of) => drawn.push(of[0]);"
        drawn += " aioserve.now.draw(); pen.fillText = own; return drawn; })()"
        asked = [
            server.complete(user=f"user {i // 20}", max_tokens=200, ignore_eos=True)
            for i in range(60)
        ]
        asking = asyncio.gather(*asked)
        await tab.until("aioserve.now.lanes.shown.flat().length === 60")
        assert await tab.run("aioserve.now.lanes.lane") < 13
        assert {"user 0", "user 1", "user 2"} <= set(await tab.run(drawn))
        await asking


async def test_hold_holds_all_numbers_and_resume_takes_what_came(browser):
    async with page(browser) as (server, tab):
        await server.complete(max_tokens=5, ignore_eos=True)
        await tab.until("aioserve.story.lives.size === 1")
        await click(tab, "hold")
        assert await tab.run(text_of("hold")) == "Resume"
        await asyncio.sleep(0.6)  # what was under way when it was pressed is written
        before = await tab.run(text_of("now"))
        await asyncio.gather(*(server.complete(max_tokens=50, user="later") for _ in range(9)))
        await tab.until("aioserve.numHeld > 0")
        await asyncio.sleep(1.2)  # tiles, table and words had their turns
        assert await tab.run(text_of("now")) == before
        assert await tab.run("aioserve.story.lives.size") == 1
        await click(tab, "hold")
        assert await tab.run(text_of("hold")) == "Hold"
        await tab.until("aioserve.story.lives.size === 10")
        await tab.until("aioserve.story.gauges.num_running === 0")
        assert await tab.run("aioserve.story.numSnapshots") == 1


async def test_ends_are_told_apart(browser):
    async with page(browser) as (server, tab):
        legend = await tab.run("document.querySelector('.legend').innerText")
        for word in ("aborted", "timed out", "failed", "another policy"):
            assert word in legend
        fields = {"ignore_eos": True, "max_tokens": 3000}
        asked = asyncio.create_task(server.complete(request_id="gone", **fields))
        await tab.until("aioserve.story.lives.size === 1")
        server.engine.abort_now("gone")
        await asked
        await server.complete(timeout=0.1, **fields)
        await tab.until("[...aioserve.story.lives.values()].filter((life) => life.end).length > 1")
        finishes = await tab.run("[...aioserve.story.lives.values()].map((life) => life.finish)")
        assert finishes == ["abort", "timeout"]
        pen = "aioserve.now.lanes.pen"
        drawn = f"(() => {{ let strokes = 0, fills = 0; const pen = {pen};"
        drawn += " pen.strokeRect = () => strokes++; pen.fill = () => fills++; aioserve.now.draw();"
        drawn += " delete pen.strokeRect; delete pen.fill; return [strokes, fills]; })()"
        assert await tab.run(drawn) == [1, 1]  # a hollow box, and a wedge


async def test_a_thousand_requests_are_all_drawn(browser):
    sections = {
        "scheduler": SchedulerConfig(
            policy="chunked_prefill", options={"chunk_size": 2048}, max_num_seqs=700
        ),
        "cache": CacheConfig(num_kv_blocks=200_000),
        "runner": msgspec.structs.replace(CONFIG.runner, step_base_ms=20, step_decode_us=1),
    }
    names = [f"request-{i}" for i in range(1000)]
    async with page(browser, **sections) as (server, tab):
        await tab.run("document.getElementById('window').value = '60'")
        begun = await tab.run("[aioserve.numDraws, aioserve.now.lanes.numDrawn]")
        fields = {"max_tokens": 4000, "ignore_eos": True}
        requests = [
            asyncio.create_task(server.complete([7] * 30, request_id=name, **fields))
            for name in names
        ]
        await tab.until("aioserve.story.gauges.num_waiting === 300")
        await tab.until("aioserve.now.lanes.shown.flat().length === 1000")
        await click(tab, "runners")
        await tab.until("aioserve.now.lanes.shown.flat().length === 700")
        assert await tab.run("aioserve.now.lanes.shown.length") == 700
        await click(tab, "runners")
        await tab.until("aioserve.now.lanes.shown.flat().length === 1000")
        speaking = "[...aioserve.story.lives.values()].filter((life) => life.output > 0)"
        await tab.until(f"{speaking}.length === 700")
        await tab.run("document.getElementById('table').open = true")
        await tab.until("document.querySelectorAll('#rows tr').length === 200")
        assert "800 requests more" in await tab.run(text_of("more"))
        await tab.run("document.getElementById('scroller').scrollTop = 1e6")  # lanes out of sight
        before = await tab.run("aioserve.numDraws")
        await tab.until(f"aioserve.numDraws > {before + 5}")
        for name in names:
            server.engine.abort_now(name)
        await tab.until("[...aioserve.story.lives.values()].every((life) => life.end !== null)")
        told = await tab.run(
            "[...aioserve.story.lives.values()].map((life) => [life.id, life.output])"
        )
        got = {}
        for name, answer in zip(names, await asyncio.gather(*requests), strict=True):
            assert answer.status == 200
            got[shown_id(name)] = answer.json()["usage"]["completion_tokens"]
        assert dict(told) == got
        assert sum(count > 0 for count in got.values()) == 700
        assert await tab.run("aioserve.story.numSnapshots") == 1  # it kept pace with the frames
        draws, lanes = await tab.run("[aioserve.numDraws, aioserve.now.lanes.numDrawn]")
        assert draws > begun[0]
        assert lanes - begun[1] > draws - begun[0]


async def test_a_key_is_asked_for_and_kept_in_the_tab(browser, tmp_path):
    path = tmp_path / "keys.yaml"
    path.write_text("keys: [{name: root, key: sk-root-0123456789, admin: true}]")
    path.chmod(0o600)
    config = msgspec.structs.replace(CONFIG, access=AccessConfig(api_keys_file=str(path)))
    async with running(config) as server, browser.tab(server.url) as tab:
        await tab.until("document.getElementById('key-dialog').open")
        await tab.run("document.querySelector('#key-dialog .plain').click()")  # not now
        await tab.until("document.getElementById('connection').classList.contains('lost')")
        await click(tab, "key")
        await tab.type("sk-root-0123456789")
        await tab.press("Enter", 13)
        await tab.until("!document.getElementById('key-dialog').open")
        await tab.until(LIVE)
        await ask(tab, "What news?")
        await tab.until(f"/^The reply/.test({text_of('chat-status')})")
        await tab.go(server.url)
        await tab.until(LIVE)
        assert await tab.run("Object.keys(localStorage).length") == 0
        assert await tab.run("document.cookie") == ""


@pytest.mark.parametrize("width", [360, 390, 768, 1360])
async def test_nothing_is_wider_than_the_screen(browser, width):
    async with page(browser, shadow=ShadowConfig(shadow_policy="fcfs")) as (server, tab):
        await tab.shape(width, 800, is_phone=width < 700)
        long = "x" * 120
        await server.complete("Hello", max_tokens=5, request_id=long, user="y" * 200)
        await tab.until(f"aioserve.story.byId.get('{shown_id(long)}')?.end")
        await ask(tab, "w" * 300)
        await tab.until(f"/^The reply/.test({text_of('chat-status')})")
        await tab.run(f"aioserve.now.choose(aioserve.story.byId.get('{shown_id(long)}'))")
        await tab.run("document.getElementById('table').open = true")
        await asyncio.sleep(1.2)  # the table and the words have their turns
        wide = (
            "[...document.querySelectorAll('body *')].filter((node) =>"
            " !node.closest('.scroll, .skip')"
            " && node.getBoundingClientRect().right > innerWidth + 1)"
            ".map((node) => node.tagName + '#' + node.id + '.' + node.className)"
        )
        assert await tab.run(wide) == []
        assert await tab.run("document.documentElement.scrollWidth <= innerWidth")


async def test_a_tab_that_lost_its_stream_begins_with_a_snapshot(browser):
    async with page(browser) as (server, tab):
        asked = asyncio.create_task(server.complete(max_tokens=400, ignore_eos=True))
        await tab.until("aioserve.story.lives.size === 1")
        await tab.call("Network.enable")
        gone = {"latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
        await tab.call("Network.emulateNetworkConditions", offline=True, **gone)
        await tab.run("aioserve.listenAgain()")
        await tab.until("document.getElementById('connection').classList.contains('lost')")
        await tab.call("Network.emulateNetworkConditions", offline=False, **gone)
        await tab.until(LIVE)
        assert await tab.run("aioserve.story.numSnapshots") == 2
        assert (await asked).status == 200
        tab.problems.clear()


async def test_every_control_has_a_name_and_can_be_reached_by_keyboard(browser):
    async with page(browser) as (_, tab):
        tree = (await tab.call("Accessibility.getFullAXTree"))["nodes"]
        roles = {"button", "textbox", "combobox", "spinbutton", "checkbox", "link"}
        seen = [node for node in tree if node.get("role", {}).get("value") in roles]
        assert len(seen) > 12
        nameless = [node for node in seen if not node.get("name", {}).get("value")]
        assert nameless == []
        kinds = {node.get("role", {}).get("value") for node in tree}
        assert {"main", "banner", "navigation", "log", "status", "region"} <= kinds
        reached = set()
        for _ in range(40):
            await tab.press("Tab", 9)
            reached.add(await tab.run("document.activeElement.id"))
        assert {"window", "hold", "scroller", "prompt", "send", "choose", "do-switch"} <= reached


async def test_who_wants_little_motion_gets_few_pictures(browser):
    async with page(browser) as (_, tab):
        drawn = "performance.now() && aioserve.now.numDrawn"
        await tab.prefer(prefers_reduced_motion="reduce")
        before = await tab.run(f"[{drawn}, aioserve.numDraws]")
        await tab.until(f"aioserve.numDraws > {before[1] + 40}")
        after = await tab.run(f"[{drawn}, aioserve.numDraws]")
        assert after[0] - before[0] < (after[1] - before[1]) / 3


async def test_contrast_is_enough_in_light_and_dark(browser):
    """WCAG AA: 4.5 for text."""
    code = """(() => {
      const style = getComputedStyle(document.documentElement);
      const light = (name) => {
        const hex = style.getPropertyValue(`--${name}`).trim().slice(1);
        const parts = [0, 2, 4].map((i) => parseInt(hex.slice(i, i + 2), 16) / 255)
          .map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
      };
      const contrast = (a, b) => {
        const [x, y] = [light(a), light(b)].sort((p, q) => q - p);
        return (x + 0.05) / (y + 0.05);
      };
      return ["ink", "faint", "bad"].flatMap((text) => ["panel", "paper"].map((ground) =>
        [text, ground, contrast(text, ground)]))
        .concat([0, 1, 2, 3, 4, 5].map((i) => ["ink", `t${i}`, contrast("ink", `t${i}`)]));
    })()"""
    async with page(browser) as (_, tab):
        for scheme in ("light", "dark"):
            await tab.prefer(prefers_color_scheme=scheme)
            for text, ground, contrast in await tab.run(code):
                assert contrast >= 4.5, (scheme, text, ground)
