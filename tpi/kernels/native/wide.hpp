// The widest vectors of floats, for reading keys and values: sixteen lanes in AVX-512, else F8.
#pragma once

#include "elementwise.hpp"

namespace tpi {
namespace {

#if defined(TPI_VNNI)

struct Wide { __m512 v; };
constexpr size_t kWide = 16;  // lanes

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
// half as many lanes with the same sum
inline F8 fold(Wide a) { return {_mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1))}; }

#else

using Wide = F8;
constexpr size_t kWide = 8;

inline Wide wide(float s) { return splat(s); }
inline Wide wide_floats(const void* p) { return load_bytes(static_cast<const uint8_t*>(p)); }
inline Wide wide_halves(const void* p) { return load_half(p); }
inline Wide wide_int8(const void* p) { return load_int8(p); }
inline Wide wide_half(const void* p) { return splat_half(p); }
inline F8 fold(Wide a) { return a; }

#endif

}  // namespace
}  // namespace tpi
