// Eight lanes in portable C++, which every machine can run, as the reference of the other instruction sets. Every
// simd_*.hpp defines the same names: F8, I8, their operations, and the integer products of a tile.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "types.hpp"

namespace tpi {
namespace {

constexpr const char* kIsaName = "scalar";

struct F8 { float lane[8]; };
struct I8 { int32_t lane[8]; };

#define TPI_LANES for (int i = 0; i < 8; ++i)

inline F8 load(const float* p) { F8 r; std::memcpy(r.lane, p, 32); return r; }
inline F8 load_bytes(const uint8_t* p) { F8 r; std::memcpy(r.lane, p, 32); return r; }
inline void store(float* p, F8 a) { std::memcpy(p, a.lane, 32); }
inline F8 splat(float s) { F8 r; TPI_LANES r.lane[i] = s; return r; }
inline F8 operator+(F8 a, F8 b) { TPI_LANES a.lane[i] += b.lane[i]; return a; }
inline F8 operator-(F8 a, F8 b) { TPI_LANES a.lane[i] -= b.lane[i]; return a; }
inline F8 operator*(F8 a, F8 b) { TPI_LANES a.lane[i] *= b.lane[i]; return a; }
inline F8 operator/(F8 a, F8 b) { TPI_LANES a.lane[i] /= b.lane[i]; return a; }
inline F8 fma(F8 a, F8 b, F8 c) { return a * b + c; }
inline F8 max(F8 a, F8 b) { TPI_LANES a.lane[i] = a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]; return a; }
inline F8 min(F8 a, F8 b) { TPI_LANES a.lane[i] = a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i]; return a; }
inline F8 abs(F8 a) { TPI_LANES a.lane[i] = std::fabs(a.lane[i]); return a; }
inline F8 round(F8 a) { TPI_LANES a.lane[i] = std::nearbyint(a.lane[i]); return a; }
inline float sum(F8 a) { float s = 0; TPI_LANES s += a.lane[i]; return s; }
inline float largest(F8 a) { float s = a.lane[0]; TPI_LANES s = a.lane[i] > s ? a.lane[i] : s; return s; }
inline F8 to_float(I8 a) { F8 r; TPI_LANES r.lane[i] = static_cast<float>(a.lane[i]); return r; }
inline I8 to_int(F8 a) { I8 r; TPI_LANES r.lane[i] = static_cast<int32_t>(std::nearbyint(a.lane[i])); return r; }

// 2^n for whole n in [-126, 127]
inline F8 power_of_two(F8 n) {
    F8 r;
    TPI_LANES {
        uint32_t bits = static_cast<uint32_t>(static_cast<int32_t>(n.lane[i]) + 127) << 23;
        std::memcpy(&r.lane[i], &bits, 4);
    }
    return r;
}

inline float half_to_float(uint16_t half) {
    uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16, magnitude = half & 0x7fff, bits;
    float value;
    if (magnitude >= 0x7c00) {
        bits = 0x7f800000 | (magnitude & 0x3ff) << 13;
    } else {  // scale the exponent by multiplying, which is exact for subnormals too
        bits = magnitude << 13;
        std::memcpy(&value, &bits, 4);
        value *= 5.192296858534828e33f;  // 2^112
        std::memcpy(&bits, &value, 4);
    }
    bits |= sign;
    std::memcpy(&value, &bits, 4);
    return value;
}

inline uint16_t float_to_half(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    uint32_t sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00);
    if (magnitude >= 0x477ff000) return static_cast<uint16_t>(sign | 0x7c00);
    if (magnitude < 0x38800000) {  // subnormal: adding 0.5 leaves the rounded code in the low bits
        float tiny;
        std::memcpy(&tiny, &magnitude, 4);
        tiny += 0.5f;
        std::memcpy(&bits, &tiny, 4);
        return static_cast<uint16_t>(sign | (bits & 0x3fff));
    }
    uint32_t rounded = magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1);
    return static_cast<uint16_t>(sign | rounded >> 13);
}

