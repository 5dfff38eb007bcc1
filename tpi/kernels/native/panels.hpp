// Products of many tokens with weights in the record layout: out[tokens, outputs] = x[tokens, inputs] * W in float32,
// from panels of 16 outputs that are unpacked once for all tokens.
#pragma once

#include "decode.hpp"
#include "wide.hpp"

namespace tpi {
namespace {

constexpr size_t kPanel = 16;        // outputs of a panel
constexpr size_t kDepth = 512;       // inputs packed at a time
constexpr size_t kStrip = 64;        // outputs of a task: four panels share the activations in cache
constexpr size_t kPair = 2 * kWide;  // outputs that are multiplied together: of one panel, or of two
constexpr size_t kPanelBytes = kStrip * kDepth * sizeof(float);

// acc += x[N tokens][depth] * panel[depth][kPair], stored to out (added if `add`); only the first `columns` outputs
// exist. Each output sums its products in the order of the inputs, so vectors of any width give the same bits.
template <int N>
inline void multiply_panel(const float* panel, size_t depth, const float* x, size_t x_stride, bool add, size_t columns,
                           float* out, size_t stride) {
    const float* next = kPair > kPanel ? panel + kPanel * kDepth : panel + kWide;
    Wide acc[N][2];
    for (int t = 0; t < N; ++t) acc[t][0] = acc[t][1] = wide(0.0f);
    for (size_t k = 0; k < depth; ++k) {
        Wide first = wide_floats(panel + k * kPanel), second = wide_floats(next + k * kPanel);
        for (int t = 0; t < N; ++t) {
            Wide value = wide(x[t * x_stride + k]);
            acc[t][0] = fma(first, value, acc[t][0]);
            acc[t][1] = fma(second, value, acc[t][1]);
        }
    }
    for (int t = 0; t < N; ++t) {
        float sums[kPair];
        store(sums, acc[t][0]);
        store(sums + kWide, acc[t][1]);
        for (size_t i = 0; i < columns; i += 8) {
            float* to = out + t * stride + i;
            F8 sum = load(sums + i);
            store_some(to, add ? sum + load_some(to, columns - i) : sum, columns - i);
        }
    }
}

inline void multiply_strip(const float* panels, size_t depth, size_t outputs, const float* x, size_t x_stride,
                           size_t tokens, bool add, float* out, size_t stride) {
    constexpr size_t kTokens = 6;
    for (size_t token = 0; token < tokens; token += kTokens) {
        size_t count = tokens - token < kTokens ? tokens - token : kTokens;
        for (size_t first = 0; first < outputs; first += kPair) {
            const float* panel = panels + first * kDepth;
            const float* from = x + token * x_stride;
            float* to = out + token * stride + first;
            size_t columns = outputs - first < kPair ? outputs - first : kPair;
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

// Row part: panel[k][r] = value from + k of vector first + r.
template <Format F>
inline void pack_rows(const Matrix& matrix, size_t first, size_t outputs, size_t from, size_t depth, float* panels) {
    float line[kDepth];
    for (size_t r = 0; r < round_up(outputs, kPair); ++r) {
        float* panel = panels + r / kPanel * kPanel * kDepth + r % kPanel;
        if (r < outputs) decode_record<F>(matrix.vector(first + r), from, depth, line);
        for (size_t k = 0; k < depth; ++k) panel[k * kPanel] = r < outputs ? line[k] : 0.0f;
    }
}

// Column part: panel[k][i] = value first + i of vector from + k.
template <Format F>
inline void pack_columns(const Matrix& matrix, size_t first, size_t outputs, size_t from, size_t depth, float* panels) {
    float line[kStrip] = {};
    for (size_t k = 0; k < depth; ++k) {
        decode_record<F>(matrix.vector(from + k), first, outputs, line);
        for (size_t i = 0; i < round_up(outputs, kPair); i += 8)
            store(panels + i / kPanel * kPanel * kDepth + k * kPanel + i % kPanel, load(line + i));
    }
}

// Compute one strip of up to kStrip outputs for all tokens. `panels` holds kPanelBytes.
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
