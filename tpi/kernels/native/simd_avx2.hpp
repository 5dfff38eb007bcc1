// Eight lanes in AVX2, FMA and F16C; with VNNI if the including source is compiled for it. The names are those of
// simd_scalar.hpp. All integer products are exact, so AVX-VNNI gives the bits of AVX2.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "types.hpp"

namespace tpi {
namespace {

#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
#define TPI_WIDE
constexpr const char* kIsaName = "avx512";
#elif defined(__AVXVNNI__) || defined(TPI_EMULATE_VNNI)
constexpr const char* kIsaName = "avx_vnni";
#else
constexpr const char* kIsaName = "avx2";
#endif
#if defined(TPI_WIDE) || defined(__AVXVNNI__) || defined(TPI_EMULATE_VNNI)
#define TPI_VNNI
#endif

struct F8 { __m256 v; };
struct I8 { __m256i v; };

inline F8 load(const float* p) { return {_mm256_loadu_ps(p)}; }
inline F8 load_bytes(const uint8_t* p) { return {_mm256_loadu_ps(reinterpret_cast<const float*>(p))}; }
inline void store(float* p, F8 a) { _mm256_storeu_ps(p, a.v); }
inline F8 splat(float s) { return {_mm256_set1_ps(s)}; }
inline F8 operator+(F8 a, F8 b) { return {_mm256_add_ps(a.v, b.v)}; }
inline F8 operator-(F8 a, F8 b) { return {_mm256_sub_ps(a.v, b.v)}; }
inline F8 operator*(F8 a, F8 b) { return {_mm256_mul_ps(a.v, b.v)}; }
inline F8 operator/(F8 a, F8 b) { return {_mm256_div_ps(a.v, b.v)}; }
inline F8 fma(F8 a, F8 b, F8 c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
inline F8 max(F8 a, F8 b) { return {_mm256_max_ps(a.v, b.v)}; }
inline F8 min(F8 a, F8 b) { return {_mm256_min_ps(a.v, b.v)}; }
inline F8 abs(F8 a) { return {_mm256_andnot_ps(_mm256_set1_ps(-0.0f), a.v)}; }
inline F8 round(F8 a) { return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
inline float sum(F8 a) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
inline float largest(F8 a) {
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}
inline F8 to_float(I8 a) { return {_mm256_cvtepi32_ps(a.v)}; }
inline I8 to_int(F8 a) { return {_mm256_cvtps_epi32(a.v)}; }
inline F8 power_of_two(F8 n) {
    __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n.v), _mm256_set1_epi32(127));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23))};
}

inline float half_to_float(uint16_t half) { return _cvtsh_ss(half); }
inline uint16_t float_to_half(float value) {
    return static_cast<uint16_t>(_cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT));
}
inline __m128i load16(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
inline __m256i load32(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline F8 load_half(const void* p) { return {_mm256_cvtph_ps(load16(p))}; }
inline void store_half(void* p, F8 a) {
    _mm_storeu_si128(static_cast<__m128i*>(p), _mm256_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT));
}
inline F8 splat_half(const void* p) {
    uint16_t half;
    std::memcpy(&half, p, 2);
    return {_mm256_cvtph_ps(_mm_set1_epi16(static_cast<int16_t>(half)))};
}
inline F8 load_bf16(const void* p) {
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load16(p)), 16))};
}
inline __m128i load8(const void* p) { return _mm_loadl_epi64(static_cast<const __m128i*>(p)); }
inline F8 load_int8(const void* p) { return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(load8(p)))}; }
inline F8 load_low_nibbles(const uint8_t* p) {
    return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_and_si128(load8(p), _mm_set1_epi8(15))))};
}
inline F8 load_high_nibbles(const uint8_t* p) {
    __m128i high = _mm_and_si128(_mm_srli_epi16(load8(p), 4), _mm_set1_epi8(15));
    return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(high))};
}
inline void store_int8(int8_t* p, F8 a) {
    __m256i whole = _mm256_cvtps_epi32(a.v);
    __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(words, words));
}

inline void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }

// four int8 activations in every 32-bit lane
inline __m256i splat_quad(const int8_t* x) {
    int32_t quad;
    std::memcpy(&quad, x, 4);
    return _mm256_set1_epi32(quad);
}

inline __m256i pairs_to_quads(__m256i pairs) { return _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)); }

