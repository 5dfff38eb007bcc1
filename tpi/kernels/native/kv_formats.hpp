// One key or value of a head, to and from each format of the cache.
#pragma once

#include "wide.hpp"

namespace tpi {
namespace {

inline size_t smaller(size_t a, size_t b) { return a < b ? a : b; }
inline size_t larger(size_t a, size_t b) { return a > b ? a : b; }

inline uint16_t put_half(uint8_t* to, float value) {
    uint16_t half = float_to_half(value);
    std::memcpy(to, &half, 2);
    return half;
}

inline float take_half(const uint8_t* from) {
    uint16_t half;
    std::memcpy(&half, from, 2);
    return half_to_float(half);
}

// ---- f16 ----

inline void write_f16(uint8_t* to, const float* head, size_t dim) {
    size_t i = 0;
    for (; i + 8 <= dim; i += 8) store_half(to + 2 * i, load(head + i));
    for (; i < dim; ++i) put_half(to + 2 * i, head[i]);
}

inline void read_f16(const uint8_t* from, size_t dim, float* out) {
    size_t i = 0;
    for (; i + 8 <= dim; i += 8) store(out + i, load_half(from + 2 * i));
    for (; i < dim; ++i) out[i] = take_half(from + 2 * i);
}

// ---- q8: int8 codes, then the scale of each group ----

inline void write_q8_group(uint8_t* codes, uint8_t* factor, const float* x, size_t count) {
    float most = 0;
    for (size_t i = 0; i < count; ++i) most = std::fabs(x[i]) > most ? std::fabs(x[i]) : most;
    float scale = half_to_float(put_half(factor, most / 127.0f)), inverse = scale > 0 ? 1.0f / scale : 0.0f;
    for (size_t i = 0; i < count; ++i) {
        float code = std::nearbyint(x[i] * inverse);
        code = code > 127 ? 127 : code < -127 ? -127 : code;
        codes[i] = static_cast<uint8_t>(static_cast<int8_t>(code));
    }
    for (size_t i = count; i < round_up(count, kWordBytes); ++i) codes[i] = 0;
}

inline void read_q8(const uint8_t* from, size_t dim, float* out) {
    for (size_t first = 0; first < dim; first += kGroup) {
        float factor = take_half(from + code_bytes(KvFormat::q8, dim) + first / kGroup * 2);
        F8 scale = splat(factor);
        size_t i = first, last = first + smaller(dim - first, kGroup);
        for (; i + 8 <= last; i += 8) store(out + i, load_int8(from + i) * scale);
        for (; i < last; ++i) out[i] = static_cast<int8_t>(from[i]) * factor;
    }
}

// ---- q4: 4-bit codes in runs of 16, with values i and i + 8 in one byte, then scale and minimum of each group ----

inline void write_q4_group(uint8_t* codes, uint8_t* factors, const float* x, size_t count) {
    float least = x[0], most = x[0];
    for (size_t i = 1; i < count; ++i) {
        least = x[i] < least ? x[i] : least;
        most = x[i] > most ? x[i] : most;
    }
    float scale = half_to_float(put_half(factors, (most - least) / 15.0f)), inverse = scale > 0 ? 1.0f / scale : 0.0f;
    float base = half_to_float(put_half(factors + 2, least));
    std::memset(codes, 0, round_up(count, kCodeRun) / 2);
    for (size_t i = 0; i < count; ++i) {
        float code = std::nearbyint((x[i] - base) * inverse);
        code = code > 15 ? 15 : code > 0 ? code : 0;
        codes[i / kCodeRun * 8 + i % 8] |= static_cast<uint8_t>(static_cast<int>(code) << (i & 8 ? 4 : 0));
    }
}

inline void read_q4(const uint8_t* from, size_t dim, float* out) {
    const uint8_t* factors = from + code_bytes(KvFormat::q4, dim);
    F8 scale{}, least{};
    for (size_t first = 0; first < dim; first += kCodeRun) {
        if (first % kGroup == 0) {
            scale = splat(take_half(factors + first / kGroup * 4));
            least = splat(take_half(factors + first / kGroup * 4 + 2));
        }
        store_some(out + first, fma(load_low_nibbles(from + first / 2), scale, least), dim - first);
        if (first + 8 < dim)
            store_some(out + first + 8, fma(load_high_nibbles(from + first / 2), scale, least), dim - first - 8);
    }
}

// ---- vectors of a page, in registers ----

// The values of one head in a page: as stored, or widened.
struct Vectors {
    const uint8_t* data;  // of the first token
    KvFormat format;
    size_t bytes, dim;     // of a vector

