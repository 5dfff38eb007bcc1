// Softmax attention over the paged cache, and the rotation of queries and keys. Works page by page with a running
// maximum, so that the context may be of any length. Query rows that share a KV head process a page together, a few at
// a time: a key or value is loaded and widened once for all of them, in registers. A row's result does not depend on
// the other rows.
#pragma once

#include "keys.hpp"

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

// ---- some query rows against one page ----

constexpr size_t kBlockRows = 4;  // query rows that process a page together
constexpr size_t kInPlace = 8;    // most query rows that widen values, and keys in f16, in registers, not in memory

// One query head of one token, and its softmax so far.
struct Row {
    const float* query;      // floats, or for keys in q8 and q4 groups of codes
    size_t token, head;
    size_t first, last;      // positions attended to, both included
    float* mixed;            // [padded dim], sum of weight * value
    float most, total;       // largest score, sum of weights
};

inline Ahead ahead_of(const Kv& cache, size_t row) {
    return {cache.data + row * cache.vector_bytes, kPageTokens * cache.vector_bytes};
}

// A page of one sequence and KV head: its first position, its number of tokens, and its first row in the caches.
struct Page {
    size_t base, count, row;
    Ahead keys, values;  // of the next page
};

// Tokens [from, to) of a page.
struct Span { size_t from, to; };

// The tokens of a page that a row attends to.
inline Span span_of(const Row& row, const Page& page) {
    size_t from = row.first > page.base ? row.first - page.base : 0;
    size_t to = row.last < page.base ? 0 : smaller(row.last + 1 - page.base, page.count);
    return {from < to ? from : 0, from < to ? to : 0};
}

// Set scores outside of a span to `value`.
inline void cover(const Span& span, float value, float* scores) {
    for (size_t j = 0; j < span.from; ++j) scores[j] = value;
    for (size_t j = span.to; j < kPageTokens; ++j) scores[j] = value;
}

// Turn a row's scores into weights, 0 outside its span. Returns the factor for the weights so far.
inline float weigh(Row& row, const Span& span, float softcap, float* scores) {
    cover(span, 0.0f, scores);
    if (softcap > 0)
        for (size_t j = 0; j < kPageTokens; j += 8)
            store(scores + j, tanh(load(scores + j) * splat(1.0f / softcap)) * splat(softcap));
    cover(span, kMasked, scores);
    F8 high = max(max(load(scores), load(scores + 8)), max(load(scores + 16), load(scores + 24)));
    float most = largest(high) > row.most ? largest(high) : row.most;
    for (size_t j = 0; j < kPageTokens; j += 8) {
        F8 below = load(scores + j) - splat(most);
        store(scores + j, exp(below) + (below - below));  // NaN stays NaN
    }
    cover(span, 0.0f, scores);
    F8 keep = exp(splat(row.most - most));
    float kept[8];
    store(kept, keep);
    row.most = most;
    row.total = row.total * kept[0] + sum((load(scores) + load(scores + 8)) + (load(scores + 16) + load(scores + 24)));
    return kept[0];
}

// Add V registers of the span's values, from `d` on, to the rows' mixed values.
template <KvFormat F, size_t R, size_t V>
inline void mix_lanes(Row* rows, const Vectors& values, size_t d, const Span& span, const Scores* weights,
                      const float* keep) {
    Wide acc[R][V];
    for (size_t r = 0; r < R; ++r)
        for (size_t v = 0; v < V; ++v) acc[r][v] = wide_floats(rows[r].mixed + d + v * kWide) * wide(keep[r]);
    for (size_t j = span.from; j < span.to; ++j) {
        Wide value[V], factor = factor_of<F>(values, j, d);
        for (size_t v = 0; v < V; ++v) value[v] = lanes_of<F>(values, j, d + v * kWide, factor);
        for (size_t r = 0; r < R; ++r) {
            Wide weight = wide(weights[r][j]);
            for (size_t v = 0; v < V; ++v) acc[r][v] = fma(weight, value[v], acc[r][v]);
        }
    }
    for (size_t r = 0; r < R; ++r)
        for (size_t v = 0; v < V; ++v) store(rows[r].mixed + d + v * kWide, acc[r][v]);
}

