"""The page's routes: what they return, to which clients, and with which headers."""

import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from master.api.app import make_app
from master.api.guard import Access
from master.api.metrics import ServerMetrics
from master.api.page.routes import FILES, page_paths
from master.api.state import ApiState

KEY = "secret"


@pytest.fixture(scope="module")
def app() -> FastAPI:
    admission = SimpleNamespace(admission=SimpleNamespace(most=1))
    service: Any = SimpleNamespace(engine=SimpleNamespace(problem=None, open=0, engine=admission), context=64)
    return make_app(ApiState(service, ("tiny",), ServerMetrics("tiny")), Access((KEY,)))


@pytest.fixture(scope="module")
def http(app: FastAPI) -> Iterator[httpx.Client]:
    with TestClient(app, base_url="http://localhost") as client:
        yield cast(httpx.Client, client)


@pytest.mark.parametrize("path", sorted(page_paths()))
def test_the_page_needs_no_key_and_runs_nothing_of_others(http: httpx.Client, path: str) -> None:
    answer = http.get(path)
    assert answer.status_code == 200
    policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'self'"
    assert policy["frame-ancestors"] == policy["base-uri"] == policy["object-src"] == "'none'"
    assert not {"script-src", "style-src", "connect-src"} & policy.keys()  # which would widen the default
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"


def test_types_are_what_browsers_want(http: httpx.Client) -> None:
    types = {path: http.get(path).headers["content-type"].split(";")[0] for path in page_paths()}
    assert types["/"] == types["/page/index.html"] == "text/html"
    assert types["/page/app.js"] == "text/javascript"
    assert types["/page/style.css"] == "text/css"
    assert types["/page/icon.svg"] == "image/svg+xml"


def test_head_is_get_without_the_body(app: FastAPI, http: httpx.Client) -> None:
    paths = {path.replace("{name}", "tiny") for path, ways in app.openapi()["paths"].items() if "get" in ways}
    assert {"/health", "/metrics", "/house", "/v1/models", "/v1/models/tiny"} <= paths
    for path in {*paths, *page_paths(), "/openapi.json", "/v1/models/other", "/v1/chat/completions", "/nowhere"}:
        for headers in ({"x-api-key": KEY}, {}):
            got, head = http.get(path, headers=headers), http.head(path, headers=headers)
            assert (head.status_code, head.content) == (got.status_code, b""), path
            own = {"x-request-id", "date"}
            assert {*head.headers.items()} - {*got.headers.items()} <= {
                (n, head.headers[n]) for n in own & {*head.headers}
            }
            assert got.headers.get("content-length") == head.headers.get("content-length") != "0"
    assert http.post("/health", json={}).headers["allow"] == "GET, HEAD"


@pytest.mark.parametrize("path", ["/page/", "/page/../routes.py", "/page/%2e%2e/routes.py", "/page/none.js", "/pages"])
def test_no_other_file_is_handed_out(http: httpx.Client, path: str) -> None:
    assert http.get(path).status_code == 401
    answer = http.get(path, headers={"x-api-key": KEY})
    assert answer.status_code == 404
    assert "there is nothing at" in answer.json()["error"]["message"]


def test_the_house_needs_the_key(http: httpx.Client) -> None:
    assert http.get("/house").status_code == 401
    answer = http.get("/house", headers={"x-api-key": KEY})
    assert answer.json() == {"nodes": []}
    assert answer.headers["cache-control"] == "no-store"


def test_a_name_that_others_made_up_gets_no_page(http: httpx.Client) -> None:
    assert http.get("/", headers={"Host": "evil.example"}).status_code == 403


def test_all_that_the_page_asks_for_is_here() -> None:
    paths = page_paths()
    for file in sorted(FILES.iterdir()):
        text = file.read_text()
        wanted = re.findall(r'(?:src|href)="(/[^"]*)"', text) + [
            f"/page/{name}" for name in re.findall(r'from "\./([\w.]+)"', text)
        ]
        assert set(wanted) <= paths.keys(), file.name
        outside = set(re.findall(r"https?://[\w.-]+\.\w+", text)) - {"http://www.w3.org"}
        assert not outside, (file.name, outside)


def test_nothing_parses_what_a_model_wrote_as_html() -> None:
    for file in FILES.glob("*.js"):
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|srcdoc", file.read_text()
        )
    html = (FILES / "index.html").read_text()
    assert not re.search(r"\son\w+=|<script>|style=", html)
