// Softmax attention over the paged cache, and the rotation of what goes into it.
// Works block by block with a running maximum, so the context may be of any length.
#pragma once

#include "kv_formats.hpp"

namespace tpi {
namespace {

constexpr float kMasked = -1e30f;

// ---- one vector of a head ----

inline void rotate(float* head, const float* cosine, const float* sine, size_t half) {
    size_t i = 0;
    for (; i + 8 <= half; i += 8) {
        F8 a = load(head + i), b = load(head + half + i), c = load(cosine + i), s = load(sine + i);
        store(head + i, a * c - b * s);
        store(head + half + i, b * c + a * s);
    }
    for (; i < half; ++i) {
        float a = head[i], b = head[half + i];
        head[i] = a * cosine[i] - b * sine[i];
        head[half + i] = b * cosine[i] + a * sine[i];
    }
}

// ---- one query row against one page ----

// One query head of one token, and its softmax so far.
struct Row {
    const float* query;      // [padded dim]
    size_t first, last;      // positions attended to, both included
    float* mixed;            // [padded dim], sum of weight * value
    float most, total;       // largest score, sum of weights
};

// scores of the 32 tokens of a block
inline void score_block(const float* query, const float* keys, size_t padded, float* scores) {
    for (size_t j = 0; j < kPageTokens; j += 8) {
        F8 acc[8];
        for (F8& a : acc) a = splat(0.0f);
        for (size_t d = 0; d < padded; d += 8) {
            F8 q = load(query + d);
            for (int i = 0; i < 8; ++i) acc[i] = fma(q, load(keys + (j + i) * padded + d), acc[i]);
        }
        store(scores + j, sums(acc));
    }
}

template <int V>
inline void mix_values(const float* weights, size_t count, const float* values, size_t padded, F8 keep, float* mixed) {
    F8 acc[V];
    for (int v = 0; v < V; ++v) acc[v] = load(mixed + 8 * v) * keep;
    for (size_t j = 0; j < count; ++j) {
        F8 weight = splat(weights[j]);
        for (int v = 0; v < V; ++v) acc[v] = fma(weight, load(values + j * padded + 8 * v), acc[v]);
    }
    for (int v = 0; v < V; ++v) store(mixed + 8 * v, acc[v]);
}

// Take in the tokens of one block, whose first stands at position `base`; the first `count` are there.
inline void attend_block(Row& row, const float* keys, const float* values, size_t padded, size_t base, size_t count,
                         float softcap) {
    size_t from = row.first > base ? row.first - base : 0;
    size_t to = row.last + 1 - base < count ? row.last + 1 - base : count;
    alignas(32) float scores[kPageTokens];
    score_block(row.query, keys, padded, scores);
    if (softcap > 0)
        for (size_t j = 0; j < kPageTokens; j += 8)
            store(scores + j, tanh(load(scores + j) * splat(1.0f / softcap)) * splat(softcap));
    for (size_t j = 0; j < from; ++j) scores[j] = kMasked;
    for (size_t j = to; j < kPageTokens; ++j) scores[j] = kMasked;
    F8 high = max(max(load(scores), load(scores + 8)), max(load(scores + 16), load(scores + 24)));
    float most = largest(high) > row.most ? largest(high) : row.most;
    for (size_t j = 0; j < kPageTokens; j += 8) store(scores + j, exp(load(scores + j) - splat(most)));
    for (size_t j = 0; j < from; ++j) scores[j] = 0.0f;
    for (size_t j = to; j < kPageTokens; ++j) scores[j] = 0.0f;
    F8 keep = exp(splat(row.most - most));
    float kept[8];
    store(kept, keep);
    row.most = most;
    row.total = row.total * kept[0] + sum((load(scores) + load(scores + 8)) + (load(scores + 16) + load(scores + 24)));
    size_t d = 0;
    for (; d + 64 <= padded; d += 64) mix_values<8>(scores, to, values + d, padded, keep, row.mixed + d);
    for (; d + 32 <= padded; d += 32) mix_values<4>(scores, to, values + d, padded, keep, row.mixed + d);
    for (; d < padded; d += 8) mix_values<1>(scores, to, values + d, padded, keep, row.mixed + d);
}

// `count` vectors of a block from `row` on, as floats [32, padded], zeros behind; in place where they already are.
inline const float* block_vectors(const Kv& cache, size_t row, size_t count, size_t dim, size_t padded, float* buffer) {
    if (cache.format == KvFormat::f32 && dim == padded && count == kPageTokens)
        return reinterpret_cast<const float*>(cache.data + row * cache.vector_bytes);
    for (size_t j = 0; j < kPageTokens; ++j) {
        float* to = buffer + j * padded;
        size_t have = j < count ? dim : 0;
        if (have) read_kv(cache, row + j, dim, to);
        for (size_t d = have; d < padded; ++d) to[d] = 0.0f;
    }
    return buffer;
}

}  // namespace
}  // namespace tpi
