// Eight lanes in two NEON registers. The names are those of simd_scalar.hpp. With TPI_DOTPROD the integer products use
// the dot product of ARMv8.2; without it, instructions that every aarch64 processor has. With TPI_I8MM those of many
// tokens use the matrix product of ARMv8.6. All give the same integers, so the results have the same bits.
#pragma once

#include <arm_neon.h>

#include <cstdint>
#include <cstring>

#include "types.hpp"

namespace tpi {
namespace {

#if defined(TPI_I8MM)
#define TPI_DOTPROD
constexpr const char* kIsaName = "neon_i8mm";
#elif defined(TPI_DOTPROD)
constexpr const char* kIsaName = "neon_dotprod";
#else
constexpr const char* kIsaName = "neon";
#endif

struct F8 { float32x4_t a, b; };
struct I8 { int32x4_t a, b; };

inline F8 load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4)}; }
inline F8 load_bytes(const uint8_t* p) {
    return {vreinterpretq_f32_u8(vld1q_u8(p)), vreinterpretq_f32_u8(vld1q_u8(p + 16))};
}
inline void store(float* p, F8 x) { vst1q_f32(p, x.a); vst1q_f32(p + 4, x.b); }
inline F8 splat(float s) { return {vdupq_n_f32(s), vdupq_n_f32(s)}; }
inline F8 operator+(F8 x, F8 y) { return {vaddq_f32(x.a, y.a), vaddq_f32(x.b, y.b)}; }
inline F8 operator-(F8 x, F8 y) { return {vsubq_f32(x.a, y.a), vsubq_f32(x.b, y.b)}; }
inline F8 operator*(F8 x, F8 y) { return {vmulq_f32(x.a, y.a), vmulq_f32(x.b, y.b)}; }
inline F8 operator/(F8 x, F8 y) { return {vdivq_f32(x.a, y.a), vdivq_f32(x.b, y.b)}; }
inline F8 fma(F8 x, F8 y, F8 z) { return {vfmaq_f32(z.a, x.a, y.a), vfmaq_f32(z.b, x.b, y.b)}; }
inline F8 max(F8 x, F8 y) { return {vmaxq_f32(x.a, y.a), vmaxq_f32(x.b, y.b)}; }
inline F8 min(F8 x, F8 y) { return {vminq_f32(x.a, y.a), vminq_f32(x.b, y.b)}; }
inline F8 abs(F8 x) { return {vabsq_f32(x.a), vabsq_f32(x.b)}; }
inline F8 round(F8 x) { return {vrndnq_f32(x.a), vrndnq_f32(x.b)}; }
inline float sum(F8 x) { return vaddvq_f32(vaddq_f32(x.a, x.b)); }
inline float largest(F8 x) { return vmaxvq_f32(vmaxq_f32(x.a, x.b)); }
inline F8 to_float(I8 x) { return {vcvtq_f32_s32(x.a), vcvtq_f32_s32(x.b)}; }
inline I8 to_int(F8 x) { return {vcvtnq_s32_f32(x.a), vcvtnq_s32_f32(x.b)}; }
inline F8 power_of_two(F8 n) {
    I8 whole = to_int(n);
    const int32x4_t bias = vdupq_n_s32(127);
    return {vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(whole.a, bias), 23)),
            vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(whole.b, bias), 23))};
}

