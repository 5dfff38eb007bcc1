// Products of a few tokens with weights in the record layout: vectors of `hidden` values in any format. Rows are dot
// products, columns are scaled sums. For many tokens see panels.hpp.
#pragma once

#include "decode.hpp"

namespace tpi {
namespace {

// The input of a row part: floats [tokens, stride], and the same rounded for quantised formats.
struct RecordInputs {
    const float* x;
    size_t stride;
    Rounded rounded;
};

template <Format F, int N>
inline void dot_plain(const uint8_t* vector, size_t hidden, const RecordInputs& in, size_t token, const uint8_t* soon,
                      float* out) {
    const float* x = in.x + token * in.stride;
    constexpr int kParts = 4;  // independent sums, to cover the latency of a multiply-add
    F8 acc[N][kParts];
    for (int t = 0; t < N; ++t) for (int p = 0; p < kParts; ++p) acc[t][p] = splat(0.0f);
    size_t i = 0;
    for (; i + 8 * kParts <= hidden; i += 8 * kParts) {
        constexpr size_t kStep = 8 * kParts * (F == Format::f32 ? 4 : 2);
        prefetch_bytes(soon, kStep);
        soon += kStep;
        for (int p = 0; p < kParts; ++p) {
            F8 weights = load_plain<F>(vector, i + 8 * p);
            for (int t = 0; t < N; ++t) acc[t][p] = fma(weights, load(x + t * in.stride + i + 8 * p), acc[t][p]);
        }
    }
    for (int t = 0; t < N; ++t) {
        for (int p = 1; p < kParts; ++p) acc[t][0] = acc[t][0] + acc[t][p];
        out[t] = sum(acc[t][0]);
    }
    for (; i < hidden; ++i) {
        float weight = read_plain(F, vector, i);
        for (int t = 0; t < N; ++t) out[t] += weight * x[t * in.stride + i];
    }
}

// The products of one group with a token's codes from `at` on, in lanes that add up to the result.
template <Format F> inline F8 dot_group(const uint8_t* weights, const Rounded& x, size_t at) {
    if constexpr (F == Format::q8) {
        F8 fine = to_float(group_q8(weights, x.fine + at)) * splat(1.0f / kFine);
        return to_float(group_q8(weights, x.codes + at)) + fine;
    } else {
        return to_float(group_q4(weights, x.codes + at));
    }
}

// acc[t] += the products of 8 groups, offsets[t] += the terms of their minima (by lane, to be summed)
template <Format F, int N>
inline void dot_eight_groups(const uint8_t* vector, const Rounded& x, size_t token, size_t group, F8* acc,
                             F8* offsets) {
    F8 scale, offset;
    load_lines<F>(vector, scale, offset);
    for (int t = 0; t < N; ++t) {
        size_t at = (token + t) * x.groups() + group;
        float factors[8];
        store(factors, scale * load(x.scale + at));
        if constexpr (F != Format::q8) offsets[t] = fma(offset, load(x.sum + at), offsets[t]);
        size_t codes = (token + t) * x.width + group * kGroup;
        F8 part[4];  // short chains of additions
        for (size_t i = 0; i < 8; ++i) {
            const uint8_t* weights = vector + i * group_bytes(F) + factor_bytes(F);
            F8 dot = dot_group<F>(weights, x, codes + i * kGroup), factor = splat(factors[i]);
            part[i % 4] = i < 4 ? dot * factor : fma(dot, factor, part[i % 4]);
        }
        acc[t] = acc[t] + ((part[0] + part[1]) + (part[2] + part[3]));
    }
}

template <Format F, int N>
inline void dot_groups(const uint8_t* vector, size_t hidden, const RecordInputs& in, size_t token, const uint8_t* soon,
                       float* out) {
    const Rounded& x = in.rounded;
    F8 acc[N], offsets[N];
    float rest[N] = {};
    for (int t = 0; t < N; ++t) acc[t] = offsets[t] = splat(0.0f);
    size_t g = 0;
    for (; g + 8 <= hidden / kGroup; g += 8, vector += 8 * group_bytes(F)) {
        prefetch_bytes(soon, 8 * group_bytes(F));
        soon += 8 * group_bytes(F);
        dot_eight_groups<F, N>(vector, x, token, g, acc, offsets);
    }
    for (; g < hidden / kGroup; ++g, vector += group_bytes(F)) {
        float scale = read_half(vector), offset = offset_of<F>(vector, scale);
        for (int t = 0; t < N; ++t) {
            size_t at = (token + t) * x.groups() + g;
            F8 dot = dot_group<F>(vector + factor_bytes(F), x, (token + t) * x.width + g * kGroup);
            acc[t] = fma(dot, splat(scale * x.scale[at]), acc[t]);
            if constexpr (F != Format::q8) rest[t] += offset * x.sum[at];
        }
    }
    for (int t = 0; t < N; ++t) out[t] = sum(acc[t] + offsets[t]) + rest[t];
}

// out[t * stride] = vector . x[t] for tokens [0, tokens). Prefetches the vector at `soon`: records lie too far apart
// for the processor to predict.
template <Format F>
inline void dot_record(const uint8_t* vector, size_t hidden, const RecordInputs& in, size_t tokens, const uint8_t* soon,
                       float* out, size_t stride) {
    float some[4];
    for (size_t token = 0; token < tokens; token += 4) {
        size_t count = tokens - token < 4 ? tokens - token : 4;
        auto dot = [&]<int N>() {
            if constexpr (is_quantised(F)) {
                dot_groups<F, N>(vector, hidden, in, token, soon, some);
            } else {
                dot_plain<F, N>(vector, hidden, in, token, soon, some);
            }
        };
        if (count == 4) dot.template operator()<4>();
        else if (count == 3) dot.template operator()<3>();
        else if (count == 2) dot.template operator()<2>();
        else dot.template operator()<1>();
        for (size_t t = 0; t < count; ++t) out[(token + t) * stride] = some[t];
    }
}

// Row part: out[t * stride + r - first] for vectors [first, first + count).
inline void record_rows(const Matrix& matrix, size_t first, size_t count, const RecordInputs& in, size_t tokens,
                        float* out, size_t stride) {
    with_format(matrix.format, [&]<Format F>() {
        for (size_t r = first; r < first + count; ++r) {
            const uint8_t* vector = matrix.vector(r);
            dot_record<F>(vector, matrix.hidden, in, tokens, vector + matrix.record_bytes, out + (r - first), stride);
        }
    });
}

// Row part, one vector: out[t * stride].
inline void record_row(const Matrix& matrix, size_t r, const RecordInputs& in, size_t tokens, const uint8_t* soon,
                       float* out, size_t stride) {
    with_format(matrix.format, [&]<Format F>() {
        dot_record<F>(matrix.vector(r), matrix.hidden, in, tokens, soon, out, stride);
    });
}

// 8 vectors in 4 bits, one per lane, so that no sum crosses lanes, and all use an activation while it is in a register:
// out[t * stride + n] = vectors[n] . x[token + t]. Prefetches those at `soon`.
template <Format F, int N>
inline void dot_eight_vectors(const uint8_t* const* vectors, const Rounded& x, size_t token, const uint8_t* const* soon,
                              float* out, size_t stride) {
    F8 acc[N], low[N];
    for (int t = 0; t < N; ++t) acc[t] = low[t] = splat(0.0f);
    size_t line = 0;  // next line of 64 bytes to prefetch, of all vectors in turn
    for (size_t g = 0; g < x.groups(); ++g) {
        size_t offset = g * group_bytes(F);
        for (; line / 8 * 64 < offset + group_bytes(F); ++line) prefetch(soon[line % 8] + line / 8 * 64);
        F8 scale, minimum;
        load_factors(vectors, offset, scale, minimum);
        if constexpr (F == Format::q4s) minimum = scale * splat(-8.0f);
        for (int t = 0; t < N; ++t) {
            size_t at = (token + t) * x.groups() + g;
            I8 dots = dots_q4(vectors, offset + factor_bytes(F), x.codes + (token + t) * x.width + g * kGroup);
            acc[t] = fma(to_float(dots), scale * splat(x.scale[at]), acc[t]);
            low[t] = fma(minimum, splat(x.sum[at]), low[t]);
        }
    }
    for (int t = 0; t < N; ++t) store(out + t * stride, acc[t] + low[t]);
}

// Row part in 4 bits, 8 vectors: out[t * stride + n] = vector at(n) . x[t]; at(8 + n) come next.
template <Format F, class At>
inline void eight_rows(const Matrix& matrix, const At& at, const Rounded& x, size_t tokens, float* out, size_t stride) {
    const uint8_t* vectors[8];
    const uint8_t* soon[8];
    for (size_t n = 0; n < 8; ++n) {
        vectors[n] = matrix.vector(at(n));
        soon[n] = matrix.vector(at(8 + n));
    }
    size_t token = 0;
    for (; token + 4 <= tokens; token += 4) dot_eight_vectors<F, 4>(vectors, x, token, soon, out + token * stride, stride);
    for (; token < tokens; ++token) dot_eight_vectors<F, 1>(vectors, x, token, soon, out + token * stride, stride);
}

// out[0..hidden) += sum over count (at most 8) vectors of factors[i] * vector i; quantised vectors begin at a group
template <Format F>
inline void add_records(const uint8_t* const* vectors, const float* factors, size_t count, size_t hidden, float* out,
                        size_t group = 0) {
    if constexpr (!is_quantised(F)) {
        size_t i = 0;
        for (; i + 8 <= hidden; i += 8) {
            F8 acc = load(out + i);
            for (size_t n = 0; n < count; ++n) acc = fma(load_plain<F>(vectors[n], i), splat(factors[n]), acc);
            store(out + i, acc);
        }
        for (; i < hidden; ++i)
            for (size_t n = 0; n < count; ++n) out[i] += factors[n] * read_plain(F, vectors[n], i);
    } else {
        for (size_t g = group; g < hidden / kGroup; ++g) {
            F8 acc[4];
            float offset = 0;
            for (int k = 0; k < 4; ++k) acc[k] = load(out + g * kGroup + 8 * k);
            for (size_t n = 0; n < count; ++n) {
                const uint8_t* block = vectors[n] + g * group_bytes(F);
                prefetch(block + 512);
                float scale = read_half(block);
                offset += factors[n] * offset_of<F>(block, scale);
                F8 values[4], factor = splat(factors[n] * scale);
                load_codes<F>(block + factor_bytes(F), values);
                for (int k = 0; k < 4; ++k) acc[k] = fma(values[k], factor, acc[k]);
            }
            for (int k = 0; k < 4; ++k) store(out + g * kGroup + 8 * k, acc[k] + splat(offset));
        }
    }
}

// The factors of 8 neurons times 8 groups, before they are multiplied with codes: factor * scale as int8, with a unit
// per group.
struct MixedFactors {
    int8_t rounded[8][8];  // [group, neuron]
    float unit[8], shift[8];
};

// Lanes are groups, so that no sum crosses lanes.
template <Format F>
inline void mix_factors(const uint8_t* const* vectors, size_t offset, const float* factors, MixedFactors& out) {
    F8 scaled[8], most = splat(0.0f), shift = splat(0.0f);
    for (int n = 0; n < 8; ++n) {
        F8 scale, low;
        load_lines<F>(vectors[n] + offset, scale, low);
        scaled[n] = scale * splat(factors[n]);
        most = max(most, abs(scaled[n]));
        // relative to code 8, so that rounding the factors has the least effect
        if constexpr (F == Format::q4) shift = fma(fma(splat(8.0f), scale, low), splat(factors[n]), shift);
    }
    F8 inverse = splat(127.0f) / max(most, splat(1e-30f)), unit = most * splat(1.0f / 127.0f), sum = splat(0.0f);
    int8_t by_neuron[8][8];
    for (int n = 0; n < 8; ++n) {
        F8 whole = round(scaled[n] * inverse);
        sum = sum + whole;
        store_int8(by_neuron[n], whole);
    }
    transpose_bytes(by_neuron, out.rounded);
    store(out.unit, unit);
    store(out.shift, fma(sum * unit, splat(-8.0f), shift));
}

// The same as add_records for 8 vectors of 4-bit codes; groups beyond a multiple of 8 are left out.
template <Format F>
inline void add_eight_records(const uint8_t* const* vectors, const float* factors, size_t hidden, float* out) {
    for (size_t first = 0; first + 8 <= hidden / kGroup; first += 8) {
        size_t offset = first * group_bytes(F);
        MixedFactors mixed;
        mix_factors<F>(vectors, offset, factors, mixed);
        for (int g = 0; g < 8; ++g, offset += group_bytes(F), out += kGroup) {
            F8 values[4];
            mix_groups_q4(vectors, offset + factor_bytes(F), mixed.rounded[g], values);
            F8 unit = splat(mixed.unit[g]), shift = splat(mixed.shift[g]);
            for (int k = 0; k < 4; ++k) store(out + 8 * k, fma(values[k], unit, load(out + 8 * k) + shift));
        }
    }
}

// Column part, a few tokens: out(t)[..] += sum over i < count of factors[t * factor_stride + i] * vector
// at(i). Vectors whose factors are all zero are not read.
template <class At, class Out>
inline void record_columns(const Matrix& matrix, size_t count, const At& at, const float* factors,
                           size_t factor_stride, size_t tokens, const Out& out) {
    with_format(matrix.format, [&]<Format F>() {
        const uint8_t* vectors[8];
        float some[kStreamTokens][8];
        size_t held = 0;
        auto flush = [&] {
            for (size_t t = 0; t < tokens; ++t) {
                if constexpr (F == Format::q4 || F == Format::q4s) {
                    if (held == 8) {
                        add_eight_records<F>(vectors, some[t], matrix.hidden, out(t));
                        add_records<F>(vectors, some[t], held, matrix.hidden, out(t),
                                       matrix.hidden / kGroup / 8 * 8);
                        continue;
                    }
                }
                add_records<F>(vectors, some[t], held, matrix.hidden, out(t));
            }
            held = 0;
        };
        for (size_t i = 0; i < count; ++i) {
            bool used = false;
            for (size_t t = 0; t < tokens; ++t) {
                some[t][held] = factors[t * factor_stride + i];
                used |= some[t][held] != 0.0f;
            }
            if (!used) continue;
            vectors[held] = matrix.vector(at(i));
            if (++held == 8) flush();
        }
        if (held) flush();
    });
}

}  // namespace
}  // namespace tpi
