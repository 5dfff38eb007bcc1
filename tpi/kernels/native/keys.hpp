// Pages of keys, which lie transposed, and the scores of queries against them. A register holds the same values of
// neighbouring tokens, so that no sum runs across its lanes.
//
// A page has the codes of 32 keys in units, and then the factors of their groups (none in f32 and f16). A unit is one
// value in f32 and f16, and a word of 4 bytes in q8 and q4. The units of the same values of all 32 tokens are adjacent,
// and so are the factors of the same group; each factor is an f16.
#pragma once

#include "kv_formats.hpp"

namespace tpi {
namespace {

using Scores = float[kPageTokens];

constexpr bool has_codes(KvFormat format) { return format == KvFormat::q8 || format == KvFormat::q4; }

// ---- writing one key ----

// Copy `bytes` bytes in units of `Unit` bytes to a token's place in its page; `to` is that of the first unit.
template <size_t Unit> inline void scatter(uint8_t* to, const uint8_t* from, size_t bytes) {
    for (size_t i = 0; i < bytes; i += Unit) std::memcpy(to + i * kPageTokens, from + i, Unit);
}

// `row` is the token's row in the cache.
inline void write_key(const Kv& cache, size_t row, const float* head, size_t dim) {
    size_t token = row % kPageTokens, all = code_bytes(cache.format, dim);
    uint8_t* page = cache.data + (row - token) * cache.vector_bytes;
    uint8_t* factors_to = page + all * kPageTokens + 2 * token;
    for (size_t d = 0; d < dim; d += kGroup, factors_to += factor_bytes(cache.format) * kPageTokens) {
        uint8_t codes[kGroup * sizeof(float)], factors[4] = {};
        size_t count = smaller(dim - d, kGroup), bytes = code_bytes(cache.format, count);
        write_group(cache.format, codes, factors, head + d, count);
        uint8_t* to = page + code_bytes(cache.format, d) * kPageTokens;
        if (cache.format == KvFormat::f16) scatter<2>(to + 2 * token, codes, bytes);
        else scatter<4>(to + 4 * token, codes, bytes);
        scatter<2>(factors_to, factors, factor_bytes(cache.format));
    }
}

// ---- queries in integers ----

// A group of a query, for keys in q8 and q4. It takes the place of the group's 32 floats. A value is `scale` * code.
struct QueryGroup {
    float scale, total;      // `total` is the sum of the values
    int16_t codes[kGroup];   // of each four values in the order 0, 2, 1, 3: see even_bytes and odd_bytes
};
static_assert(sizeof(QueryGroup) <= kGroup * sizeof(float));

inline const QueryGroup& query_group(const float* query, size_t number) {
    return *reinterpret_cast<const QueryGroup*>(query + number * kGroup);
}

// Round a query of `dim` values to 16 bits, in place; there is room for whole groups. NaN and infinity result in NaN.
inline void round_query(float* query, size_t dim) {
    for (size_t d = 0; d < dim; d += kGroup) {
        float group[kGroup] = {};
        std::memcpy(group, query + d, smaller(dim - d, kGroup) * sizeof(float));
        F8 most = splat(0.0f), total = most;
        for (size_t i = 0; i < kGroup; i += 8) {
            most = max(most, abs(load(group + i)));
            total = total + abs(load(group + i));
        }
        float scale = largest(most) / 32767.0f;
        F8 inverse = splat(scale > 1e-30f ? 1.0f / scale : 0.0f);
        for (size_t i = 0; i < kGroup; i += 8)
            store(group + i, min(max(round(load(group + i) * inverse), splat(-32767.0f)), splat(32767.0f)));
        QueryGroup to{scale + 0.0f * sum(total), 0.0f, {}};
        int32_t codes = 0;
        for (size_t i = 0; i < kGroup; ++i) {
            auto code = static_cast<int16_t>(group[i]);
            to.codes[i / 4 * 4 + i % 2 * 2 + i % 4 / 2] = code;
            codes += code;
        }
        to.total = to.scale * static_cast<float>(codes);
        std::memcpy(query + d, &to, sizeof to);
    }
}

// ---- scores ----

// A page of keys of one head: as stored, or f16 widened to f32.
struct KeyPage {
    const uint8_t* data;
    KvFormat format;
    size_t dim;
};

// Add the products of R queries with a word of some tokens' keys. `codes[r]` are those of the word's group in a query.
template <KvFormat F, size_t R, size_t T>
TPI_INLINE void score_word(const uint8_t* from, size_t word, const int16_t* const* codes, WideInt (*total)[T]) {
    constexpr size_t kPairs = F == KvFormat::q8 ? 2 : 4;
    size_t first = F == KvFormat::q8 ? 4 * word : word / 2 * kCodeRun + word % 2 * 4;
    TPI_UNROLL for (size_t v = 0; v < T; ++v) {
        WideBytes bytes = wide_bytes(from + v * kWide * kWordBytes);
        WidePairs pairs[kPairs];
        if constexpr (F == KvFormat::q8) {
            pairs[0] = even_bytes(bytes);
            pairs[1] = odd_bytes(bytes);
        } else {
            pairs[0] = nibbles<0>(bytes);
            pairs[1] = nibbles<8>(bytes);
            pairs[2] = nibbles<4>(bytes);
            pairs[3] = nibbles<12>(bytes);
        }
        TPI_UNROLL for (size_t r = 0; r < R; ++r)
            TPI_UNROLL for (size_t p = 0; p < kPairs; ++p)
                total[r][v] = dot_pairs(total[r][v], pairs[p], codes[r] + first + p / 2 * 8 + p % 2 * 2);
    }
}

// Add the scores of one group, from its `words` words. `from` and `factors` are those of the first of some tokens.
template <KvFormat F, size_t R, size_t T>
TPI_INLINE void score_group(const float* const* queries, size_t group, const uint8_t* from, const uint8_t* factors,
                            size_t words, Wide (*scores)[T]) {
    const int16_t* codes[R];
    WideInt total[R][T];
    for (size_t r = 0; r < R; ++r) {
        codes[r] = query_group(queries[r], group).codes;
        for (size_t v = 0; v < T; ++v) total[r][v] = wide_int(0);
    }
    for (size_t word = 0; word < words; ++word)
        score_word<F, R, T>(from + word * kPageTokens * kWordBytes, word, codes, total);
    TPI_UNROLL for (size_t v = 0; v < T; ++v) {
        Wide scale = wide_halves(factors + 2 * v * kWide), least = scale;
        if constexpr (F == KvFormat::q4) least = wide_halves(factors + 2 * (v * kWide + kPageTokens));
        TPI_UNROLL for (size_t r = 0; r < R; ++r) {
            const QueryGroup& query = query_group(queries[r], group);
            scores[r][v] = fma(to_float(total[r][v]) * wide(query.scale), scale, scores[r][v]);
            if constexpr (F == KvFormat::q4) scores[r][v] = fma(wide(query.total), least, scores[r][v]);
        }
    }
}

// Set scores[r][v] from keys in codes; `token` is the first of T registers of tokens.
template <KvFormat F, size_t R, size_t T>
inline void score_codes(const float* const* queries, const KeyPage& keys, size_t token, const Ahead& ahead,
                        Wide (*scores)[T]) {
    constexpr size_t kWords = code_bytes(F, kGroup) / kWordBytes;
    size_t words = code_bytes(F, keys.dim) / kWordBytes, groups = round_up(keys.dim, kGroup) / kGroup;
    const uint8_t* factors = keys.data + words * kWordBytes * kPageTokens + 2 * token;
    for (size_t g = 0; g < groups; ++g, factors += factor_bytes(F) * kPageTokens) {
        ahead.fetch(token * groups + g * T * kWide, T * kWide, kPageTokens * groups);
        const uint8_t* from = keys.data + (g * kWords * kPageTokens + token) * kWordBytes;
        score_group<F, R, T>(queries, g, from, factors, smaller(words - g * kWords, kWords), scores);
    }
}

// The same from keys in floats.
template <KvFormat F, size_t R, size_t T>
inline void score_floats(const float* const* queries, const KeyPage& keys, size_t token, const Ahead& ahead,
                         Wide (*scores)[T]) {
    constexpr size_t kBytes = code_bytes(F, 1), kTurn = 8;
    for (size_t d = 0; d < keys.dim;) {
        size_t end = smaller(d + kTurn, keys.dim);
        ahead.fetch(token * keys.dim + d * T * kWide, (end - d) * T * kWide, kPageTokens * keys.dim);
        for (; d < end; ++d) {
            const uint8_t* from = keys.data + (d * kPageTokens + token) * kBytes;
            Wide key[T];
            for (size_t v = 0; v < T; ++v)
                key[v] = F == KvFormat::f16 ? wide_halves(from + v * kWide * kBytes) : wide_floats(from + v * kWide * kBytes);
            for (size_t r = 0; r < R; ++r) {
                Wide query = wide(queries[r][d]);
                for (size_t v = 0; v < T; ++v) scores[r][v] = fma(query, key[v], scores[r][v]);
            }
        }
    }
}

// Set scores[r][j] for all tokens of the page, also for those that were never written. R and the number of tokens that
// are computed together change the speed only: each score is a sum in the order of the values.
template <KvFormat F, size_t R>
inline void score_page(const float* const* queries, const KeyPage& keys, const Ahead& ahead, Scores* scores) {
    constexpr size_t kFew = kWide > 8 ? 1 : 2, T = has_codes(F) ? 2 : R > 2 ? kFew : 2 * kFew;
    for (size_t token = 0; token < kPageTokens; token += T * kWide) {
        Wide found[R][T];
        for (size_t r = 0; r < R; ++r)
            for (size_t v = 0; v < T; ++v) found[r][v] = wide(0.0f);
        if constexpr (has_codes(F)) score_codes<F, R, T>(queries, keys, token, ahead, found);
        else score_floats<F, R, T>(queries, keys, token, ahead, found);
        for (size_t r = 0; r < R; ++r)
            for (size_t v = 0; v < T; ++v) store(scores[r] + token + v * kWide, found[r][v]);
    }
}

}  // namespace
}  // namespace tpi
