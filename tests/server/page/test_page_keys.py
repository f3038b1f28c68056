"""Where the server has keys: the page is open, what it tells of everybody is the operators'."""

import pytest

KEYS = """
keys:
  - {name: ann, key: sk-ann-0123456789abcdef}
  - {name: root, key: sk-root-0123456789abcdef, admin: true}
"""


@pytest.fixture
async def locked(start_server, tmp_path):
    path = tmp_path / "keys.yaml"
    path.write_text(KEYS)
    path.chmod(0o600)
    async with start_server(
        access={"api_keys_file": str(path)}, server={"enable_admin": True}
    ) as server:
        yield server


def bearer(name):
    return {"Authorization": f"Bearer sk-{name}-0123456789abcdef"}


async def test_the_files_are_open(locked):
    for path in ("/", "/page/main.js", "/page/style.css"):
        assert (await locked.get(path)).status == 200


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/watch/steps"), ("POST", "/admin/try_policy")]
)
async def test_who_looks_or_tries_is_an_operator(locked, method, path):
    assert (await locked.request(method, path)).status == 401
    answer = await locked.request(method, path, headers=bearer("ann"))
    assert answer.status == 403
    assert "not an operator's" in answer.json()["error"]["message"]


async def test_an_operator_sees_whose_request_it_is(locked):
    async with locked.session.get(f"{locked.url}/watch/steps", headers=bearer("root")) as response:
        assert response.status == 200
        assert (await response.content.readuntil(b"\n\n")).startswith(b'data: {"kind":"snapshot"')
        await locked.request(
            "POST", "/v1/completions", json={"prompt": "Hi", "max_tokens": 2}, headers=bearer("ann")
        )
        told = b""
        while b'"ann"' not in told:
            told = await response.content.readuntil(b"\n\n")


async def test_a_report_needs_no_key_but_its_name(locked):
    answer = await locked.get("/watch/reports/nobodys")
    assert answer.status == 404
