"""Every route of the API takes hints and hands them to the policy."""

from pathlib import Path
from typing import Any

from aioserve.lab.decision_log.reader import DecisionLog
from aioserve.lab.what_if import make_workload, read_traffic
from tests.test_hints import GOOD, noting

ROUTES = {
    "/v1/completions": {"prompt": [1, 2, 3], "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
    "/v1/responses": {"input": "a", "max_output_tokens": 2},
    "/v1/messages": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
    "/v1/embeddings": {"input": "a"},
    "/v1/score": {"query": "a", "items": ["b"], "label_token_ids": [5]},
}


async def test_every_route_takes_hints_and_refuses_what_is_none(
    start_server: Any, tmp_path: Path
) -> None:
    async with start_server(scheduler={"policy": noting(tmp_path), "options": {}}) as server:
        for path, body in ROUTES.items():
            for hints, status in ((GOOD, 200), ({"a": [1]}, 400), ({"A B": 1}, 400)):
                reply = await server.request("POST", path, json={**body, "hints": hints})
                assert reply.status == status, (path, reply.json())
            assert "the name of a hint" in str(reply.json())


COMPLETION = {"prompt": [1, 2, 3], "max_tokens": 20, "ignore_eos": True}


#: Fields and headers of a request, and the hints that they are.
SAID: list[tuple[dict[str, Any], dict[str, str], dict[str, Any]]] = [
    ({"session_id": "s", "prompt_cache_key": "k"}, {}, {"session": "s"}),
    ({"prompt_cache_key": "k"}, {"X-Session-Id": "h"}, {"session": "k"}),
    ({"prompt_cache_key": 5}, {"X-Dynamo-Session-Id": "h"}, {"session": "h"}),
    ({"hints": {"session": "own"}, "session_id": "s"}, {}, {"session": "own"}),
    ({"vllm_xargs": {"a": 1, "b": "x"}, "kv_hints": {"a": 2}}, {}, {"a": 2, "b": "x"}),
    ({"vllm_xargs": {"osl": 90}}, {}, {"predicted_output_tokens": 90}),
    (
        {"kv_hints": {"predicted_output_tokens": 7, "osl": 90}, "vllm_xargs": {"osl": 5}},
        {},
        {"predicted_output_tokens": 7},
    ),
    (
        {"nvext": {"agent_hints": {"osl": 90, "priority": 5}}},
        {},
        {"predicted_output_tokens": 90, "priority": 5},
    ),
    ({"metadata": {"program": "p", "Not One": "x", "long": "x" * 300}}, {}, {"program": "p"}),
    (
        {},
        {"X-Request-Class": "fast", "x-slo-ttft-ms": "200", "x-slo-tpot-ms": "50"},
        {"slo_class": "fast", "slo_ttft": 0.2, "slo_tpot": 0.05},
    ),
    (
        {"hints": {f"h{i}": i for i in range(16)}},
        {"X-Session-Id": "no room"},
        {f"h{i}": i for i in range(16)},
    ),
]


async def test_what_says_the_same_to_others_is_a_hint(start_server: Any, tmp_path: Path) -> None:
    log = tmp_path / "log"
    policy = {"policy": noting(tmp_path), "options": {}, "decision_log": str(log)}
    async with start_server(scheduler=policy) as server:
        for body, headers, _ in SAID:
            reply = await server.request(
                "POST", "/v1/completions", json=COMPLETION | body, headers=headers
            )
            assert reply.status == 200, reply.json()
    workload = make_workload(read_traffic(DecisionLog(str(log))), "log")
    assert [request.hints for request in workload.requests] == [hints for _, _, hints in SAID]


async def test_a_chain_of_responses_is_a_session_unless_another_is_stated(
    start_server: Any, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    policy = {"policy": noting(tmp_path), "options": {}, "decision_log": str(log)}
    ids: list[str] = []
    async with start_server(scheduler=policy) as server:
        for labels in ({}, {}, {"prompt_cache_key": "k"}, {}):
            before = {"previous_response_id": ids[-1]} if ids else {}
            body = {"input": "a", "max_output_tokens": 2, **before, **labels}
            reply = await server.request("POST", "/v1/responses", json=body)
            assert reply.status == 200, reply.json()
            ids.append(reply.json()["id"])
    workload = make_workload(read_traffic(DecisionLog(str(log))), "log")
    found = [request.hints for request in workload.requests]
    assert found == [{}, {"session": ids[0]}, {"session": "k"}, {"session": ids[0]}]


#: Fields and headers of a request, and which of them is refused.
WRONG: list[tuple[dict[str, Any], dict[str, str], str]] = [
    ({"vllm_xargs": {"a": [1]}}, {}, "vllm_xargs"),
    ({"kv_hints": {"actions": []}}, {}, "kv_hints"),
    ({"nvext": {"annotations": ["x"]}}, {}, "nvext.annotations"),
    ({"nvext": 5}, {}, "nvext"),
    ({"nvext": {"agent_hints": {"A": 1}}}, {}, "nvext.agent_hints"),
    ({}, {"x-slo-ttft-ms": "soon"}, "x-slo-ttft-ms"),
    ({}, {"X-Session-Id": "x" * 300}, "session"),
    (
        {
            "vllm_xargs": {f"a{i}": i for i in range(10)},
            "hints": {f"b{i}": i for i in range(10)},
        },
        {},
        "hints",
    ),
]


async def test_what_is_stated_as_a_hint_and_is_none_is_refused(server: Any) -> None:
    for body, headers, param in WRONG:
        path = "/v1/completions"
        reply = await server.request("POST", path, json=COMPLETION | body, headers=headers)
        assert (reply.status, reply.json()["error"]["param"]) == (400, param)


async def test_a_key_may_be_limited_to_some_hints(start_server: Any, tmp_path: Path) -> None:
    log, keys = tmp_path / "log", tmp_path / "keys.yaml"
    keys.write_text(
        "keys:\n"
        "  - {name: ann, key: sk-ann-0123456789, hints: [session]}\n"
        "  - {name: ben, key: sk-ben-0123456789, hints: []}\n"
    )
    keys.chmod(0o600)
    policy = {"policy": noting(tmp_path), "options": {}, "decision_log": str(log)}
    labels = {"session_id": "s", "metadata": {"slo_class": "fast"}}
    async with start_server(scheduler=policy, access={"api_keys_file": str(keys)}) as server:
        for name, own, status in (
            ("ann", {}, 200),
            ("ben", {}, 200),
            ("ann", {"hints": {"session": "t"}}, 200),
            ("ann", {"hints": {"slo_class": "fast"}}, 403),
            ("ben", {"vllm_xargs": {"session": "t"}}, 403),
        ):
            reply = await server.request(
                "POST",
                "/v1/completions",
                json=COMPLETION | labels | own,
                headers={"Authorization": f"Bearer sk-{name}-0123456789"},
            )
            assert reply.status == status, reply.json()
            if status == 403:
                assert reply.json()["error"]["param"].startswith("hints.")
    workload = make_workload(read_traffic(DecisionLog(str(log))), "log")
    seen = [request.hints for request in workload.requests]
    assert seen == [{"session": "s"}, {}, {"session": "t"}]