inline F8 splat_half(const void* p) {
    uint16_t half;
    std::memcpy(&half, p, 2);
    return splat(half_to_float(half));
}
inline F8 load_half(const void* p) {
    uint16_t h[8];
    std::memcpy(h, p, 16);
    F8 r;
    TPI_LANES r.lane[i] = half_to_float(h[i]);
    return r;
}
inline void store_half(void* p, F8 a) {
    uint16_t h[8];
    TPI_LANES h[i] = float_to_half(a.lane[i]);
    std::memcpy(p, h, 16);
}
inline F8 load_bf16(const void* p) {
    uint16_t h[8];
    std::memcpy(h, p, 16);
    F8 r;
    TPI_LANES { uint32_t bits = static_cast<uint32_t>(h[i]) << 16; std::memcpy(&r.lane[i], &bits, 4); }
    return r;
}
inline F8 load_int8(const void* p) {
    int8_t c[8];
    std::memcpy(c, p, 8);
    F8 r;
    TPI_LANES r.lane[i] = c[i];
    return r;
}
// low (high) halves of 8 bytes
inline F8 load_low_nibbles(const uint8_t* p) { F8 r; TPI_LANES r.lane[i] = p[i] & 15; return r; }
inline F8 load_high_nibbles(const uint8_t* p) { F8 r; TPI_LANES r.lane[i] = p[i] >> 4; return r; }
// lanes rounded to int8, 8 bytes
inline void store_int8(int8_t* p, F8 a) { TPI_LANES p[i] = static_cast<int8_t>(std::nearbyint(a.lane[i])); }

inline void prefetch(const void* p) {
#if defined(__GNUC__)
    __builtin_prefetch(p);
#else
    (void)p;
#endif
}

// 16-bit integers
inline I8 load_int16(const void* p) {
    int16_t words[8];
    std::memcpy(words, p, 16);
    I8 r;
    TPI_LANES r.lane[i] = words[i];
    return r;
}
// `Bits` bits of each lane from bit `At` on, with the sign of the highest
template <int At, int Bits> inline I8 signed_bits(I8 a) {
    TPI_LANES a.lane[i] = static_cast<int32_t>(static_cast<uint32_t>(a.lane[i]) << (32 - At - Bits)) >> (32 - Bits);
    return a;
}
template <int At, int Bits> inline I8 unsigned_bits(I8 a) {
    TPI_LANES a.lane[i] = a.lane[i] >> At & ((1 << Bits) - 1);
    return a;
}

// Four bytes for each of 8 lanes.
struct B32 { uint8_t byte[32]; };

inline B32 load_b32(const uint8_t* p) { B32 r; std::memcpy(r.byte, p, 32); return r; }
inline B32 operator|(B32 a, B32 b) { for (int i = 0; i < 32; ++i) a.byte[i] |= b.byte[i]; return a; }
// Bytes shifted to the right by `Shift` bits (to the left if negative), of which the bits of `mask` stay.
template <int Shift> inline B32 shifted(B32 a, int mask) {
    for (uint8_t& byte : a.byte)
        byte = static_cast<uint8_t>((Shift < 0 ? byte << (Shift < 0 ? -Shift : 0) : byte >> (Shift < 0 ? 0 : Shift)) & mask);
    return a;
}
// Values of a table of 16 by codes.
inline B32 look_up(const int8_t* table, B32 codes) {
    for (uint8_t& byte : codes.byte) byte = static_cast<uint8_t>(table[byte]);
    return codes;
}
// total + sum of the products of each lane's four bytes with x[0..3]; codes are at most 127
inline I8 dot_signed(I8 total, B32 values, const int8_t* x) {
    TPI_LANES for (int k = 0; k < 4; ++k) total.lane[i] += static_cast<int8_t>(values.byte[4 * i + k]) * x[k];
    return total;
}
inline I8 dot_codes(I8 total, B32 codes, const int8_t* x) { return dot_signed(total, codes, x); }
inline I8 no_dots() { return I8{}; }

// Two int16 for each of 8 lanes.
struct Pairs { int16_t first[8], second[8]; };

// The signed bytes 0 and 2 of every lane, and its bytes 1 and 3.
inline Pairs even_bytes(B32 a) {
    Pairs r;
    TPI_LANES { r.first[i] = static_cast<int8_t>(a.byte[4 * i]); r.second[i] = static_cast<int8_t>(a.byte[4 * i + 2]); }
    return r;
}
inline Pairs odd_bytes(B32 a) {
    Pairs r;
    TPI_LANES { r.first[i] = static_cast<int8_t>(a.byte[4 * i + 1]); r.second[i] = static_cast<int8_t>(a.byte[4 * i + 3]); }
    return r;
}
// Four bits of every lane's two 16-bit halves, from bit `Shift` on.
template <int Shift> inline Pairs nibbles(B32 a) {
    constexpr int kByte = Shift / 8, kBits = Shift % 8;
    Pairs r;
    TPI_LANES {
        r.first[i] = a.byte[4 * i + kByte] >> kBits & 15;
        r.second[i] = a.byte[4 * i + 2 + kByte] >> kBits & 15;
    }
    return r;
}
// total + first * x[0] + second * x[1] in every lane
inline I8 dot_pairs(I8 total, Pairs a, const int16_t* x) {
    TPI_LANES total.lane[i] += a.first[i] * x[0] + a.second[i] * x[1];
    return total;
}
inline I8 splat_int(int32_t value) { I8 r; TPI_LANES r.lane[i] = value; return r; }

