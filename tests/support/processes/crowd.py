"""`python -m tests.support.processes.crowd URL COUNT`: COUNT clients ask at once.

The ends of their answers are printed.
"""

import asyncio
import json
import resource
import sys
from collections import Counter
from urllib.parse import urlsplit

from tests.support.serving import KEY, said


def _request(host: str, number: int) -> bytes:
    body = json.dumps(said(f"Number {number}", stream=True, max_tokens=10))
    head = ("POST /v1/chat/completions HTTP/1.1", f"Host: {host}", f"x-api-key: {KEY}", "Connection: close",
            "Content-Type: application/json", f"Content-Length: {len(body)}")  # fmt: skip
    return "\r\n".join([*head, "", body]).encode()


async def _ask(url: str, number: int) -> str:
    """Return the end of one client's answer; some clients read slowly, and some leave in the middle."""
    at = urlsplit(url)
    reader, writer = await asyncio.open_connection(at.hostname, at.port)
    try:
        writer.write(_request(at.netloc, number))
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        if " 200 " in head and number % 10 == 1:
            return "left"
        if " 200 " in head and number % 10 == 2:
            await asyncio.sleep(0.05)  # a slow reader, not a wait for anything
        rest = await reader.read()
    finally:
        writer.close()
    if head.startswith("http/1.1 429 ") and int(head.partition("retry-after: ")[2].split()[0]) >= 1:
        return "told to come back"
    return "done" if b"data: [DONE]" in rest else head.splitlines()[0]


async def _crowd(url: str, count: int) -> Counter[str]:
    return Counter(await asyncio.gather(*(_ask(url, number) for number in range(count))))


if __name__ == "__main__":
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    print(json.dumps(asyncio.run(_crowd(sys.argv[1], int(sys.argv[2])))))  # noqa: T201 - read by the test