// total += sums of four products, unsigned code times signed activation, in every 32-bit lane
inline __m256i dot_quads(__m256i total, __m256i codes, __m256i x) {
#if defined(TPI_WIDE)
    return _mm256_dpbusd_epi32(total, codes, x);
#elif defined(__AVXVNNI__)
    return _mm256_dpbusd_avx_epi32(total, codes, x);
#elif defined(TPI_EMULATE_VNNI)
    __m256i even = _mm256_madd_epi16(_mm256_and_si256(codes, _mm256_set1_epi16(255)),
                                     _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8));
    __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(codes, 8), _mm256_srai_epi16(x, 8));
    return _mm256_add_epi32(total, _mm256_add_epi32(even, odd));
#else
    return _mm256_add_epi32(total, pairs_to_quads(_mm256_maddubs_epi16(codes, x)));
#endif
}

#if defined(TPI_VNNI)

template <int N> inline void tile_q4(const uint8_t* codes, const int8_t* const* x, I8* out) {
    const __m256i low = _mm256_set1_epi8(15);
    for (int t = 0; t < N; ++t) out[t].v = _mm256_setzero_si256();
    for (int word = 0; word < 4; ++word) {
        __m256i both = load32(codes + 32 * word);
        __m256i first = _mm256_and_si256(both, low), second = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
        for (int t = 0; t < N; ++t) {
            out[t].v = dot_quads(out[t].v, first, splat_quad(x[t] + 4 * word));
            out[t].v = dot_quads(out[t].v, second, splat_quad(x[t] + 16 + 4 * word));
        }
    }
}

#else

// 16-bit sums suffice for the whole tile: 8 pairs of 15 * 127 * 2 is 30480
template <int N> inline void tile_q4(const uint8_t* codes, const int8_t* const* x, I8* out) {
    const __m256i low = _mm256_set1_epi8(15);
    __m256i total[N];
    for (int t = 0; t < N; ++t) total[t] = _mm256_setzero_si256();
    for (int word = 0; word < 4; ++word) {
        __m256i both = load32(codes + 32 * word);
        __m256i first = _mm256_and_si256(both, low), second = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
        for (int t = 0; t < N; ++t) {
            total[t] = _mm256_add_epi16(total[t], _mm256_maddubs_epi16(first, splat_quad(x[t] + 4 * word)));
            total[t] = _mm256_add_epi16(total[t], _mm256_maddubs_epi16(second, splat_quad(x[t] + 16 + 4 * word)));
        }
    }
    for (int t = 0; t < N; ++t) out[t].v = pairs_to_quads(total[t]);
}

#endif

// unsigned times signed only: the sign of the weight moves to the activation
template <int N> inline void tile_q8(const uint8_t* codes, const int8_t* const* x, I8* out) {
    for (int t = 0; t < N; ++t) out[t].v = _mm256_setzero_si256();
    for (int word = 0; word < 8; ++word) {
        __m256i weights = load32(codes + 32 * word), magnitude = _mm256_abs_epi8(weights);
        for (int t = 0; t < N; ++t)
            out[t].v = dot_quads(out[t].v, magnitude, _mm256_sign_epi8(splat_quad(x[t] + 4 * word), weights));
    }
}

inline I8 load_int16(const void* p) { return {_mm256_cvtepi16_epi32(load16(p))}; }
template <int At, int Bits> inline I8 signed_bits(I8 a) {
    return {_mm256_srai_epi32(_mm256_slli_epi32(a.v, 32 - At - Bits), 32 - Bits)};
}
template <int At, int Bits> inline I8 unsigned_bits(I8 a) {
    return {_mm256_and_si256(_mm256_srli_epi32(a.v, At), _mm256_set1_epi32((1 << Bits) - 1))};
}

struct B32 { __m256i v; };

inline B32 load_b32(const uint8_t* p) { return {load32(p)}; }
inline B32 operator|(B32 a, B32 b) { return {_mm256_or_si256(a.v, b.v)}; }
template <int Shift> inline B32 shifted(B32 a, int mask) {
    __m256i bits = Shift < 0 ? _mm256_slli_epi16(a.v, Shift < 0 ? -Shift : 0) : _mm256_srli_epi16(a.v, Shift < 0 ? 0 : Shift);
    return {_mm256_and_si256(bits, _mm256_set1_epi8(static_cast<char>(mask)))};
}
inline B32 look_up(const int8_t* table, B32 codes) {
    return {_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(load16(table)), codes.v)};
}
inline I8 dot_codes(I8 total, B32 codes, const int8_t* x) { return {dot_quads(total.v, codes.v, splat_quad(x))}; }
inline I8 dot_signed(I8 total, B32 values, const int8_t* x) {
    return {dot_quads(total.v, _mm256_abs_epi8(values.v), _mm256_sign_epi8(splat_quad(x), values.v))};
}
inline I8 no_dots() { return {_mm256_setzero_si256()}; }

