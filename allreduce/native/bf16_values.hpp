// Conversion to and from bfloat16, the upper half of a float32. Values in messages need not be aligned.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace tpi {

inline float widened(const uint8_t* from) {
    uint16_t upper;
    std::memcpy(&upper, from, sizeof upper);
    return std::bit_cast<float>(static_cast<uint32_t>(upper) << 16);
}

// Rounds to nearest, ties to even. NaN stays NaN.
inline uint16_t rounded(float value) {
    auto bits = std::bit_cast<uint32_t>(value);
    auto nearest = static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    return value == value ? nearest : 0x7fc0;  // rounding could carry a NaN into infinity or zero
}

// Writes `count` values, rounded to bfloat16, to `to`.
inline void narrow(const float* values, size_t count, uint8_t* to) {
    for (size_t i = 0; i < count; ++i) {
        const uint16_t upper = rounded(values[i]);
        std::memcpy(to + 2 * i, &upper, sizeof upper);
    }
}

// Reads `count` values, and adds them to `out` or overwrites it.
inline void widen(const uint8_t* from, size_t count, bool add, float* out) {
    if (add)
        for (size_t i = 0; i < count; ++i) out[i] += widened(from + 2 * i);
    else
        for (size_t i = 0; i < count; ++i) out[i] = widened(from + 2 * i);
}

}  // namespace tpi
