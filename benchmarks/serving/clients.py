"""A crowd of clients in a process of its own, so that its memory and CPU time are not the server's.

`python -m benchmarks.serving.clients HOST PORT COUNT [PAUSES [KEY]]` asks COUNT questions at once. It reads every tenth
answer slowly, with PAUSES pauses. It prints the ends of the streams as JSON.
"""

import asyncio
import json
import socket
import sys
from collections import Counter
from itertools import count
from typing import Any

from benchmarks.serving.server import CHAT, question

SLOW_EVERY = 10
_TOKENS, _SLOW_TOKENS = 8, 64
_BUFFER, _BITE, _PAUSE_S, PAUSES = 4096, 2048, 0.25, 60
_DONE = b"data: [DONE]"


def body(number: int) -> dict[str, Any]:
    """Make a client's request. Slow clients ask for more than socket buffers hold, so that the server has to wait."""
    if number % SLOW_EVERY:
        return question(f"Say {number}.", _TOKENS)
    return question(f"Say {number}.", _SLOW_TOKENS, logprobs=True, top_logprobs=20)


async def ask(host: str, port: int, number: int, pauses: int, key: str) -> str:
    """Return how the client's stream ends: done, error, cut, or the status of a refusal."""
    reader, writer = await asyncio.open_connection(sock=await _connected(host, port), limit=_BUFFER)
    asked = json.dumps(body(number)).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nConnection: close\r\n"
    head += f"x-api-key: {key}\r\n" if key else ""
    writer.write(f"{head}Content-Length: {len(asked)}\r\n\r\n".encode() + asked)
    try:
        return await _end(reader, 0 if number % SLOW_EVERY else pauses)
    except ConnectionError:
        return "cut"
    finally:
        writer.close()


async def _connected(host: str, port: int) -> socket.socket:
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
    made.setblocking(False)
    await asyncio.get_running_loop().sock_connect(made, (host, port))
    return made


async def _end(reader: asyncio.StreamReader, pauses: int) -> str:
    """Read the answer to its end, pausing after each of the first `pauses` reads. Return how the stream ended."""
    status = (await reader.readline()).split(b" ")[1:2]
    if status != [b"200"]:
        return status[0].decode() if status else "cut"
    tail = b""
    for bites in count():
        bite = await reader.read(_BITE)
        if not bite:
            break
        tail = (tail + bite)[-_BITE:]
        if bites < pauses:
            await asyncio.sleep(_PAUSE_S)
    if _DONE not in tail:
        return "cut"
    return "error" if b'"error":' in tail else "done"


async def crowd(host: str, port: int, clients: int, pauses: int, key: str) -> Counter[str]:
    """Run `clients` clients at once, and count the ends of their streams."""
    return Counter(await asyncio.gather(*(ask(host, port, number, pauses, key) for number in range(clients))))


if __name__ == "__main__":
    address, port, clients = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    pauses, key = int(sys.argv[4]) if len(sys.argv) > 4 else PAUSES, "".join(sys.argv[5:6])
    print(json.dumps(asyncio.run(crowd(address, port, clients, pauses, key))))
