// Conversion to and from q8 (GGUF's Q8_0): groups of 32 values share an f16 scale, their largest magnitude / 127; codes
// are in -127..127. Values in messages need not be aligned. The last group is padded with 0.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace tpi {

constexpr size_t kGroup = 32;
constexpr size_t kGroupBytes = sizeof(uint16_t) + kGroup;

inline size_t q8_bytes(size_t count) { return (count + kGroup - 1) / kGroup * kGroupBytes; }

// Returns the f16 code of a magnitude of at most 65504, rounded to nearest, ties to even.
inline uint16_t half_of(float magnitude) {
    const auto bits = std::bit_cast<uint32_t>(magnitude);
    if (bits < 0x38800000)  // subnormal: adding 0.5 leaves the rounded code in the low bits
        return static_cast<uint16_t>(std::bit_cast<uint32_t>(magnitude + 0.5f) & 0x3fff);
    return static_cast<uint16_t>((bits - 0x38000000 + 0xfff + (bits >> 13 & 1)) >> 13);
}

// Returns the value of an f16 code without sign. Infinity and NaN become NaN.
inline float of_half(uint16_t code) {
    if (code >= 0x7c00) return std::bit_cast<float>(0x7fc00000);
    return std::bit_cast<float>(static_cast<uint32_t>(code) << 13) * 5.192296858534828e33f;  // 2^112
}

// Encodes `count` values, at most 32, as a scale and 32 codes.
inline void encode_group(const float* values, size_t count, uint8_t* to) {
    constexpr float kMost = 127, kLargestHalf = 65504, kRounding = 12582912;  // 1.5 * 2^23: adding it rounds to whole
    float padded[kGroup] = {}, largest = 0;
    std::memcpy(padded, values, count * sizeof(float));
    bool finite = true;
    for (float value : padded) {
        finite &= std::isfinite(value);
        largest = std::max(largest, std::fabs(value));
    }
    const uint16_t scale = finite ? half_of(std::min(largest / kMost, kLargestHalf)) : 0x7e00;
    std::memcpy(to, &scale, sizeof scale);
    const float inverse = finite && scale ? 1 / of_half(scale) : 0;
    for (size_t i = 0; i < kGroup; ++i) {
        const float steps = finite ? std::clamp(padded[i] * inverse, -kMost, kMost) : 0;
        to[sizeof scale + i] = static_cast<uint8_t>(static_cast<int8_t>(steps + kRounding - kRounding));
    }
}

// Encodes `count` values to `to`.
inline void to_q8(const float* values, size_t count, uint8_t* to) {
    for (size_t first = 0; first < count; first += kGroup, to += kGroupBytes)
        encode_group(values + first, std::min(kGroup, count - first), to);
}

// Decodes `count` values, and adds them to `out` or overwrites it.
inline void from_q8(const uint8_t* from, size_t count, bool add, float* out) {
    for (size_t first = 0; first < count; first += kGroup, from += kGroupBytes) {
        uint16_t code;
        std::memcpy(&code, from, sizeof code);
        const float scale = of_half(code);
        for (size_t i = 0; i < std::min(kGroup, count - first); ++i) {
            const float value = static_cast<int8_t>(from[sizeof code + i]) * scale;
            out[first + i] = add ? out[first + i] + value : value;
        }
    }
}

}  // namespace tpi
