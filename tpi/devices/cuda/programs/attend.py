"""Attention over pages with an online softmax; a long context is split over several programs (as in FlashDecoding)."""

import triton
import triton.language as tl

from tpi.devices.cuda.programs.activate import tanh
from tpi.devices.cuda.programs.pages import load_vectors


@triton.jit
def attend(
    queries, keys, values, kv_index, positions, sequence, tables, mixed, largest, weight, head_dim, kv_heads, vector,
    longest, span, scale, softcap, window, FORMAT: tl.constexpr, CAPPED: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Attend with one query head of one token over `span` pages; one program for each head, token and split.

    Store the weighted sum of values (`mixed`, not normalised), the sum of weights (`weight`), and the largest score
    (`largest`), to which the weights are relative. `window` 0: all tokens before. `vector` and `longest` are those of
    `append`.
    """
    token, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    position, at = tl.load(positions + token), tl.arange(0, SIZE)
    kv_head = tl.load(kv_index + head)
    first = tl.where(window > 0, tl.maximum(position - window + 1, 0), 0)
    place = (token * tl.num_programs(1) + head).to(tl.int64)
    query = tl.load(queries + place * head_dim + at, mask=at < head_dim, other=0.0)
    row = tables + tl.load(sequence + token) * longest
    begin = first // 32 + split * span
    top, below, total = float("-inf"), 0.0, tl.zeros([SIZE], tl.float32)
    for number in range(begin, tl.minimum(begin + span, position // 32 + 1)):
        page = tl.load(row + number).to(tl.int64)
        other = number * 32 + tl.arange(0, 32)
        seen = (other >= first) & (other <= position)
        inner = tl.arange(0, 32)[:, None]
        head_page = (page * kv_heads + kv_head) * 32 * vector
        inside = seen[:, None] & (at < head_dim)[None, :]
        key = load_vectors(keys, head_page, inner, at[None, :], inside, head_dim, FORMAT, True)
        score = tl.sum(key * query[None, :], axis=1) * scale
        if CAPPED:
            score = tanh(score / softcap) * softcap
        score = tl.where(seen, score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, axis=0))
        shrunk, share = tl.exp(top - higher), tl.exp(score - higher)
        value = load_vectors(values, head_page + inner * vector, 0, at[None, :], inside, head_dim, FORMAT, False)
        total = total * shrunk + tl.sum(value * share[:, None], axis=0)
        below = below * shrunk + tl.sum(share, axis=0)
        top = higher
    part = place * tl.num_programs(2) + split
    tl.store(mixed + part * head_dim + at, total, mask=at < head_dim)
    tl.store(largest + part, top)
    tl.store(weight + part, below)


@triton.jit
def attend_many(
    queries, keys, values, kv_index, positions, sequence, tables, blocks, mixed, largest, weight, head_dim, kv_heads,
    vector, longest, span, scale, softcap, window,
    FORMAT: tl.constexpr, CAPPED: tl.constexpr, SIZE: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Attend as `attend` does, with up to TOKENS tokens of one sequence per program, so that each page is read once.

    `blocks`, `[blocks, 2]`, has the first token of each program, and the number of consecutive tokens from there on.
    """
    block, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    begun, count, number = tl.load(blocks + 2 * block), tl.load(blocks + 2 * block + 1), tl.arange(0, TOKENS)
    held, at = number < count, tl.arange(0, SIZE)
    position = tl.load(positions + begun + number, mask=held, other=-1)
    first = tl.where(window > 0, tl.maximum(position - window + 1, 0), 0)
    lowest, last = tl.min(tl.where(held, first, 1 << 30), axis=0), tl.max(position, axis=0)
    place = ((begun + number) * tl.num_programs(1) + head).to(tl.int64)
    known = held[:, None] & (at < head_dim)[None, :]
    query = tl.load(queries + place[:, None] * head_dim + at[None, :], mask=known, other=0.0)
    row, kv_head = tables + tl.load(sequence + begun) * longest, tl.load(kv_index + head)
    begin = lowest // 32 + split * span
    top = tl.full([TOKENS], float("-inf"), tl.float32)
    below, total = tl.zeros([TOKENS], tl.float32), tl.zeros([TOKENS, SIZE], tl.float32)
    for each in range(begin, tl.minimum(begin + span, last // 32 + 1)):
        page = tl.load(row + each).to(tl.int64)
        other = each * 32 + tl.arange(0, 32)
        inner = tl.arange(0, 32)[:, None]
        head_page = (page * kv_heads + kv_head) * 32 * vector
        inside = ((other >= lowest) & (other <= last))[:, None] & (at < head_dim)[None, :]
        key = load_vectors(keys, head_page, inner, at[None, :], inside, head_dim, FORMAT, True)
        score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        if CAPPED:
            score = tanh(score / softcap) * softcap
        seen = (other[None, :] >= first[:, None]) & (other[None, :] <= position[:, None])
        score = tl.where(seen, score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, axis=1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # 0 for a token that has not seen any other yet
        shrunk, share = tl.exp(top - base), tl.exp(score - base[:, None])
        value = load_vectors(values, head_page + inner * vector, 0, at[None, :], inside, head_dim, FORMAT, False)
        total = total * shrunk[:, None] + tl.dot(share, value, input_precision="ieee")
        below = below * shrunk + tl.sum(share, axis=1)
        top = higher
    part = place * tl.num_programs(2) + split
    tl.store(mixed + part[:, None] * head_dim + at[None, :], total, mask=known)
    tl.store(largest + part, top, mask=held)
    tl.store(weight + part, below, mask=held)


@triton.jit
def merge(mixed, largest, weight, out, head_dim, splits, SIZE: tl.constexpr, SPLITS: tl.constexpr):
    """Merge the splits of one head of one token, `[splits, head_dim]`; a split that saw no token has no weight."""
    place, at, split = tl.program_id(0).to(tl.int64), tl.arange(0, SIZE), tl.arange(0, SPLITS)
    there = split < splits
    tops = tl.load(largest + place * splits + split, mask=there, other=float("-inf"))
    share = tl.exp(tops - tl.max(tops, axis=0))
    below = tl.sum(share * tl.load(weight + place * splits + split, mask=there, other=0.0), axis=0)
    parts = (place * splits + split)[:, None] * head_dim + at[None, :]
    values = tl.load(mixed + parts, mask=there[:, None] & (at < head_dim)[None, :], other=0.0)
    tl.store(out + place * head_dim + at, tl.sum(values * share[:, None], axis=0) / below, mask=at < head_dim)
