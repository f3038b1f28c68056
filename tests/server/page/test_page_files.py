"""The page's files: what a browser is told of them, and that they want nothing from elsewhere."""

import re

import pytest

from aioserve.apis.page import FOLDER

TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
NAMES = sorted(path.name for path in FOLDER.iterdir() if path.suffix in TYPES)


async def test_the_page_is_at_the_root_and_says_whether_policies_can_be_tried(server, start_server):
    own = (FOLDER / "page.html").read_bytes()
    answer = await server.get("/")
    assert answer.status == 200
    assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
    assert answer.body == own.replace(b"<body>", b'<body class="no-trials">') != own
    async with start_server(server={"enable_admin": True}) as with_admin:
        assert (await with_admin.get("/")).body == own


async def test_a_browser_may_run_and_ask_nothing_but_what_is_here(server):
    for path in ["/", *(f"/page/{name}" for name in NAMES)]:
        answer = await server.get(path)
        assert answer.status == 200, path
        told = answer.headers["Content-Security-Policy"]
        directives = dict(part.strip().split(" ", 1) for part in told.split(";"))
        assert directives["default-src"] == "'none'"
        assert directives["script-src"] == directives["connect-src"] == "'self'"
        assert directives["frame-ancestors"] == "'none'"
        assert "unsafe" not in told
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        suffix = "." + (path.rpartition(".")[2] if path != "/" else "html")
        assert answer.headers["Content-Type"] == f"{TYPES[suffix]}; charset=utf-8"


@pytest.mark.parametrize("name", NAMES)
def test_a_file_names_only_files_that_are_there(name):
    text = (FOLDER / name).read_text()
    assert not re.search(r"(?<!www\.w3\.org/)https?://(?!www\.w3\.org/2000/svg)", text)
    named = re.findall(r'(?:href|src)="page/([^"]+)"|from "\./([^"]+)"', text)
    assert {a or b for a, b in named} <= set(NAMES)
    assert not re.search(r"\sstyle=|\son\w+=|<script>", text), "its own policy would refuse this"


async def test_a_browser_that_has_a_file_is_not_sent_it_again(server):
    first = await server.get("/page/main.js")
    headers = {"If-None-Match": first.headers["ETag"]}
    async with server.session.get(f"{server.url}/page/main.js", headers=headers) as again:
        assert (again.status, await again.read()) == (304, b"")
        assert again.headers["ETag"] == first.headers["ETag"]
        assert again.headers["Cache-Control"] == "no-cache"
    headers = {"If-None-Match": '"another"'}
    async with server.session.get(f"{server.url}/page/main.js", headers=headers) as other:
        assert (other.status, await other.read()) == (200, first.body)


async def test_nothing_else_of_the_folder_is_served(server):
    for name in ["none.js", "files.py", "..%2Fapp.py", "%2e%2e%2fkeys.py"]:
        async with server.session.get(f"{server.url}/page/{name}") as answer:
            assert answer.status == 404, name
            assert "error" in await answer.json()


async def test_without_a_page_there_is_neither_it_nor_its_stream(start_server):
    async with start_server(server={"page": False}) as server:
        for path in ("/", "/page/main.js", "/watch/steps"):
            async with server.session.get(server.url + path) as answer:
                assert answer.status == 404, path
        assert (await server.get("/health")).status == 200
