// Functions of single values, norms, and the rounding of activations to int8. Include a simd_*.hpp before it.
#pragma once

#include <cmath>

#include "types.hpp"

namespace tpi {
namespace {

// e^x to about one unit in the last place; x beyond the range of float32 saturates
inline F8 exp(F8 x) {
    x = max(min(x, splat(88.0f)), splat(-87.0f));
    F8 n = round(x * splat(1.44269504f));
    F8 r = fma(n, splat(-0.693359375f), x);  // ln 2 in two parts
    r = fma(n, splat(2.12194440e-4f), r);
    F8 p = splat(1.3888889e-3f);  // Taylor's series up to r^7: |r| is at most ln 2 / 2
    p = fma(fma(splat(1.9841270e-4f), r, p), r, splat(8.3333333e-3f));
    p = fma(p, r, splat(4.1666667e-2f));
    p = fma(p, r, splat(1.6666667e-1f));
    p = fma(p, r, splat(0.5f));
    p = fma(p, r * r, r) + splat(1.0f);
    return p * power_of_two(n);
}

inline F8 tanh(F8 x) {
    F8 magnitude = min(abs(x), splat(20.0f));
    F8 decay = exp(magnitude * splat(-2.0f));
    F8 value = (splat(1.0f) - decay) / (splat(1.0f) + decay);
    // take the sign from x / |x|, kept finite at 0
    return value * (x / max(abs(x), splat(1e-30f)));
}

inline F8 erf_by_lane(F8 x) {
    float lanes[8];
    store(lanes, x);
    for (float& lane : lanes) lane = std::erf(lane);
    return load(lanes);
}

// 0 if x is not above the threshold; NaN stays NaN
inline F8 above_by_lane(F8 x, float threshold) {
    float lanes[8];
    store(lanes, x);
    for (float& lane : lanes) lane = lane <= threshold ? 0.0f : lane;
    return load(lanes);
}

inline F8 activate(Activation kind, float threshold, F8 x) {
    const F8 one = splat(1.0f), half = splat(0.5f);
    switch (kind) {
        case Activation::relu:
        case Activation::drelu: return max(x, splat(0.0f));
        case Activation::relu2: {
            F8 kept = max(x, splat(0.0f));
            return kept * kept;
        }
        case Activation::fatrelu: return above_by_lane(x, threshold);
        case Activation::silu: return x / (one + exp(splat(0.0f) - x));
        case Activation::gelu: return half * x * (one + erf_by_lane(x * splat(0.70710678f)));
        default: {
            F8 cube = x * x * x;
            return half * x * (one + tanh(splat(0.79788456f) * fma(splat(0.044715f), cube, x)));
        }
    }
}

// Prefetch memory that the processor cannot predict.
inline void prefetch_bytes(const uint8_t* p, size_t bytes) {
    for (size_t i = 0; i < bytes; i += 64) prefetch(p + i);
}

// Load lanes [0, count) of p, zeros after them.
inline F8 load_some(const float* p, size_t count) {
    if (count >= 8) return load(p);
    float lanes[8] = {};
    for (size_t i = 0; i < count; ++i) lanes[i] = p[i];
    return load(lanes);
}

inline void store_some(float* p, F8 a, size_t count) {
    if (count >= 8) return store(p, a);
    float lanes[8];
    store(lanes, a);
    for (size_t i = 0; i < count; ++i) p[i] = lanes[i];
}

inline float sum_of_squares(const float* x, size_t count, float mean) {
    F8 total = splat(0.0f), shift = splat(mean);
    size_t i = 0;
    for (; i + 8 <= count; i += 8) {
        F8 value = load(x + i) - shift;
        total = fma(value, value, total);
    }
    float result = sum(total);
    for (; i < count; ++i) result += (x[i] - mean) * (x[i] - mean);
    return result;
}

inline float mean_of(const float* x, size_t count) {
    F8 total = splat(0.0f);
    size_t i = 0;
    for (; i + 8 <= count; i += 8) total = total + load(x + i);
    float result = sum(total);
    for (; i < count; ++i) result += x[i];
    return result / static_cast<float>(count);
}

// out = norm(x), one vector; out may be x.
inline void normalise(const Norm& norm, const float* x, size_t count, float* out) {
    float mean = norm.rms ? 0.0f : mean_of(x, count);
    float variance = sum_of_squares(x, count, mean) / static_cast<float>(count);
    F8 shift = splat(mean), factor = splat(1.0f / std::sqrt(variance + norm.eps));
    for (size_t i = 0; i < count; i += 8) {
        size_t some = count - i;
        F8 value = (load_some(x + i, some) - shift) * factor * load_some(norm.weight + i, some);
        if (norm.bias) value = value + load_some(norm.bias + i, some);
        store_some(out + i, value, some);
    }
}

constexpr float kFine = 128.0f;  // units of `Rounded::fine` in one of its codes

// Round one group of 32 floats; if `keep`, replace x by the rounded values.
inline void round_group(float* x, const Rounded& to, size_t token, size_t group, bool keep = false) {
    F8 a = load(x), b = load(x + 8), c = load(x + 16), d = load(x + 24);
    float most = largest(max(max(abs(a), abs(b)), max(abs(c), abs(d))));
    F8 inverse = splat(most > 0 ? 127.0f / most : 0.0f);
    float scale = most / 127.0f;
    size_t at = token * to.width + group * kGroup;
    F8 fine_sum = splat(0.0f);
    if (to.fine && !keep) {
        for (size_t i = 0; i < kGroup; i += 8) {
            F8 value = load(x + i) * inverse;
            F8 fine = round((value - round(value)) * splat(kFine));
            fine_sum = fine_sum + fine;
            store_int8(to.fine + at + i, fine);
        }
    }
    a = round(a * inverse);
    b = round(b * inverse);
    c = round(c * inverse);
    d = round(d * inverse);
    if (keep) {
        F8 s = splat(scale);
        store(x, a * s);
        store(x + 8, b * s);
        store(x + 16, c * s);
        store(x + 24, d * s);
        return;
    }
    int8_t* codes = to.codes + at;
    store_int8(codes, a);
    store_int8(codes + 8, b);
    store_int8(codes + 16, c);
    store_int8(codes + 24, d);
    to.scale[token * to.groups() + group] = scale;
    float first = sum(a + b), second = sum(c + d);
    to.sum[token * to.groups() + group] = scale * (first + second);
    to.half[token * to.groups() + group] = scale * first;
    if (to.whole)
        to.whole[token * to.groups() + group] = {static_cast<int16_t>(first), static_cast<int16_t>(second),
                                                 static_cast<int16_t>(sum(fine_sum))};
}

inline void round_vector(float* x, const Rounded& to, size_t token) {
    for (size_t group = 0; group < to.groups(); ++group) round_group(x + group * kGroup, to, token, group);
}

// Round x as the integer products do, but to float.
inline void round_in_place(float* x, size_t width) {
    for (size_t i = 0; i < width; i += kGroup) round_group(x + i, Rounded{}, 0, 0, true);
}

// The sums of a few tokens, one after the other.
struct Rows {
    float* sums;
    size_t stride;

    float* operator()(size_t token) const { return sums + token * stride; }
};

}  // namespace
}  // namespace tpi