inline float half_to_float(uint16_t half) {
    return vgetq_lane_f32(vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(half))), 0);
}
inline uint16_t float_to_half(float value) {
    return vget_lane_u16(vreinterpret_u16_f16(vcvt_f16_f32(vdupq_n_f32(value))), 0);
}
inline F8 load_half(const void* p) {
    uint8x16_t raw = vld1q_u8(static_cast<const uint8_t*>(p));
    float16x8_t h = vreinterpretq_f16_u8(raw);
    return {vcvt_f32_f16(vget_low_f16(h)), vcvt_f32_f16(vget_high_f16(h))};
}
inline void store_half(void* p, F8 x) {
    float16x8_t h = vcombine_f16(vcvt_f16_f32(x.a), vcvt_f16_f32(x.b));
    vst1q_u8(static_cast<uint8_t*>(p), vreinterpretq_u8_f16(h));
}
inline F8 splat_half(const void* p) {
    uint16_t half;
    std::memcpy(&half, p, 2);
    return splat(half_to_float(half));
}
inline F8 load_bf16(const void* p) {
    uint16x8_t h = vreinterpretq_u16_u8(vld1q_u8(static_cast<const uint8_t*>(p)));
    return {vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(h), 16)),
            vreinterpretq_f32_u32(vshll_n_u16(vget_high_u16(h), 16))};
}
inline F8 widen(int16x8_t w) {
    return {vcvtq_f32_s32(vmovl_s16(vget_low_s16(w))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(w)))};
}
inline F8 load_int8(const void* p) { return widen(vmovl_s8(vld1_s8(static_cast<const int8_t*>(p)))); }
inline F8 load_low_nibbles(const uint8_t* p) {
    return widen(vreinterpretq_s16_u16(vmovl_u8(vand_u8(vld1_u8(p), vdup_n_u8(15)))));
}
inline F8 load_high_nibbles(const uint8_t* p) {
    return widen(vreinterpretq_s16_u16(vmovl_u8(vshr_n_u8(vld1_u8(p), 4))));
}
inline void store_int8(int8_t* p, F8 x) {
    I8 whole = to_int(x);
    vst1_s8(p, vqmovn_s16(vcombine_s16(vqmovn_s32(whole.a), vqmovn_s32(whole.b))));
}

inline void prefetch(const void* p) { __builtin_prefetch(p); }

// total[i] + a[4i] b[4i] + ... + a[4i + 3] b[4i + 3]
inline int32x4_t dot(int32x4_t total, int8x16_t a, int8x16_t b) {
#if defined(TPI_DOTPROD)
    return vdotq_s32(total, a, b);
#else
    int32x4_t low = vpaddlq_s16(vmull_s8(vget_low_s8(a), vget_low_s8(b)));
    return vaddq_s32(total, vpaddq_s32(low, vpaddlq_s16(vmull_high_s8(a, b))));
#endif
}

template <int Lane> inline void dot_word(I8& total, int8x16_t first, int8x16_t second, int8x16_t x) {
#if defined(TPI_DOTPROD)
    total.a = vdotq_laneq_s32(total.a, first, x, Lane);
    total.b = vdotq_laneq_s32(total.b, second, x, Lane);
#else
    int8x16_t word = vreinterpretq_s8_s32(vdupq_laneq_s32(vreinterpretq_s32_s8(x), Lane));
    total.a = dot(total.a, first, word);
    total.b = dot(total.b, second, word);
#endif
}

template <int Word, int N> inline void word_q4(const uint8_t* codes, const int8_t* const* x, I8* out) {
    const uint8x16_t low = vdupq_n_u8(15);
    uint8x16_t a = vld1q_u8(codes + 32 * Word), b = vld1q_u8(codes + 32 * Word + 16);
    int8x16_t low_a = vreinterpretq_s8_u8(vandq_u8(a, low)), low_b = vreinterpretq_s8_u8(vandq_u8(b, low));
    int8x16_t high_a = vreinterpretq_s8_u8(vshrq_n_u8(a, 4)), high_b = vreinterpretq_s8_u8(vshrq_n_u8(b, 4));
    for (int t = 0; t < N; ++t) {
        dot_word<Word>(out[t], low_a, low_b, vld1q_s8(x[t]));
        dot_word<Word>(out[t], high_a, high_b, vld1q_s8(x[t] + 16));
    }
}
template <int N> inline void tile_q4(const uint8_t* codes, const int8_t* const* x, I8* out) {
    for (int t = 0; t < N; ++t) out[t] = {vdupq_n_s32(0), vdupq_n_s32(0)};
    word_q4<0, N>(codes, x, out);
    word_q4<1, N>(codes, x, out);
    word_q4<2, N>(codes, x, out);
    word_q4<3, N>(codes, x, out);
}