    const uint8_t* at(size_t token) const { return data + token * bytes; }
};

// Return true if a register of values can be loaded at every multiple of its lanes.
inline bool has_lanes(KvFormat format, size_t dim) { return format != KvFormat::q4 && dim % kWide == 0; }

// The factor of the values of a token's group from `d` on.
template <KvFormat F> inline Wide factor_of(const Vectors& from, size_t token, size_t d) {
    if constexpr (F == KvFormat::q8) return wide_half(from.at(token) + code_bytes(F, from.dim) + d / kGroup * 2);
    else return Wide{};
}

// Load a register of a token's values from `d` on, with the bits of `read_value`.
template <KvFormat F> inline Wide lanes_of(const Vectors& from, size_t token, size_t d, Wide factor) {
    if constexpr (F == KvFormat::q8) return wide_int8(from.at(token) + d) * factor;
    else if constexpr (F == KvFormat::f16) return wide_halves(from.at(token) + 2 * d);
    else return wide_floats(from.at(token) + 4 * d);
}

template <class Work> inline void with_format(KvFormat format, const Work& work) {
    switch (format) {
        case KvFormat::f16: return work.template operator()<KvFormat::f16>();
        case KvFormat::q8: return work.template operator()<KvFormat::q8>();
        case KvFormat::q4: return work.template operator()<KvFormat::q4>();
        default: return work.template operator()<KvFormat::f32>();
    }
}

// The next page's vectors, prefetched in parts while this page is computed, so that memory is always busy.
struct Ahead {
    const uint8_t* data;  // of the first token; or null
    size_t bytes;         // of all tokens

    // Prefetch `count` of `of` equal parts, beginning with number `part`.
    void fetch(size_t part, size_t count, size_t of) const {
        if (data) prefetch_bytes(data + part * bytes / of, count * bytes / of);
    }
};

// ---- spreading ----

inline bool is_spread(const Kv& keys) { return keys.format == KvFormat::q4; }

// Multiply each whole group with the Hadamard matrix / sqrt(32), in place: for keys in q4 and their queries.
inline void spread(float* head, size_t dim) {
    for (size_t start = 0; start + kGroup <= dim; start += kGroup) {
        float* group = head + start;
        for (size_t reach = kGroup / 2; reach; reach /= 2)
            for (size_t i = 0; i < kGroup; ++i) {
                if (i & reach) continue;
                float first = group[i], second = group[i + reach];
                group[i] = first + second;
                group[i + reach] = first - second;
            }
        for (size_t i = 0; i < kGroup; ++i) group[i] *= 0.17677669529663689f;
    }
}

// ---- by the format of the cache ----

// Write the codes and factors of one group, of at most kGroup values.
inline void write_group(KvFormat format, uint8_t* codes, uint8_t* factors, const float* x, size_t count) {
    switch (format) {
        case KvFormat::f32: std::memcpy(codes, x, count * sizeof(float)); return;
        case KvFormat::f16: write_f16(codes, x, count); return;
        case KvFormat::q8: write_q8_group(codes, factors, x, count); return;
        case KvFormat::q4: write_q4_group(codes, factors, x, count); return;
    }
}

inline void write_value(const Kv& cache, size_t row, const float* head, size_t dim) {
    uint8_t* to = cache.data + row * cache.vector_bytes;
    uint8_t* factors = to + code_bytes(cache.format, dim);
    for (size_t d = 0; d < dim; d += kGroup, factors += factor_bytes(cache.format))
        write_group(cache.format, to + code_bytes(cache.format, d), factors, head + d, smaller(dim - d, kGroup));
}

inline void read_value(const Kv& cache, size_t row, size_t dim, float* out) {
    const uint8_t* from = cache.data + row * cache.vector_bytes;
    switch (cache.format) {
        case KvFormat::f32: std::memcpy(out, from, dim * sizeof(float)); return;
        case KvFormat::f16: read_f16(from, dim, out); return;
        case KvFormat::q8: read_q8(from, dim, out); return;
        case KvFormat::q4: read_q4(from, dim, out); return;
    }
}

}  // namespace
}  // namespace tpi
