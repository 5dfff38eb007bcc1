// Products with weights in the tiled layout: tiles of 8 outputs x 32 inputs (the byte order is in tpi/pack/builder/quantise.py).
// Up to four tokens share each load of a tile.
#pragma once

#include "elementwise.hpp"

namespace tpi {
namespace {

// The rounded activations of N tokens from one group on: N pointers to codes; for q8, N more to the fine codes.
template <Format F, int N> struct Inputs {
    static constexpr int kCodes = F == Format::q8 ? 2 * N : N;
    const int8_t* codes[kCodes];
    const float* scale[N];
    const float* sum[N];

    Inputs(const Rounded& x, size_t token, size_t group) {
        for (int t = 0; t < N; ++t) {
            codes[t] = x.codes + (token + t) * x.width + group * kGroup;
            if constexpr (F == Format::q8) codes[N + t] = x.fine + (token + t) * x.width + group * kGroup;
            scale[t] = x.scale + (token + t) * x.groups() + group;
            sum[t] = x.sum + (token + t) * x.groups() + group;
        }
    }
    void next() {
        for (int i = 0; i < kCodes; ++i) codes[i] += kGroup;
        for (int t = 0; t < N; ++t) {
            ++scale[t];
            ++sum[t];
        }
    }
};

// Twice the values of e2m1, by code; and half of an e8m0 scale, 2^(exponent - 127) / 2, but at least 2^-126.
constexpr int8_t kE2m1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
inline float half_of_power(uint8_t exponent) {
    uint32_t bits = static_cast<uint32_t>(exponent < 2 ? 1 : exponent - 1) << 23;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

// The scales of a tile.
template <Format F> inline F8 load_scales(const uint8_t* scales) {
    if constexpr (F == Format::mxfp4) {
        F8 exponent = fma(load_high_nibbles(scales), splat(16.0f), load_low_nibbles(scales)) - splat(128.0f);
        return power_of_two(max(exponent, splat(-126.0f)));
    } else {
        return load_half(scales);
    }
}

// acc[t] + low[t] += tile * x for the 8 outputs of a tile. There are two sums, since each addition waits for the one
// before.
template <Format F, int N> inline void add_tile(const uint8_t* tile, const Inputs<F, N>& x, F8* acc, F8* low) {
    I8 dot[Inputs<F, N>::kCodes];
    if constexpr (F == Format::q8) {
        tile_q8<2 * N>(tile, x.codes, dot);
    } else if constexpr (F == Format::mxfp4) {
        tile_mxfp4<N>(tile, x.codes, dot);
    } else {
        tile_q4<N>(tile, x.codes, dot);
    }
    constexpr size_t codes = F == Format::q8 ? 256 : 128;
    const F8 scale = load_scales<F>(tile + codes);
    for (int t = 0; t < N; ++t) {
        F8 product = to_float(dot[t]);
        if constexpr (F == Format::q8) product = fma(to_float(dot[N + t]), splat(1.0f / kFine), product);
        product = product * splat(*x.scale[t]);
        if constexpr (F == Format::q4s) product = fma(splat(*x.sum[t]), splat(-8.0f), product);
        acc[t] = fma(product, scale, acc[t]);
        if constexpr (F == Format::q4) low[t] = fma(load_half(tile + codes + 16), splat(*x.sum[t]), low[t]);
    }
}

constexpr size_t kAhead = 1536;  // bytes that are prefetched ahead

// One row of tiles: all inputs of 8 outputs.
struct TileRow {
    const uint8_t* tiles;
    size_t groups;
};

template <Format F, int N>
inline void dot_tiles(const TileRow& row, const Rounded& x, size_t token, F8* acc) {
    constexpr size_t tile_bytes = kTileOutputs * group_bytes(F);
    Inputs<F, N> inputs(x, token, 0);
    F8 low[N];
    for (int t = 0; t < N; ++t) acc[t] = low[t] = splat(0.0f);
    const uint8_t* tile = row.tiles;
    for (size_t group = 0; group < row.groups; ++group, tile += tile_bytes, inputs.next()) {
        prefetch_bytes(tile + kAhead, tile_bytes);
        add_tile<F, N>(tile, inputs, acc, low);
    }
    for (int t = 0; t < N; ++t) acc[t] = acc[t] + low[t];
}

// out[(t - first) * stride + 0..7] = row * x[t] for tokens [first, last)
template <Format F>
inline void tile_row(const TileRow& row, const Rounded& x, size_t first, size_t last, float* out, size_t stride) {
    F8 acc[4];
    size_t token = first;
    for (; token + 4 <= last; token += 4) {
        dot_tiles<F, 4>(row, x, token, acc);
        for (size_t t = 0; t < 4; ++t, out += stride) store(out, acc[t]);
    }
    switch (last - token) {
        case 1: dot_tiles<F, 1>(row, x, token, acc); break;
        case 2: dot_tiles<F, 2>(row, x, token, acc); break;
        case 3: dot_tiles<F, 3>(row, x, token, acc); break;
        default: break;
    }
    for (size_t t = 0; t < last - token; ++t, out += stride) store(out, acc[t]);
}

// out(t)[output] += part of one unit * x, for output tiles [first, last) and N tokens.
// The unit's inputs start at `group` of x.
template <Format F, int N, class Out>
inline void add_unit(const uint8_t* part, size_t groups, size_t group, size_t first, size_t last, const Rounded& x,
                     size_t token, const Out& out) {
    constexpr size_t tile_bytes = kTileOutputs * group_bytes(F);
    const uint8_t* tile = part + first * groups * tile_bytes;
    float* to[N];
    for (int t = 0; t < N; ++t) to[t] = out(token + t);
    for (size_t output = first; output < last; ++output) {
        F8 acc[N], low[N];
        for (int t = 0; t < N; ++t) low[t] = splat(0.0f);
        for (int t = 0; t < N; ++t) acc[t] = load(to[t] + output * kTileOutputs);
        Inputs<F, N> inputs(x, token, group);
        for (size_t g = 0; g < groups; ++g, tile += tile_bytes, inputs.next()) {
            prefetch_bytes(tile + kAhead, tile_bytes);
            add_tile<F, N>(tile, inputs, acc, low);
        }
        for (int t = 0; t < N; ++t) store(to[t] + output * kTileOutputs, acc[t] + low[t]);
    }
}

template <Format F, class Out>
inline void add_unit_tokens(const uint8_t* part, size_t groups, size_t group, size_t first, size_t last,
                            const Rounded& x, size_t tokens, const Out& out) {
    size_t token = 0;
    for (; token + 4 <= tokens; token += 4) add_unit<F, 4>(part, groups, group, first, last, x, token, out);
    switch (tokens - token) {
        case 1: return add_unit<F, 1>(part, groups, group, first, last, x, token, out);
        case 2: return add_unit<F, 2>(part, groups, group, first, last, x, token, out);
        case 3: return add_unit<F, 3>(part, groups, group, first, last, x, token, out);
        default: return;
    }
}

// Call work.template operator()<F>() with the matrix's format as a constant; only quantised formats are tiled.
template <class Work> inline void with_tile_format(Format format, const Work& work) {
    switch (format) {
        case Format::q8: return work.template operator()<Format::q8>();
        case Format::q4: return work.template operator()<Format::q4>();
        case Format::mxfp4: return work.template operator()<Format::mxfp4>();
        default: return work.template operator()<Format::q4s>();
    }
}

// Row part: out[(t - from) * stride + r - first] for rows [first, first + count), whole tiles, and tokens [from, to).
inline void tiled_rows(const Matrix& matrix, size_t first, size_t count, const Rounded& x, size_t from, size_t to,
                       float* out, size_t stride) {
    with_tile_format(matrix.format, [&]<Format F>() {
        size_t groups = matrix.hidden / kGroup, row_bytes = groups * kTileOutputs * group_bytes(F);
        for (size_t r = first; r < first + count; r += kTileOutputs) {
            size_t unit = r / matrix.width, within = r % matrix.width;
            const uint8_t* part = matrix.data + unit * matrix.unit_bytes;
            if (within + kTileOutputs == matrix.width && unit + 1 < matrix.units)
                prefetch_bytes(part + matrix.unit_bytes, kAhead);
            tile_row<F>({part + within / kTileOutputs * row_bytes, groups}, x, from, to, out + (r - first), stride);
        }
    });
}

// Column part, a few tokens: out += all units * x for output tiles [first, last).
inline void tiled_columns_stream(const Matrix& matrix, size_t first, size_t last, const Rounded& x, size_t tokens,
                                 float* out, size_t stride) {
    with_tile_format(matrix.format, [&]<Format F>() {
        size_t groups = matrix.width / kGroup;
        size_t skipped = first * groups * kTileOutputs * group_bytes(F);
        for (size_t unit = 0; unit < matrix.units; ++unit) {
            const uint8_t* part = matrix.data + unit * matrix.unit_bytes;
            if (unit + 1 < matrix.units) prefetch_bytes(part + matrix.unit_bytes + skipped, kAhead);
            add_unit_tokens<F>(part, groups, unit * groups, first, last, x, tokens, Rows{out, stride});
        }
    });
}

// Column part, many tokens: out = all units * x for one output tile. Its tiles are gathered in `packed` first, since
// units lie far apart; it holds units * width / 32 tiles.
inline void tiled_columns_block(const Matrix& matrix, size_t output, const Rounded& x, size_t tokens, uint8_t* packed,
                                float* out, size_t stride) {
    with_tile_format(matrix.format, [&]<Format F>() {
        size_t groups = matrix.width / kGroup, piece = groups * kTileOutputs * group_bytes(F);
        for (size_t unit = 0; unit < matrix.units; ++unit)
            std::memcpy(packed + unit * piece, matrix.data + unit * matrix.unit_bytes + output * piece, piece);
        tile_row<F>({packed, matrix.units * groups}, x, 0, tokens, out + output * kTileOutputs, stride);
    });
}

// The values of one row (row part) or column (column part) of a tiled matrix, [hidden] floats.
inline void tiled_vector(const Matrix& matrix, size_t vector, bool column, float* out) {
    const Format format = matrix.format;
    size_t tile_bytes = kTileOutputs * group_bytes(format), codes = format == Format::q8 ? 256 : 128;
    size_t within = vector % matrix.width, groups = (column ? matrix.width : matrix.hidden) / kGroup;
    const uint8_t* part = matrix.data + vector / matrix.width * matrix.unit_bytes;
    for (size_t i = 0; i < matrix.hidden; ++i) {
        size_t output = column ? i : within, input = column ? within : i;
        const uint8_t* tile = part + (output / kTileOutputs * groups + input / kGroup) * tile_bytes;
        size_t lane = output % kTileOutputs, value = input % kGroup;
        if (format == Format::mxfp4) {
            size_t half = value % 16;
            int code = tile[half / 4 * 32 + lane * 4 + half % 4] >> (value / 16 * 4) & 15;
            out[i] = half_of_power(tile[codes + lane]) * static_cast<float>(kE2m1[code]);
            continue;
        }
        uint16_t factors[2];
        std::memcpy(&factors[0], tile + codes + 2 * lane, 2);
        float scale = half_to_float(factors[0]);
        if (format == Format::q8) {
            out[i] = scale * static_cast<int8_t>(tile[value / 4 * 32 + lane * 4 + value % 4]);
            continue;
        }
        size_t half = value % 16;
        int code = tile[half / 4 * 32 + lane * 4 + half % 4] >> (value / 16 * 4) & 15;
        if (format == Format::q4) {
            std::memcpy(&factors[1], tile + codes + 16 + 2 * lane, 2);
            out[i] = scale * static_cast<float>(code) + half_to_float(factors[1]);
        } else {
            out[i] = scale * static_cast<float>(code - 8);
        }
    }
}

}  // namespace
}  // namespace tpi