template <int Word, int N> inline void word_q8(const uint8_t* codes, const int8_t* const* x, I8* out) {
    int8x16_t a = vreinterpretq_s8_u8(vld1q_u8(codes + 32 * Word));
    int8x16_t b = vreinterpretq_s8_u8(vld1q_u8(codes + 32 * Word + 16));
    for (int t = 0; t < N; ++t) dot_word<Word % 4>(out[t], a, b, vld1q_s8(x[t] + Word / 4 * 16));
}
template <int N> inline void tile_q8(const uint8_t* codes, const int8_t* const* x, I8* out) {
    for (int t = 0; t < N; ++t) out[t] = {vdupq_n_s32(0), vdupq_n_s32(0)};
    word_q8<0, N>(codes, x, out);
    word_q8<1, N>(codes, x, out);
    word_q8<2, N>(codes, x, out);
    word_q8<3, N>(codes, x, out);
    word_q8<4, N>(codes, x, out);
    word_q8<5, N>(codes, x, out);
    word_q8<6, N>(codes, x, out);
    word_q8<7, N>(codes, x, out);
}

inline I8 load_int16(const void* p) {
    int16x8_t words = vreinterpretq_s16_u8(vld1q_u8(static_cast<const uint8_t*>(p)));
    return {vmovl_s16(vget_low_s16(words)), vmovl_s16(vget_high_s16(words))};
}
template <int At, int Bits> inline I8 signed_bits(I8 x) {
    constexpr int kLeft = 32 - At - Bits;
    return {vshrq_n_s32(vshlq_n_s32(x.a, kLeft), 32 - Bits), vshrq_n_s32(vshlq_n_s32(x.b, kLeft), 32 - Bits)};
}
template <int At, int Bits> inline I8 unsigned_bits(I8 x) {
    const int32x4_t mask = vdupq_n_s32((1 << Bits) - 1), right = vdupq_n_s32(-At);
    return {vandq_s32(vshlq_s32(x.a, right), mask), vandq_s32(vshlq_s32(x.b, right), mask)};
}

struct B32 { uint8x16_t a, b; };

inline B32 load_b32(const uint8_t* p) { return {vld1q_u8(p), vld1q_u8(p + 16)}; }
inline B32 operator|(B32 x, B32 y) { return {vorrq_u8(x.a, y.a), vorrq_u8(x.b, y.b)}; }
template <int Shift> inline B32 shifted(B32 x, int mask) {
    const int8x16_t left = vdupq_n_s8(-Shift);
    const uint8x16_t bits = vdupq_n_u8(static_cast<uint8_t>(mask));
    return {vandq_u8(vshlq_u8(x.a, left), bits), vandq_u8(vshlq_u8(x.b, left), bits)};
}
inline B32 look_up(const int8_t* table, B32 codes) {
    const int8x16_t values = vld1q_s8(table);
    return {vreinterpretq_u8_s8(vqtbl1q_s8(values, codes.a)), vreinterpretq_u8_s8(vqtbl1q_s8(values, codes.b))};
}
inline I8 dot_signed(I8 total, B32 values, const int8_t* x) {
    int32_t quad;
    std::memcpy(&quad, x, 4);
    int8x16_t word = vreinterpretq_s8_s32(vdupq_n_s32(quad));
    return {dot(total.a, vreinterpretq_s8_u8(values.a), word), dot(total.b, vreinterpretq_s8_u8(values.b), word)};
}
inline I8 dot_codes(I8 total, B32 codes, const int8_t* x) { return dot_signed(total, codes, x); }
inline I8 no_dots() { return {vdupq_n_s32(0), vdupq_n_s32(0)}; }

struct Pairs { int16x8_t a, b; };

inline Pairs odd_bytes(B32 x) {
    return {vshrq_n_s16(vreinterpretq_s16_u8(x.a), 8), vshrq_n_s16(vreinterpretq_s16_u8(x.b), 8)};
}
inline Pairs even_bytes(B32 x) {
    return {vshrq_n_s16(vshlq_n_s16(vreinterpretq_s16_u8(x.a), 8), 8),
            vshrq_n_s16(vshlq_n_s16(vreinterpretq_s16_u8(x.b), 8), 8)};
}
template <int Shift> inline Pairs nibbles(B32 x) {
    const int16x8_t right = vdupq_n_s16(-Shift);
    const uint16x8_t mask = vdupq_n_u16(15);
    return {vreinterpretq_s16_u16(vandq_u16(vshlq_u16(vreinterpretq_u16_u8(x.a), right), mask)),
            vreinterpretq_s16_u16(vandq_u16(vshlq_u16(vreinterpretq_u16_u8(x.b), right), mask))};
}
inline I8 dot_pairs(I8 total, Pairs a, const int16_t* x) {
    int32_t pair;
    std::memcpy(&pair, x, 4);
    const int16x8_t both = vreinterpretq_s16_s32(vdupq_n_s32(pair));
    auto four = [&](int16x8_t some) {
        return vpaddq_s32(vmull_s16(vget_low_s16(some), vget_low_s16(both)), vmull_high_s16(some, both));
    };
    return {vaddq_s32(total.a, four(a.a)), vaddq_s32(total.b, four(a.b))};
}
inline I8 splat_int(int32_t value) { return {vdupq_n_s32(value), vdupq_n_s32(value)}; }

