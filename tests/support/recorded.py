"""Bodies as Codex and Claude Code send them: fields and items as in their public sources, with shorter texts."""

import json
from typing import Any

from tests.support.paths import ROOT

CODEX = ("codex_first", "codex_later")
CLAUDE_CODE = ("claude_code_first", "claude_code_later", "claude_code_count", "claude_code_search")
CLAUDE_CODE_HEADERS = {
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27",
    "x-app": "cli",
}
CODEX_HEADERS = {"originator": "codex_cli_rs", "session_id": "019ab4c8", "accept": "text/event-stream"}


def recorded(name: str, model: str) -> dict[str, Any]:
    """Return one body, with the name of the model that is asked for."""
    text = (ROOT / f"tests/support/data/clients/{name}.json").read_text()
    body: dict[str, Any] = json.loads(text)
    return body | {"model": model}
