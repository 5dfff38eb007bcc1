"""`GET /`, the page's own files, and `GET /house`."""

from collections.abc import Mapping
from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response

from master.api.page.nodepanel import NodePanel

FILES = Path(__file__).parent / "files"
POLICY = "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'"
"""Content security policy: the page loads only files of this server, and no other site may frame it."""

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_HEADERS = {
    "Content-Security-Policy": POLICY,
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # browsers must revalidate, so that the page has the server's version
}


def page_paths() -> dict[str, Path]:
    """Return the page's files by URL path. Other files cannot be requested."""
    named = {f"/page/{file.name}": file for file in sorted(FILES.iterdir()) if file.suffix in _TYPES}
    return {"/": FILES / "index.html"} | named


def page_routes(panel: NodePanel | None) -> APIRouter:
    """Return the page's routes; without a `panel` it shows no nodes."""
    router = APIRouter()
    for path, file in page_paths().items():
        _add_file(router, path, file.read_bytes(), {"Content-Type": _TYPES[file.suffix]} | _HEADERS)

    @router.get("/house", summary="Show the nodes, with the share and the time per token of each")
    async def read_house() -> Response:
        shown = {"nodes": []} if panel is None else await panel.read()
        return JSONResponse(shown, headers={"Cache-Control": "no-store"})

    return router


def _add_file(router: APIRouter, path: str, body: bytes, headers: Mapping[str, str]) -> None:
    @router.get(path, include_in_schema=False)
    async def read_file() -> Response:
        return Response(body, headers=dict(headers))