constexpr int kMostSpread = 0;

#if defined(TPI_I8MM)

constexpr bool kPaired = true;

// Reorder the words of a panel's group, 32 bytes each: a register then holds 8 inputs of two outputs.
inline void pair_words(uint8_t* codes) {
    for (uint8_t* p = codes; p < codes + 256; p += 64) {
        int32x4_t word[4];
        for (int i = 0; i < 4; ++i) word[i] = vreinterpretq_s32_u8(vld1q_u8(p + 16 * i));
        for (int i = 0; i < 2; ++i) {
            vst1q_u8(p + 32 * i, vreinterpretq_u8_s32(vzip1q_s32(word[i], word[i + 2])));
            vst1q_u8(p + 32 * i + 16, vreinterpretq_u8_s32(vzip2q_s32(word[i], word[i + 2])));
        }
    }
}

// Multiply with two tokens at a time: the lanes of each sum are then two outputs of two tokens, until `end_words`.
template <int Most, int N> TPI_INLINE void add_words(const uint8_t* codes, const int8_t* x, size_t stride, I8 (*out)[1]) {
    int8x16_t word[8];
    TPI_UNROLL for (int i = 0; i < 8; ++i) word[i] = vreinterpretq_s8_u8(vld1q_u8(codes + 16 * i));
    if constexpr (N == 1) {
        int64x2_t inputs = vreinterpretq_s64_s8(vld1q_s8(x));
        int8x16_t low = vreinterpretq_s8_s64(vdupq_laneq_s64(inputs, 0));
        int8x16_t high = vreinterpretq_s8_s64(vdupq_laneq_s64(inputs, 1));
        int32x4_t of[4];  // two sums of each output
        TPI_UNROLL for (int i = 0; i < 4; ++i) of[i] = dot(dot(vdupq_n_s32(0), word[i], low), word[i + 4], high);
        out[0][0].a = vaddq_s32(out[0][0].a, vpaddq_s32(of[0], of[1]));
        out[0][0].b = vaddq_s32(out[0][0].b, vpaddq_s32(of[2], of[3]));
    } else {
        static_assert(N % 2 == 0);
        TPI_UNROLL for (int t = 0; t < N; t += 2) {
            int64x2_t first = vreinterpretq_s64_s8(vld1q_s8(x + t * stride));
            int64x2_t second = vreinterpretq_s64_s8(vld1q_s8(x + (t + 1) * stride));
            int8x16_t low = vreinterpretq_s8_s64(vzip1q_s64(first, second));
            int8x16_t high = vreinterpretq_s8_s64(vzip2q_s64(first, second));
            int32x4_t* of[4] = {&out[t][0].a, &out[t][0].b, &out[t + 1][0].a, &out[t + 1][0].b};
            TPI_UNROLL for (int i = 0; i < 4; ++i)
                *of[i] = vmmlaq_s32(vmmlaq_s32(*of[i], word[i], low), word[i + 4], high);
        }
    }
}

// Give each token its sums.
template <int N> TPI_INLINE void end_words(I8 (*out)[1]) {
    if constexpr (N > 1)
        TPI_UNROLL for (int t = 0; t < N; t += 2) {
            I8 low = out[t][0], high = out[t + 1][0];
            out[t][0] = {vuzp1q_s32(low.a, low.b), vuzp1q_s32(high.a, high.b)};
            out[t + 1][0] = {vuzp2q_s32(low.a, low.b), vuzp2q_s32(high.a, high.b)};
        }
}

#else

