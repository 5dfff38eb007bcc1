"""Request bodies of Codex and Claude Code, with shorter texts.

Bodies with a version in their name were recorded from `codex exec` and `claude -p`, before and after calls of tools.
The other bodies follow the public sources: what these versions send in other settings, or what earlier versions sent.
"""

import json
from typing import Any

from tests.support.paths import ROOT

CODEX = ("codex_0.169_first", "codex_0.169_later", "codex_first", "codex_later")
CLAUDE_CODE = ("claude_code_2.1_first", "claude_code_2.1_later", "claude_code_first", "claude_code_later")
CLAUDE_CODE_HEADERS = {
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,effort-2025-11-24",
    "x-app": "cli",
}
CODEX_HEADERS = {"originator": "codex_cli_rs", "session_id": "019ab4c8", "accept": "text/event-stream"}


def recorded(name: str, model: str) -> dict[str, Any]:
    """Return the recorded body `name`, with `model` as the requested model."""
    text = (ROOT / f"tests/support/data/clients/{name}.json").read_text()
    body: dict[str, Any] = json.loads(text)
    return body | {"model": model}
