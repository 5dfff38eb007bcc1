// Products with weights in the record layout: whole vectors of `hidden` values, in any format.
// A few tokens take dot products (rows) and scaled sums (columns); many take a blocked float32 product.
#pragma once

#include "elementwise.hpp"

namespace tpi {
namespace {

inline float read_half(const uint8_t* p) {
    uint16_t bits;
    std::memcpy(&bits, p, 2);
    return half_to_float(bits);
}

inline float read_plain(Format format, const uint8_t* vector, size_t i) {
    uint32_t bits;
    if (format == Format::f32) {
        std::memcpy(&bits, vector + 4 * i, 4);
    } else {
        uint16_t high;
        std::memcpy(&high, vector + 2 * i, 2);
        bits = static_cast<uint32_t>(high) << 16;
    }
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

template <Format F> inline F8 load_plain(const uint8_t* vector, size_t i) {
    if constexpr (F == Format::f32) {
        return load_bytes(vector + 4 * i);
    } else {
        return load_bf16(vector + 2 * i);
    }
}

// Scales, and what is added to scale * code, of 8 consecutive blocks.
template <Format F> inline void load_lines(const uint8_t* block, F8& scale, F8& offset) {
    load_factors(block, group_bytes(F), scale, offset);
    if constexpr (F == Format::q4s) offset = scale * splat(-8.0f);
    if constexpr (F == Format::q8) offset = splat(0.0f);
}

// The codes of a group as four registers of values, before scale and minimum.
template <Format F> inline void load_codes(const uint8_t* codes, F8* out) {
    for (int i = 0; i < 4; ++i) {
        if constexpr (F == Format::q8) {
            out[i] = load_int8(codes + 8 * i);
        } else {
            out[i] = i < 2 ? load_low_nibbles(codes + 8 * i) : load_high_nibbles(codes + 8 * (i - 2));
        }
    }
}

constexpr size_t factor_bytes(Format format) { return format == Format::q4 ? 4 : 2; }

// what is added to scale * code
template <Format F> inline float offset_of(const uint8_t* block, float scale) {
    if constexpr (F == Format::q4) return read_half(block + 2);
    if constexpr (F == Format::q4s) return -8.0f * scale;
    return 0.0f;
}

// Values [first, first + count) of a vector as float32; for quantised formats both are multiples of 32.
template <Format F> inline void decode_record(const uint8_t* vector, size_t first, size_t count, float* out) {
    if constexpr (!is_quantised(F)) {
        size_t i = 0;
        for (; i + 8 <= count; i += 8) store(out + i, load_plain<F>(vector, first + i));
        for (; i < count; ++i) out[i] = read_plain(F, vector, first + i);
    } else {
        const uint8_t* block = vector + first / kGroup * group_bytes(F);
        for (size_t i = 0; i < count; i += kGroup, block += group_bytes(F)) {
            float scale = read_half(block);
            F8 values[4];
            load_codes<F>(block + factor_bytes(F), values);
            for (int k = 0; k < 4; ++k)
                store(out + i + 8 * k, fma(values[k], splat(scale), splat(offset_of<F>(block, scale))));
        }
    }
}

template <class Work> inline void with_format(Format format, const Work& work) {
    switch (format) {
        case Format::f32: return work.template operator()<Format::f32>();
        case Format::bf16: return work.template operator()<Format::bf16>();
        case Format::q8: return work.template operator()<Format::q8>();
        case Format::q4: return work.template operator()<Format::q4>();
        default: return work.template operator()<Format::q4s>();
    }
}

// Vectors that will be wanted soon, asked for while another of the same size is read: records lie too far apart for the
// processor to guess. Null where nothing is known.
struct Soon {
    const uint8_t* first = nullptr;
    const uint8_t* second = nullptr;

    void ask(size_t offset, size_t bytes) const {
        for (size_t i = 0; i < bytes; i += 64) {
            prefetch(first + offset + i);
            prefetch(second + offset + i);
        }
    }
};

// What a row part is multiplied with: floats [tokens, stride], and the same rounded for quantised formats.
struct RecordInputs {
    const float* x;
    size_t stride;
    Rounded rounded;
};

template <Format F, int N>
inline void dot_plain(const uint8_t* vector, size_t hidden, const RecordInputs& in, size_t token, const Soon& soon,
                      float* out) {
    const float* x = in.x + token * in.stride;
    constexpr int kParts = N > 2 ? 2 : 4;  // independent sums, to cover the latency of a multiply-add
    F8 acc[N][kParts];
    for (int t = 0; t < N; ++t) for (int p = 0; p < kParts; ++p) acc[t][p] = splat(0.0f);
    size_t i = 0;
    for (; i + 8 * kParts <= hidden; i += 8 * kParts) {
        soon.ask(i * (F == Format::f32 ? 4 : 2), 8 * kParts * (F == Format::f32 ? 4 : 2));
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

// acc[t] += the products of 8 groups, offsets[t] += what their minima add (lane by lane, to be summed)
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
        const int8_t* codes = x.codes + (token + t) * x.width + group * kGroup;
        F8 part[4];  // short chains of additions
        for (size_t i = 0; i < 8; ++i) {
            const uint8_t* weights = vector + i * group_bytes(F) + factor_bytes(F);
            I8 dot = F == Format::q8 ? group_q8(weights, codes + i * kGroup) : group_q4(weights, codes + i * kGroup);
            F8 factor = splat(factors[i]);
            part[i % 4] = i < 4 ? to_float(dot) * factor : fma(to_float(dot), factor, part[i % 4]);
        }
        acc[t] = acc[t] + ((part[0] + part[1]) + (part[2] + part[3]));
    }
}

template <Format F, int N>
inline void dot_groups(const uint8_t* vector, size_t hidden, const RecordInputs& in, size_t token, const Soon& soon,
                       float* out) {
    const Rounded& x = in.rounded;
    F8 acc[N], offsets[N];
    float rest[N] = {};
    for (int t = 0; t < N; ++t) acc[t] = offsets[t] = splat(0.0f);
    size_t g = 0;
    for (; g + 8 <= hidden / kGroup; g += 8, vector += 8 * group_bytes(F)) {
        soon.ask(g * group_bytes(F), 8 * group_bytes(F));
        dot_eight_groups<F, N>(vector, x, token, g, acc, offsets);
    }
    for (; g < hidden / kGroup; ++g, vector += group_bytes(F)) {
        float scale = read_half(vector), offset = offset_of<F>(vector, scale);
        for (int t = 0; t < N; ++t) {
            const int8_t* codes = x.codes + (token + t) * x.width + g * kGroup;
            size_t at = (token + t) * x.groups() + g;
            I8 dot = F == Format::q8 ? group_q8(vector + factor_bytes(F), codes)
                                     : group_q4(vector + factor_bytes(F), codes);
            acc[t] = fma(to_float(dot), splat(scale * x.scale[at]), acc[t]);
            if constexpr (F != Format::q8) rest[t] += offset * x.sum[at];
        }
    }
    for (int t = 0; t < N; ++t) out[t] = sum(acc[t] + offsets[t]) + rest[t];
}

// out[t * stride] = vector . x[t] for tokens [0, tokens)
template <Format F>
inline void dot_record(const uint8_t* vector, size_t hidden, const RecordInputs& in, size_t tokens, const Soon& soon,
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
            Soon soon{vector + matrix.record_bytes, vector + matrix.record_bytes};
            dot_record<F>(vector, matrix.hidden, in, tokens, soon, out + (r - first), stride);
        }
    });
}