template <KvFormat F, size_t R>
inline void mix_page(Row* rows, const Vectors& values, size_t padded, const Span& span, const Ahead& ahead,
                     const Scores* weights, const float* keep) {
    constexpr size_t V = R > 2 || kWide > 8 ? 2 : 4, step = V * kWide;  // within one group
    size_t d = 0;
    for (; d + step <= padded; d += step) {
        ahead.fetch(d, step, padded);
        mix_lanes<F, R, V>(rows, values, d, span, weights, keep);
    }
    for (; d < padded; d += kWide) mix_lanes<F, R, 1>(rows, values, d, span, weights, keep);
}

// R rows process a page.
template <size_t R>
inline void attend_block(Row* rows, const Page& page, const KeyPage& keys, const Vectors& values, size_t padded,
                         float softcap) {
    Span own[R], all{kPageTokens, 0};
    for (size_t r = 0; r < R; ++r) {
        own[r] = span_of(rows[r], page);
        if (own[r].to) all = {smaller(all.from, own[r].from), larger(all.to, own[r].to)};
    }
    if (!all.to) return;
    alignas(64) Scores scores[R];
    float keep[R];
    const float* queries[R];
    for (size_t r = 0; r < R; ++r) queries[r] = rows[r].query;
    with_format(keys.format, [&]<KvFormat F>() { score_page<F, R>(queries, keys, page.keys, scores); });
    for (size_t r = 0; r < R; ++r) keep[r] = weigh(rows[r], own[r], softcap, scores[r]);
    with_format(values.format,
               [&]<KvFormat F>() { mix_page<F, R>(rows, values, padded, all, page.values, scores, keep); });
}

inline void attend_page(Row* rows, size_t count, Page page, const KeyPage& keys, const Vectors& values, size_t padded,
                        float softcap) {
    for (size_t r = 0; r < count; r += kBlockRows) {
        switch (count - r) {
            case 1: attend_block<1>(rows + r, page, keys, values, padded, softcap); break;
            case 2: attend_block<2>(rows + r, page, keys, values, padded, softcap); break;
            case 3: attend_block<3>(rows + r, page, keys, values, padded, softcap); break;
            default: attend_block<kBlockRows>(rows + r, page, keys, values, padded, softcap);
        }
        page.keys = page.values = {};  // prefetched already
    }
}

// The keys of a page for so many query rows: as stored, or, if they are f16 and many rows use them, widened into
// `buffer`, which has room for kPageTokens * dim floats.
inline KeyPage page_keys(const Kv& cache, const Page& page, size_t dim, size_t rows, float* buffer) {
    const uint8_t* data = cache.data + page.row * cache.vector_bytes;
    if (cache.format != KvFormat::f16 || rows <= kInPlace) return {data, cache.format, dim};
    read_f16(data, kPageTokens * dim, buffer);
    return {reinterpret_cast<const uint8_t*>(buffer), KvFormat::f32, dim};
}

// The values of a page for so many query rows: as stored, or widened into `buffer`.
inline Vectors page_values(const Kv& cache, const Page& page, size_t dim, size_t padded, size_t rows, float* buffer) {
    if (has_lanes(cache.format, dim) && (rows <= kInPlace || cache.format == KvFormat::f32))
        return {cache.data + page.row * cache.vector_bytes, cache.format, cache.vector_bytes, dim};
    for (size_t j = 0; j < kPageTokens; ++j) {
        float* to = buffer + j * padded;
        size_t have = j < page.count ? dim : 0;
        if (have) read_value(cache, page.row + j, dim, to);
        for (size_t d = have; d < padded; ++d) to[d] = 0.0f;
    }
    return {reinterpret_cast<const uint8_t*>(buffer), KvFormat::f32, padded * sizeof(float), padded};
}

}  // namespace
}  // namespace tpi