inline int32_t pair_at(const int16_t* x) {
    int32_t pair;
    std::memcpy(&pair, x, 4);
    return pair;
}

struct Pairs { __m256i v; };

inline Pairs even_bytes(B32 a) { return {_mm256_srai_epi16(_mm256_slli_epi16(a.v, 8), 8)}; }
inline Pairs odd_bytes(B32 a) { return {_mm256_srai_epi16(a.v, 8)}; }
template <int Shift> inline Pairs nibbles(B32 a) {
    return {_mm256_and_si256(_mm256_srli_epi16(a.v, Shift), _mm256_set1_epi16(15))};
}
inline I8 dot_pairs(I8 total, Pairs a, const int16_t* x) {
    return {_mm256_add_epi32(total.v, _mm256_madd_epi16(a.v, _mm256_set1_epi32(pair_at(x))))};
}
inline I8 splat_int(int32_t value) { return {_mm256_set1_epi32(value)}; }

#if defined(TPI_VNNI)

constexpr int kMostSpread = 255;  // numbers of a code book with at most this range can become codes without a sign

#if !defined(TPI_WIDE)
// out[t] += products of 16 inputs: codes without a sign, four words of 4 bytes for each output, and x[t * stride].
template <int Most, int N> TPI_INLINE void add_words(const uint8_t* codes, const int8_t* x, size_t stride, I8 (*out)[1]) {
    static_assert(Most > 0);
    TPI_UNROLL for (int word = 0; word < 4; ++word) {
        const __m256i some = load32(codes + 32 * word);
        TPI_UNROLL for (int t = 0; t < N; ++t)
            out[t][0].v = dot_quads(out[t][0].v, some, splat_quad(x + t * stride + 4 * word));
    }
}
#endif

#else

constexpr int kMostSpread = 129;  // 16 bits hold the sum of two products

template <int Most, int N> TPI_INLINE void add_words(const uint8_t* codes, const int8_t* x, size_t stride, I8 (*out)[1]) {
    constexpr int kRun = Most == 0 || Most > 64 ? 1 : Most > 32 ? 2 : 4;  // words whose products 16 bits can sum
    _Pragma("GCC unroll 1")  // GCC would reorder the additions and keep all terms in memory
    for (int word = 0; word < 4; word += kRun)
        TPI_UNROLL for (int t = 0; t < N; ++t) {
            const int8_t* from = x + t * stride + 4 * word;
            __m256i total;
            TPI_UNROLL for (int i = 0; i < kRun; ++i) {
                __m256i some = load32(codes + 32 * (word + i)), quad = splat_quad(from + 4 * i);
                __m256i pairs = Most ? _mm256_maddubs_epi16(some, quad)
                                     : _mm256_maddubs_epi16(_mm256_abs_epi8(some), _mm256_sign_epi8(quad, some));
                total = i ? _mm256_add_epi16(total, pairs) : pairs;
            }
            out[t][0].v = _mm256_add_epi32(out[t][0].v, pairs_to_quads(total));
        }
}

#endif

// the 32 codes of a group in record order, one per byte
inline __m256i spread_codes(const uint8_t* codes) {
    __m128i both = load16(codes);
    return _mm256_and_si256(_mm256_set_m128i(_mm_srli_epi16(both, 4), both), _mm256_set1_epi8(15));
}
inline I8 group_q4(const uint8_t* codes, const int8_t* x) {
    return {dot_quads(_mm256_setzero_si256(), spread_codes(codes), load32(x))};
}
inline I8 group_q8(const uint8_t* codes, const int8_t* x) {
    __m256i weights = load32(codes);
    return {dot_quads(_mm256_setzero_si256(), _mm256_abs_epi8(weights), _mm256_sign_epi8(load32(x), weights))};
}

