"""The speed of llama.cpp with several streams in one batch, as its server runs them, without HTTP.

`python -m benchmarks.serving.batched GGUF THREADS TOKENS COUNT...` prints the tokens per second of all streams
together, as JSON, for each number of streams. It needs llama-cpp-python.
"""

import ctypes
import json
import sys
from time import perf_counter
from typing import Any

import llama_cpp as lib
import numpy as np

_CONTEXT = 512  # of each stream
_BATCH = 512


class Batches:
    """One model in llama.cpp with memory for several sequences."""

    def __init__(self, gguf: str, threads: int, most: int) -> None:
        lib.llama_log_set(_quiet, ctypes.c_void_p(0))
        lib.llama_backend_init()
        self.model = lib.llama_model_load_from_file(gguf.encode(), lib.llama_model_default_params())
        self.vocab = lib.llama_model_get_vocab(self.model)
        self.values = lib.llama_vocab_n_tokens(self.vocab)
        wanted = lib.llama_context_default_params()
        wanted.n_ctx, wanted.n_batch, wanted.n_seq_max = _CONTEXT * most, _BATCH, most
        wanted.n_threads = wanted.n_threads_batch = threads
        self.context = lib.llama_init_from_model(self.model, wanted)
        self.batch = lib.llama_batch_init(_BATCH, 0, 1)

    def rate(self, count: int, tokens: int) -> float:
        """Return the tokens per second of `count` greedy streams of `tokens` tokens, after one prompt each."""
        lib.llama_memory_clear(lib.llama_get_memory(self.context), True)
        prompts = [self._ids(f"Tell me of the number {count * 10 + number}.") for number in range(count)]
        lasts = [self._step([(token, at, number) for at, token in enumerate(prompt)])[-1]
                 for number, prompt in enumerate(prompts)]  # fmt: skip
        begun = perf_counter()
        for made in range(tokens - 1):
            lasts = self._step([(last, len(prompts[number]) + made, number) for number, last in enumerate(lasts)])
        return count * (tokens - 1) / (perf_counter() - begun)

    def _ids(self, text: str) -> list[int]:
        room = (ctypes.c_int32 * 128)()
        raw = text.encode()
        return list(room[: lib.llama_tokenize(self.vocab, raw, len(raw), room, len(room), True, True)])

    def _step(self, rows: list[tuple[int, int, int]]) -> list[int]:
        """Return the best next token after each row, which is a token, its position and its sequence."""
        batch = self.batch
        batch.n_tokens = len(rows)
        for row, (token, position, sequence) in enumerate(rows):
            batch.token[row], batch.pos[row], batch.logits[row] = token, position, 1
            batch.n_seq_id[row], batch.seq_id[row][0] = 1, sequence
        assert lib.llama_decode(self.context, batch) == 0
        found: list[int] = []
        for row in range(len(rows)):
            logits = np.ctypeslib.as_array(lib.llama_get_logits_ith(self.context, row), (self.values,))
            found.append(int(logits.argmax()))
        return found


@lib.llama_log_callback  # type: ignore[untyped-decorator]
def _quiet(level: int, text: bytes, data: Any) -> None:
    """Discard a log line of llama.cpp."""


if __name__ == "__main__":
    numbers = [int(one) for one in sys.argv[2:]]
    batches = Batches(sys.argv[1], numbers[0], max(numbers[2:]))
    batches.rate(1, 8)  # warms up
    print(json.dumps({count: batches.rate(count, numbers[1]) for count in numbers[2:]}))
