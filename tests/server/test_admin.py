"""Models, metrics, version and the admin routes."""

import aioserve


async def test_the_model_is_listed_with_its_limit(start_server):
    names = {"served_model_name": "house/bard", "max_model_len": 128}
    async with start_server(model=names) as server:
        listed = (await server.get("/v1/models")).json()
        [card] = listed["data"]
        assert listed["object"] == "list"
        assert (card["id"], card["object"], card["max_model_len"]) == ("house/bard", "model", 128)
        assert (await server.get("/v1/models/house/bard")).json() == card
        assert (await server.complete(model="house/bard", max_tokens=1)).status == 200
        assert (await server.complete(model="embedded", max_tokens=1)).status == 404


async def test_a_model_of_several_names_answers_to_each_and_lists_all(start_server):
    async with start_server(model={"served_model_name": ("bard", "gpt-5", "claude")}) as server:
        listed = (await server.get("/v1/models")).json()["data"]
        assert [card["id"] for card in listed] == ["bard", "gpt-5", "claude"]
        assert len({card["root"] for card in listed}) == 1
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
        for name in ("bard", "gpt-5", "claude"):
            assert (await server.get(f"/v1/models/{name}")).json()["id"] == name
            answer = await server.request("POST", "/v1/messages", json={**body, "model": name})
            assert (answer.status, answer.json()["model"]) == (200, name)
        assert (await server.complete(max_tokens=1)).json()["model"] == "bard"
        refused = await server.complete(model="embedded", max_tokens=1)
        assert refused.status == 404
        assert "this server has 'bard', 'gpt-5', 'claude'" in refused.json()["error"]["message"]


async def test_metrics_are_prometheus_text_of_this_engine(server):
    await server.complete(max_tokens=3, ignore_eos=True)
    answer = await server.get("/metrics")
    assert answer.headers["Content-Type"].startswith("text/plain; version=")
    assert b"aioserve_generation_tokens_total 3.0" in answer.body


async def test_the_version_is_the_packages(server):
    assert (await server.get("/version")).json() == {"version": aioserve.__version__}


async def test_admin_routes_are_not_there_unless_enabled(server):
    for path in ("policy", "reset_prefix_cache"):
        assert (await server.request("POST", f"/admin/{path}", json={})).status == 404


async def test_the_policy_of_a_running_server_can_be_switched(start_server):
    async with start_server(server={"enable_admin": True}) as server:
        before = (await server.complete(max_tokens=9, ignore_eos=True)).json()["choices"]
        answer = await server.request(
            "POST", "/admin/policy", json={"policy": "priority", "options": {}}
        )
        assert answer.status == 200
        assert answer.json()["before"] == {
            "policy": "chunked_prefill",
            "options": {"chunk_size": 64},
        }
        assert (await server.complete(max_tokens=9, ignore_eos=True)).json()["choices"] == before
        for body, message in (
            ({"policy": "fcsf"}, "unknown policy"),
            ({"policy": "chunked_prefill", "options": {"chunk_size": 0}}, "chunk_size"),
            ({"police": "fcfs"}, "police"),
        ):
            refused = await server.request("POST", "/admin/policy", json=body)
            assert refused.status == 400
            assert message in refused.json()["error"]["message"]
        assert server.engine.config.scheduler.policy == "priority"


POLICY = """
from aioserve.policies.fcfs import FCFSScheduler
class Mine(FCFSScheduler):
    keeps_decoding = True
    {line}
"""


async def test_a_policys_file_that_was_edited_is_read_again(start_server, tmp_path):
    path = tmp_path / "mine.py"
    async with start_server(server={"enable_admin": True}) as server:
        for number in range(3):
            name = f'\nMine.__name__ = "Mine{number}"\n'
            path.write_text(POLICY.format(line="") + name)
            body = {"policy": str(path)}
            assert (await server.request("POST", "/admin/policy", json=body)).status == 200
            assert server.engine.inspect().policy_class == f"Mine{number}"
            assert (await server.complete(max_tokens=3)).status == 200


WRONG_FILES = [
    ("def x(:", "mine.py:5: cannot import the policy: SyntaxError"),
    ("import nowhere", "mine.py:5: cannot import the policy: ModuleNotFoundError"),
    ("def __init__(self, *a, **k): 1 / 0", "ZeroDivisionError('division by zero')"),
    ("raise SystemExit(3)", "mine.py:5: cannot import the policy: SystemExit: 3"),
    ("def __init__(self, *a, **k): exit()", "Mine raised SystemExit"),
    ("schedule = 1 / 0", "mine.py:5: cannot import the policy: ZeroDivisionError"),
]


async def test_a_policys_file_that_is_wrong_is_a_400_with_its_line(start_server, tmp_path):
    path = tmp_path / "mine.py"
    async with start_server(server={"enable_admin": True}) as server:
        for line, message in WRONG_FILES:
            path.write_text(POLICY.format(line=line))
            body = {"policy": f"{path}:Mine"}
            refused = await server.request("POST", "/admin/policy", json=body)
            assert refused.status == 400, line
            assert message in refused.json()["error"]["message"]
            assert server.engine.config.scheduler.policy == "chunked_prefill"
            assert (await server.complete(max_tokens=3)).status == 200


async def test_the_prefix_cache_can_be_reset(start_server):
    async with start_server(server={"enable_admin": True}) as server:
        await server.complete([7] * 100, max_tokens=2)
        answer = await server.request("POST", "/admin/reset_prefix_cache")
        assert answer.json() == {"empty": True}
        usage = (await server.complete([7] * 100, max_tokens=2)).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0