// Row part, one vector: out[t * stride].
inline void record_row(const Matrix& matrix, size_t r, const RecordInputs& in, size_t tokens, const Soon& soon,
                       float* out, size_t stride) {
    with_format(matrix.format, [&]<Format F>() {
        dot_record<F>(matrix.vector(r), matrix.hidden, in, tokens, soon, out, stride);
    });
}

// out[0..hidden) += sum over count (at most 8) vectors of factors[i] * vector i; quantised ones from a group on
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

// What 8 neurons times 8 groups become before their codes are mixed: factor * scale as int8 of one unit per group.
struct MixedFactors {
    int8_t rounded[8][8];  // [group, neuron]
    float unit[8], shift[8];
};

// Lanes are groups, so nothing is summed across lanes.
template <Format F>
inline void mix_factors(const uint8_t* const* vectors, size_t offset, const float* factors, MixedFactors& out) {
    F8 scaled[8], most = splat(0.0f), shift = splat(0.0f);
    for (int n = 0; n < 8; ++n) {
        F8 scale, low;
        load_lines<F>(vectors[n] + offset, scale, low);
        scaled[n] = scale * splat(factors[n]);
        most = max(most, abs(scaled[n]));
        // around code 8, so that rounding the factors counts for least
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

// Column part, a few tokens: out[t * stride ..] += sum over i < count of factors[t * factor_stride + i] * vector
// at(i). Vectors whose factors are all zero are not read.
template <class At>
inline void record_columns(const Matrix& matrix, size_t count, const At& at, const float* factors,
                           size_t factor_stride, size_t tokens, float* out, size_t stride) {
    with_format(matrix.format, [&]<Format F>() {
        const uint8_t* vectors[8];
        float some[kStreamTokens][8];
        size_t held = 0;
        auto flush = [&] {
            for (size_t t = 0; t < tokens; ++t) {
                if constexpr (F == Format::q4 || F == Format::q4s) {
                    if (held == 8) {
                        add_eight_records<F>(vectors, some[t], matrix.hidden, out + t * stride);
                        add_records<F>(vectors, some[t], held, matrix.hidden, out + t * stride,
                                       matrix.hidden / kGroup / 8 * 8);
                        continue;
                    }
                }
                add_records<F>(vectors, some[t], held, matrix.hidden, out + t * stride);
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

// ---- many tokens: out[tokens, outputs] = x[tokens, inputs] * W, float32, in panels of 16 outputs ----

constexpr size_t kPanel = 16;       // outputs of a panel
constexpr size_t kDepth = 512;      // inputs packed at a time
constexpr size_t kStrip = 64;       // outputs of a task: four panels share the activations in cache
constexpr size_t kPanelBytes = kStrip * kDepth * sizeof(float);

// acc += x[N tokens][depth] * panel[depth][16], stored to out (added where `add`); `columns` outputs are real.
template <int N>
inline void multiply_panel(const float* panel, size_t depth, const float* x, size_t x_stride, bool add, size_t columns,
                           float* out, size_t stride) {
    F8 acc[N][2];
    for (int t = 0; t < N; ++t) acc[t][0] = acc[t][1] = splat(0.0f);
    for (size_t k = 0; k < depth; ++k) {
        F8 first = load(panel + k * kPanel), second = load(panel + k * kPanel + 8);
        for (int t = 0; t < N; ++t) {
            F8 value = splat(x[t * x_stride + k]);
            acc[t][0] = fma(first, value, acc[t][0]);
            acc[t][1] = fma(second, value, acc[t][1]);
        }
    }
    for (int t = 0; t < N; ++t) {
        for (size_t half = 0; half < 2 && 8 * half < columns; ++half) {
            float* to = out + t * stride + 8 * half;
            size_t some = columns - 8 * half;
            store_some(to, add ? acc[t][half] + load_some(to, some) : acc[t][half], some);
        }
    }
}

inline void multiply_strip(const float* panels, size_t depth, size_t outputs, const float* x, size_t x_stride,
                           size_t tokens, bool add, float* out, size_t stride) {
    constexpr size_t kTokens = 6;
    for (size_t token = 0; token < tokens; token += kTokens) {
        size_t count = tokens - token < kTokens ? tokens - token : kTokens;
        for (size_t first = 0; first < outputs; first += kPanel) {
            const float* panel = panels + first * kDepth;
            const float* from = x + token * x_stride;
            float* to = out + token * stride + first;
            size_t columns = outputs - first < kPanel ? outputs - first : kPanel;
            switch (count) {
                case 6: multiply_panel<6>(panel, depth, from, x_stride, add, columns, to, stride); break;
                case 5: multiply_panel<5>(panel, depth, from, x_stride, add, columns, to, stride); break;
                case 4: multiply_panel<4>(panel, depth, from, x_stride, add, columns, to, stride); break;
                case 3: multiply_panel<3>(panel, depth, from, x_stride, add, columns, to, stride); break;
                case 2: multiply_panel<2>(panel, depth, from, x_stride, add, columns, to, stride); break;
                default: multiply_panel<1>(panel, depth, from, x_stride, add, columns, to, stride); break;
            }
        }
    }
}

// Row part: panel[k][r] = vector first + r, value from + k.
template <Format F>
inline void pack_rows(const Matrix& matrix, size_t first, size_t outputs, size_t from, size_t depth, float* panels) {
    float line[kDepth];
    for (size_t r = 0; r < round_up(outputs, kPanel); ++r) {
        float* panel = panels + r / kPanel * kPanel * kDepth + r % kPanel;
        if (r < outputs) decode_record<F>(matrix.vector(first + r), from, depth, line);
        for (size_t k = 0; k < depth; ++k) panel[k * kPanel] = r < outputs ? line[k] : 0.0f;
    }
}

// Column part: panel[k][i] = vector from + k, value first + i.
template <Format F>
inline void pack_columns(const Matrix& matrix, size_t first, size_t outputs, size_t from, size_t depth, float* panels) {
    float line[kStrip] = {};
    for (size_t k = 0; k < depth; ++k) {
        decode_record<F>(matrix.vector(from + k), first, outputs, line);
        for (size_t i = 0; i < round_up(outputs, kPanel); i += 8)
            store(panels + i / kPanel * kPanel * kDepth + k * kPanel + i % kPanel, load(line + i));
    }
}

// One strip of up to kStrip outputs for all tokens. `panels` holds kPanelBytes.
inline void record_strip(const Matrix& matrix, bool column, size_t strip, const float* x, size_t x_stride,
                         size_t tokens, float* panels, float* out, size_t stride) {
    size_t all = column ? matrix.hidden : matrix.vectors(), inputs = column ? matrix.vectors() : matrix.hidden;
    size_t first = strip * kStrip, outputs = all - first < kStrip ? all - first : kStrip;
    for (size_t from = 0; from < inputs; from += kDepth) {
        size_t depth = inputs - from < kDepth ? inputs - from : kDepth;
        with_format(matrix.format, [&]<Format F>() {
            if (column) pack_columns<F>(matrix, first, outputs, from, depth, panels);
            else pack_rows<F>(matrix, first, outputs, from, depth, panels);
        });
        multiply_strip(panels, depth, outputs, x + from, x_stride, tokens, from > 0, out + first, stride);
    }
}

}  // namespace
}  // namespace tpi
