// The widest vectors, for keys, values and products of many tokens: sixteen lanes in AVX-512, else eight.
#pragma once

#include "elementwise.hpp"

namespace tpi {
namespace {

#if defined(TPI_WIDE)

struct Wide { __m512 v; };
struct WideInt { __m512i v; };
constexpr size_t kWide = 16;      // lanes
constexpr int kVectors = 2;       // of outputs, which share each load of activations

inline Wide operator+(Wide a, Wide b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Wide operator*(Wide a, Wide b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Wide fma(Wide a, Wide b, Wide c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Wide wide(float s) { return {_mm512_set1_ps(s)}; }
inline Wide wide_floats(const void* p) { return {_mm512_loadu_ps(p)}; }
inline Wide wide_halves(const void* p) { return {_mm512_cvtph_ps(load32(p))}; }
inline Wide wide_int8(const void* p) { return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load16(p)))}; }
inline Wide wide_half(const void* p) {
    int16_t half;
    std::memcpy(&half, p, 2);
    return {_mm512_cvtph_ps(_mm256_set1_epi16(half))};
}
inline void store(float* p, Wide a) { _mm512_storeu_ps(p, a.v); }
inline Wide to_float(WideInt a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline WideInt wide_int(int32_t value) { return {_mm512_set1_epi32(value)}; }

// Four bytes for each lane, and the pairs of int16 made of them (see simd_scalar.hpp).
struct WideBytes { __m512i v; };
struct WidePairs { __m512i v; };
inline WideBytes wide_bytes(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
inline WidePairs even_bytes(WideBytes a) { return {_mm512_srai_epi16(_mm512_slli_epi16(a.v, 8), 8)}; }
inline WidePairs odd_bytes(WideBytes a) { return {_mm512_srai_epi16(a.v, 8)}; }
template <int Shift> inline WidePairs nibbles(WideBytes a) {
    return {_mm512_and_si512(_mm512_srli_epi16(a.v, Shift), _mm512_set1_epi16(15))};
}
inline WideInt dot_pairs(WideInt total, WidePairs a, const int16_t* x) {
    return {_mm512_dpwssd_epi32(total.v, a.v, _mm512_set1_epi32(pair_at(x)))};
}

// out[t] += products of 16 inputs: codes without a sign, four words of 4 bytes for each output, and x[t * stride].
template <int Most, int N>
TPI_INLINE void add_words(const uint8_t* codes, const int8_t* x, size_t stride, WideInt (*out)[kVectors]) {
    static_assert(Most > 0);
    TPI_UNROLL for (int word = 0; word < 4; ++word)
        TPI_UNROLL for (int t = 0; t < N; ++t) {
            int32_t quad;
            std::memcpy(&quad, x + t * stride + 4 * word, 4);
            TPI_UNROLL for (int v = 0; v < kVectors; ++v) {
                __m512i some = _mm512_load_si512(codes + (word * kVectors + v) * sizeof(__m512i));
                out[t][v].v = _mm512_dpbusd_epi32(out[t][v].v, some, _mm512_set1_epi32(quad));
            }
        }
}

#else

using Wide = F8;
using WideInt = I8;
using WideBytes = B32;
using WidePairs = Pairs;
constexpr size_t kWide = 8;
constexpr int kVectors = 1;

inline Wide wide(float s) { return splat(s); }
inline Wide wide_floats(const void* p) { return load_bytes(static_cast<const uint8_t*>(p)); }
inline WideBytes wide_bytes(const uint8_t* p) { return load_b32(p); }
inline Wide wide_halves(const void* p) { return load_half(p); }
inline Wide wide_int8(const void* p) { return load_int8(p); }
inline Wide wide_half(const void* p) { return splat_half(p); }
inline WideInt wide_int(int32_t value) { return splat_int(value); }

#endif

#if !defined(TPI_I8MM)  // no instruction that multiplies pairs of tokens
constexpr bool kPaired = false;
inline void pair_words(uint8_t*) {}
template <int N> TPI_INLINE void end_words(WideInt (*)[kVectors]) {}
#endif

}  // namespace
}  // namespace tpi
