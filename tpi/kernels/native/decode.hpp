// Weights in the record layout as floats. A quantised vector is a sequence of GGUF blocks.
#pragma once

#include "elementwise.hpp"

namespace tpi {
namespace {

inline float read_half(const uint8_t* p) {
    uint16_t bits;
    std::memcpy(&bits, p, 2);
    return half_to_float(bits);
}

inline float read_plain(Format format, const uint8_t* vector, size_t i) {
    uint32_t bits;
    if (format == Format::f32) {
        std::memcpy(&bits, vector + 4 * i, 4);
    } else {
        uint16_t half;
        std::memcpy(&half, vector + 2 * i, 2);
        if (format == Format::f16) return half_to_float(half);
        bits = static_cast<uint32_t>(half) << 16;
    }
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

template <Format F> inline F8 load_plain(const uint8_t* vector, size_t i) {
    if constexpr (F == Format::f32) {
        return load_bytes(vector + 4 * i);
    } else if constexpr (F == Format::f16) {
        return load_half(vector + 2 * i);
    } else {
        return load_bf16(vector + 2 * i);
    }
}

// Scales of 8 consecutive blocks, and the terms that are added to scale * code.
template <Format F> inline void load_lines(const uint8_t* block, F8& scale, F8& offset) {
    load_factors(block, group_bytes(F), scale, offset);
    if constexpr (F == Format::q4s) offset = scale * splat(-8.0f);
    if constexpr (F == Format::q8) offset = splat(0.0f);
}

// The codes of a group as four registers of values, before scale and minimum.
template <Format F> inline void load_codes(const uint8_t* codes, F8* out) {
    for (int i = 0; i < 4; ++i) {
        if constexpr (F == Format::q8) {
            out[i] = load_int8(codes + 8 * i);
        } else {
            out[i] = i < 2 ? load_low_nibbles(codes + 8 * i) : load_high_nibbles(codes + 8 * (i - 2));
        }
    }
}

constexpr size_t factor_bytes(Format format) { return format == Format::q4 ? 4 : 2; }

// the term that is added to scale * code
template <Format F> inline float offset_of(const uint8_t* block, float scale) {
    if constexpr (F == Format::q4) return read_half(block + 2);
    if constexpr (F == Format::q4s) return -8.0f * scale;
    return 0.0f;
}

// Values [first, first + count) of a vector as float32; for quantised formats both are multiples of 32.
template <Format F> inline void decode_record(const uint8_t* vector, size_t first, size_t count, float* out) {
    if constexpr (!is_quantised(F)) {
        size_t i = 0;
        for (; i + 8 <= count; i += 8) store(out + i, load_plain<F>(vector, first + i));
        for (; i < count; ++i) out[i] = read_plain(F, vector, first + i);
    } else {
        const uint8_t* block = vector + first / kGroup * group_bytes(F);
        for (size_t i = 0; i < count; i += kGroup, block += group_bytes(F)) {
            float scale = read_half(block);
            F8 values[4];
            load_codes<F>(block + factor_bytes(F), values);
            for (int k = 0; k < 4; ++k)
                store(out + i + 8 * k, fma(values[k], splat(scale), splat(offset_of<F>(block, scale))));
        }
    }
}

template <class Work> inline void with_format(Format format, const Work& work) {
    switch (format) {
        case Format::f32: return work.template operator()<Format::f32>();
        case Format::bf16: return work.template operator()<Format::bf16>();
        case Format::f16: return work.template operator()<Format::f16>();
        case Format::q8: return work.template operator()<Format::q8>();
        case Format::q4: return work.template operator()<Format::q4>();
        default: return work.template operator()<Format::q4s>();
    }
}

}  // namespace
}  // namespace tpi