// The largest range of the numbers of a code book that become codes without a sign.
constexpr int kMostSpread = 0;

// out[t] += products of 16 inputs: codes, four words of 4 bytes for each of 8 outputs, and x[t * stride]. The largest
// code is `Most`; 0: they have a sign.
template <int Most, int N> TPI_INLINE void add_words(const uint8_t* codes, const int8_t* x, size_t stride, I8 (*out)[1]) {
    for (size_t word = 0; word < 4; ++word)
        for (size_t t = 0; t < N; ++t)
            out[t][0] = dot_signed(out[t][0], load_b32(codes + 32 * word), x + t * stride + 4 * word);
}

// Sum over a tile's 32 inputs of code * x, for each of its 8 outputs and N tokens.
template <int N> inline void tile_q4(const uint8_t* codes, const int8_t* const* x, I8* out) {
    for (int t = 0; t < N; ++t) TPI_LANES {
        int32_t total = 0;
        for (int word = 0; word < 4; ++word) for (int b = 0; b < 4; ++b) {
            uint8_t both = codes[word * 32 + i * 4 + b];
            total += (both & 15) * x[t][word * 4 + b] + (both >> 4) * x[t][16 + word * 4 + b];
        }
        out[t].lane[i] = total;
    }
}
template <int N> inline void tile_q8(const uint8_t* codes, const int8_t* const* x, I8* out) {
    for (int t = 0; t < N; ++t) TPI_LANES {
        int32_t total = 0;
        for (int word = 0; word < 8; ++word) for (int b = 0; b < 4; ++b)
            total += static_cast<int8_t>(codes[word * 32 + i * 4 + b]) * x[t][word * 4 + b];
        out[t].lane[i] = total;
    }
}

// Sum over one group of 32 in record order of code * x, in lanes that add up to it.
inline I8 group_q4(const uint8_t* codes, const int8_t* x) {
    I8 r;
    TPI_LANES r.lane[i] = (codes[i] & 15) * x[i] + (codes[i] >> 4) * x[16 + i] + (codes[8 + i] & 15) * x[8 + i] +
                          (codes[8 + i] >> 4) * x[24 + i];
    return r;
}
inline I8 group_q8(const uint8_t* codes, const int8_t* x) {
    I8 r;
    TPI_LANES {
        r.lane[i] = 0;
        for (int k = i; k < 32; k += 8) r.lane[i] += static_cast<int8_t>(codes[k]) * x[k];
    }
    return r;
}

// The two halves at the start of each of 8 blocks, `stride` bytes apart.
inline void load_factors(const uint8_t* block, size_t stride, F8& first, F8& second) {
    TPI_LANES {
        uint16_t halves[2];
        std::memcpy(halves, block + static_cast<size_t>(i) * stride, 4);
        first.lane[i] = half_to_float(halves[0]);
        second.lane[i] = half_to_float(halves[1]);
    }
}

// The same for 8 vectors, `offset` bytes into each.
inline void load_factors(const uint8_t* const* vectors, size_t offset, F8& first, F8& second) {
    TPI_LANES {
        uint16_t halves[2];
        std::memcpy(halves, vectors[i] + offset, 4);
        first.lane[i] = half_to_float(halves[0]);
        second.lane[i] = half_to_float(halves[1]);
    }
}

// The sums over one group of code * x in 8 vectors, whose codes (record order) are `offset` bytes into each: one per lane.
inline I8 dots_q4(const uint8_t* const* vectors, size_t offset, const int8_t* x) {
    I8 r;
    TPI_LANES {
        r.lane[i] = 0;
        for (int32_t lane : group_q4(vectors[i] + offset, x).lane) r.lane[i] += lane;
    }
    return r;
}

inline void transpose_bytes(const int8_t (&from)[8][8], int8_t (&to)[8][8]) {
    for (int a = 0; a < 8; ++a) for (int b = 0; b < 8; ++b) to[b][a] = from[a][b];
}

// Sum over 8 groups of 4-bit codes (record order, `offset` bytes into 8 vectors) of factor * code, for each of the 32
// values.
inline void mix_groups_q4(const uint8_t* const* vectors, size_t offset, const int8_t* factors, F8* out) {
    for (int k = 0; k < 4; ++k) {
        out[k] = splat(0.0f);
        for (int n = 0; n < 8; ++n) TPI_LANES {
            uint8_t both = vectors[n][offset + static_cast<size_t>(k % 2 * 8 + i)];
            out[k].lane[i] += static_cast<float>(factors[n] * (k < 2 ? both & 15 : both >> 4));
        }
    }
}

#undef TPI_LANES

}  // namespace
}  // namespace tpi
