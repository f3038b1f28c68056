"""The Grafana dashboard asks for what a server tells, and a real Prometheus answers all of it."""

import asyncio
import json
import re
import shutil
import socket
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.processes import PATIENCE, serving, started, until
from tests.server.serving import running

DASHBOARD = json.loads(
    (Path(__file__).parents[2] / "deploy/grafana/aioserve.json").read_text(encoding="utf-8")
)
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
TARGETS = [
    pytest.param(target["expr"], id=f"{panel['title']}, {target['refId']}")
    for panel in PANELS
    for target in panel["targets"]
]
PROMETHEUS = shutil.which("prometheus")


def test_panels_lie_beside_each_other_and_have_what_grafana_needs():
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    taken = set()
    for panel in DASHBOARD["panels"]:
        grid = panel["gridPos"]
        assert grid["x"] + grid["w"] <= 24
        cells = {
            (x, y)
            for x in range(grid["x"], grid["x"] + grid["w"])
            for y in range(grid["y"], grid["y"] + grid["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    for panel in PANELS:
        assert panel["type"] in ("timeseries", "table")
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        for target in panel["targets"]:
            used = set(re.findall(r"\$(\w+)", target["expr"])) - {"__rate_interval"}
            assert used == {"instance"} <= variables


async def scraped() -> dict[str, set[str]]:
    """The labels of every sample of a server that has served and refused."""
    async with running() as server:
        await server.complete(max_tokens=3)
        await server.complete(max_tokens=-1)
        text = (await server.get("/metrics")).body.decode()
    return {
        sample.name: set(sample.labels)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_every_query_asks_for_metrics_and_labels_that_a_server_tells():
    told = asyncio.run(scraped())
    for param in TARGETS:
        [expr] = param.values
        names = re.findall(r"\b(?:aioserve|process)_\w+", expr)
        assert names
        assert set(names) <= told.keys()
        labels = {"instance", "le"}.union(*(told[name] for name in names))
        for group in re.findall(r"by \((.*?)\)", expr):
            assert set(group.split(", ")) <= labels, expr
    legends = [t["legendFormat"] for panel in PANELS for t in panel["targets"]]
    for param, legend in zip(TARGETS, legends, strict=True):
        for label in re.findall(r"{{(\w+)}}", legend):
            assert label in param.values[0] or label == "instance"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]


@pytest.mark.dist
@pytest.mark.skipif(PROMETHEUS is None, reason="needs: apt-get install -y prometheus")
def test_prometheus_scrapes_a_server_and_answers_every_query(tmp_path):
    port = free_port()
    with serving("--runner", "simulated", "--step-base-ms", "1") as (_, url):

        def ask(body):
            asked = urllib.request.Request(
                f"{url}/v1/completions",
                json.dumps(body).encode(),
                {"Content-Type": "application/json"},
            )
            try:
                urllib.request.urlopen(asked, timeout=PATIENCE).close()
            except urllib.error.HTTPError as error:
                error.close()

        (tmp_path / "prometheus.yml").write_text(
            "global: {scrape_interval: 250ms}\n"
            "scrape_configs: [{job_name: aioserve, static_configs: [{targets: "
            f"[{url.removeprefix('http://')}]}}]}}]\n"
        )
        flags = (
            f"--config.file={tmp_path}/prometheus.yml",
            f"--storage.tsdb.path={tmp_path}/data",
            f"--web.listen-address=127.0.0.1:{port}",
            "--log.level=error",
        )
        ask({"prompt": "Hello", "max_tokens": 30, "ignore_eos": True})
        ask({"prompt": "Hello", "max_tokens": -1})
        with started(str(PROMETHEUS), *flags, stderr=subprocess.DEVNULL):

            def query(expr):
                expr = expr.replace("$instance", ".*").replace("$__rate_interval", "1m")
                words = urllib.parse.urlencode({"query": expr})
                try:
                    with urllib.request.urlopen(
                        f"http://127.0.0.1:{port}/api/v1/query?{words}", timeout=PATIENCE
                    ) as response:
                        return json.load(response)
                except urllib.error.HTTPError as error:
                    if error.code == 503:  # it is not up yet
                        error.close()
                        return None
                    raise AssertionError(f"{expr}: {error.read().decode()}") from error
                except urllib.error.URLError:
                    return None

            def has_answer(expr):
                answer = query(expr)
                return answer and answer["data"]["result"]

            until(lambda: has_answer("count_over_time(up[1m]) >= 3 and up == 1"), "it scrapes")
            ask({"prompt": "Hello", "max_tokens": 30, "ignore_eos": True})
            for param in TARGETS:
                until(lambda expr=param.values[0]: has_answer(expr), param.values[0])
            steps = query("sum(aioserve_steps_total)")["data"]["result"][0]["value"][1]
            assert float(steps) >= 30
            theirs = query('vllm:num_requests_running{model_name="embedded"}')
            assert theirs["data"]["result"]