inline void split_factors(const int32_t (&pairs)[8], F8& first, F8& second) {
    __m128i a = _mm_set_epi32(pairs[3], pairs[2], pairs[1], pairs[0]);
    __m128i b = _mm_set_epi32(pairs[7], pairs[6], pairs[5], pairs[4]);
    const __m128i low = _mm_set1_epi32(0xffff);
    first.v = _mm256_cvtph_ps(_mm_packus_epi32(_mm_and_si128(a, low), _mm_and_si128(b, low)));
    second.v = _mm256_cvtph_ps(_mm_packus_epi32(_mm_srli_epi32(a, 16), _mm_srli_epi32(b, 16)));
}
inline void load_factors(const uint8_t* block, size_t stride, F8& first, F8& second) {
    int32_t pairs[8];
    for (size_t i = 0; i < 8; ++i) std::memcpy(&pairs[i], block + i * stride, 4);
    split_factors(pairs, first, second);
}

inline void load_factors(const uint8_t* const* vectors, size_t offset, F8& first, F8& second) {
    int32_t pairs[8];
    for (size_t i = 0; i < 8; ++i) std::memcpy(&pairs[i], vectors[i] + offset, 4);
    split_factors(pairs, first, second);
}

// Vectors n and n + 4 share a register, one in each half.
inline I8 dots_q4(const uint8_t* const* vectors, size_t offset, const int8_t* x) {
    const __m256i low = _mm256_set1_epi8(15);
    const __m256i first = _mm256_broadcastsi128_si256(load16(x)), second = _mm256_broadcastsi128_si256(load16(x + 16));
    auto two = [&](size_t n) {
        __m256i both = _mm256_set_m128i(load16(vectors[n + 4] + offset), load16(vectors[n] + offset));
        __m256i high = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
        return pairs_to_quads(_mm256_add_epi16(_mm256_maddubs_epi16(_mm256_and_si256(both, low), first),
                                               _mm256_maddubs_epi16(high, second)));
    };
    return {_mm256_hadd_epi32(_mm256_hadd_epi32(two(0), two(1)), _mm256_hadd_epi32(two(2), two(3)))};
}

inline void transpose_bytes(const int8_t (&from)[8][8], int8_t (&to)[8][8]) {
    __m128i ab = _mm_unpacklo_epi8(load8(from[0]), load8(from[1])), cd = _mm_unpacklo_epi8(load8(from[2]), load8(from[3]));
    __m128i ef = _mm_unpacklo_epi8(load8(from[4]), load8(from[5])), gh = _mm_unpacklo_epi8(load8(from[6]), load8(from[7]));
    __m128i abcd = _mm_unpacklo_epi16(ab, cd), efgh = _mm_unpacklo_epi16(ef, gh);
    __m128i abcd_high = _mm_unpackhi_epi16(ab, cd), efgh_high = _mm_unpackhi_epi16(ef, gh);
    auto* rows = reinterpret_cast<__m128i*>(to);
    _mm_storeu_si128(rows, _mm_unpacklo_epi32(abcd, efgh));
    _mm_storeu_si128(rows + 1, _mm_unpackhi_epi32(abcd, efgh));
    _mm_storeu_si128(rows + 2, _mm_unpacklo_epi32(abcd_high, efgh_high));
    _mm_storeu_si128(rows + 3, _mm_unpackhi_epi32(abcd_high, efgh_high));
}

// Two groups at a time: their codes, interleaved, are multiplied with their factors in pairs; 4 pairs of 15 * 127 * 2
// fit 16 bits.
inline void mix_groups_q4(const uint8_t* const* vectors, size_t offset, const int8_t* factors, F8* out) {
    __m256i low = _mm256_setzero_si256(), high = low;
    for (int n = 0; n < 8; n += 2) {
        int16_t pair;
        std::memcpy(&pair, factors + n, 2);
        __m256i factor = _mm256_set1_epi16(pair);
        __m256i a = spread_codes(vectors[n] + offset), b = spread_codes(vectors[n + 1] + offset);
        low = _mm256_add_epi16(low, _mm256_maddubs_epi16(_mm256_unpacklo_epi8(a, b), factor));
        high = _mm256_add_epi16(high, _mm256_maddubs_epi16(_mm256_unpackhi_epi8(a, b), factor));
    }
    auto widen = [](__m128i words) { return F8{_mm256_cvtepi32_ps(_mm256_cvtepi16_epi32(words))}; };
    out[0] = widen(_mm256_castsi256_si128(low));
    out[1] = widen(_mm256_castsi256_si128(high));
    out[2] = widen(_mm256_extracti128_si256(low, 1));
    out[3] = widen(_mm256_extracti128_si256(high, 1));
}

}  // namespace
}  // namespace tpi
