// The payload of a frame: float32 values in one of the wire formats (tpi/net/wire.py). It need not be aligned.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>

#include "bf16_values.hpp"
#include "q8_values.hpp"

namespace tpi {

enum class Wire : uint8_t { f32 = 0, bf16 = 1, q8 = 2 };

inline Wire wire_of(uint8_t code) {
    if (code > static_cast<uint8_t>(Wire::q8)) throw std::invalid_argument("no wire format " + std::to_string(code));
    return static_cast<Wire>(code);
}

inline size_t payload_bytes(Wire wire, size_t count) {
    switch (wire) {
        case Wire::bf16: return 2 * count;
        case Wire::q8: return q8_bytes(count);
        default: return sizeof(float) * count;
    }
}

// Encodes `count` values to `to`.
inline void encode(Wire wire, const float* values, size_t count, uint8_t* to) {
    switch (wire) {
        case Wire::bf16: return narrow(values, count, to);
        case Wire::q8: return to_q8(values, count, to);
        default: std::memcpy(to, values, sizeof(float) * count);
    }
}

// Reads `count` float32 values, and adds them to `out` or overwrites it.
inline void from_f32(const uint8_t* from, size_t count, bool add, float* out) {
    if (!add) {
        std::memcpy(out, from, sizeof(float) * count);
        return;
    }
    for (size_t i = 0; i < count; ++i) {
        float value;
        std::memcpy(&value, from + sizeof value * i, sizeof value);
        out[i] += value;
    }
}

// Decodes `count` values, and adds them to `out` or overwrites it.
inline void decode(Wire wire, const uint8_t* from, size_t count, bool add, float* out) {
    switch (wire) {
        case Wire::bf16: return widen(from, count, add, out);
        case Wire::q8: return from_q8(from, count, add, out);
        default: from_f32(from, count, add, out);
    }
}

}  // namespace tpi