template <int Most, int N> TPI_INLINE void add_words(const uint8_t* codes, const int8_t* x, size_t stride, I8 (*out)[1]) {
    int8x16_t word[8];
    TPI_UNROLL for (int i = 0; i < 8; ++i) word[i] = vreinterpretq_s8_u8(vld1q_u8(codes + 16 * i));
    TPI_UNROLL for (int t = 0; t < N; ++t) {
        int8x16_t inputs = vld1q_s8(x + t * stride);
        dot_word<0>(out[t][0], word[0], word[1], inputs);
        dot_word<1>(out[t][0], word[2], word[3], inputs);
        dot_word<2>(out[t][0], word[4], word[5], inputs);
        dot_word<3>(out[t][0], word[6], word[7], inputs);
    }
}

#endif

inline I8 group_q4(const uint8_t* codes, const int8_t* x) {
    uint8x16_t both = vld1q_u8(codes);
    const int32x4_t zero = vdupq_n_s32(0);
    return {dot(zero, vreinterpretq_s8_u8(vandq_u8(both, vdupq_n_u8(15))), vld1q_s8(x)),
            dot(zero, vreinterpretq_s8_u8(vshrq_n_u8(both, 4)), vld1q_s8(x + 16))};
}
inline I8 group_q8(const uint8_t* codes, const int8_t* x) {
    const int32x4_t zero = vdupq_n_s32(0);
    return {dot(zero, vreinterpretq_s8_u8(vld1q_u8(codes)), vld1q_s8(x)),
            dot(zero, vreinterpretq_s8_u8(vld1q_u8(codes + 16)), vld1q_s8(x + 16))};
}

inline void load_factors(const uint8_t* block, size_t stride, F8& first, F8& second) {
    uint16_t halves[2][8];
    for (size_t i = 0; i < 8; ++i) {
        std::memcpy(&halves[0][i], block + i * stride, 2);
        std::memcpy(&halves[1][i], block + i * stride + 2, 2);
    }
    first = load_half(halves[0]);
    second = load_half(halves[1]);
}

inline void load_factors(const uint8_t* const* vectors, size_t offset, F8& first, F8& second) {
    uint16_t halves[2][8];
    for (size_t i = 0; i < 8; ++i) {
        std::memcpy(&halves[0][i], vectors[i] + offset, 2);
        std::memcpy(&halves[1][i], vectors[i] + offset + 2, 2);
    }
    first = load_half(halves[0]);
    second = load_half(halves[1]);
}

inline I8 dots_q4(const uint8_t* const* vectors, size_t offset, const int8_t* x) {
    int32x4_t each[8];
    for (size_t n = 0; n < 8; ++n) {
        I8 lanes = group_q4(vectors[n] + offset, x);
        each[n] = vaddq_s32(lanes.a, lanes.b);
    }
    return {vpaddq_s32(vpaddq_s32(each[0], each[1]), vpaddq_s32(each[2], each[3])),
            vpaddq_s32(vpaddq_s32(each[4], each[5]), vpaddq_s32(each[6], each[7]))};
}

inline void transpose_bytes(const int8_t (&from)[8][8], int8_t (&to)[8][8]) {
    for (int a = 0; a < 8; ++a) for (int b = 0; b < 8; ++b) to[b][a] = from[a][b];
}

inline void mix_groups_q4(const uint8_t* const* vectors, size_t offset, const int8_t* factors, F8* out) {
    int16x8_t total[4] = {vdupq_n_s16(0), vdupq_n_s16(0), vdupq_n_s16(0), vdupq_n_s16(0)};
    for (int n = 0; n < 8; ++n) {
        uint8x16_t both = vld1q_u8(vectors[n] + offset);
        int8x16_t low = vreinterpretq_s8_u8(vandq_u8(both, vdupq_n_u8(15)));
        int8x16_t high = vreinterpretq_s8_u8(vshrq_n_u8(both, 4));
        int8x8_t factor = vdup_n_s8(factors[n]);
        total[0] = vmlal_s8(total[0], vget_low_s8(low), factor);
        total[1] = vmlal_s8(total[1], vget_high_s8(low), factor);
        total[2] = vmlal_s8(total[2], vget_low_s8(high), factor);
        total[3] = vmlal_s8(total[3], vget_high_s8(high), factor);
    }
    for (int k = 0; k < 4; ++k) out[k] = widen(total[k]);
}

}  // namespace
}  // namespace tpi
