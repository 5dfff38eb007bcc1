// Products with weights in the tiled layout: tiles of 8 outputs x 32 inputs (the byte order is in tpi/pack/builder/quantise.py).
// Up to four tokens share each load of a tile.
#pragma once

#include "elementwise.hpp"

namespace tpi {
namespace {

// True if the halves of a group have scales of their own.
static constexpr bool by_halves(Format format) {
    Factors factors = coding_of(format).factors;
    return factors == Factors::halves || factors == Factors::lines;
}

// The rounded activations of N tokens from one group on: N pointers to codes; for q8, N more to the fine codes.
template <Format F, int N> struct Inputs {
    static constexpr int kCodes = F == Format::q8 ? 2 * N : N;
    static constexpr int kDots = F == Format::q8 || by_halves(F) ? 2 * N : N;
    const int8_t* codes[kCodes];
    const float *scale[N], *sum[N], *half[N];

    Inputs(const Rounded& x, size_t token, size_t group) {
        for (int t = 0; t < N; ++t) {
            codes[t] = x.codes + (token + t) * x.width + group * kGroup;
            if constexpr (F == Format::q8) codes[N + t] = x.fine + (token + t) * x.width + group * kGroup;
            scale[t] = x.scale + (token + t) * x.groups() + group;
            sum[t] = x.sum + (token + t) * x.groups() + group;
            half[t] = x.half + (token + t) * x.groups() + group;
        }
    }
    void next() {
        for (int i = 0; i < kCodes; ++i) codes[i] += kGroup;
        for (int t = 0; t < N; ++t) {
            ++scale[t];
            ++sum[t];
            ++half[t];
        }
    }
};

// Half of an e8m0 scale, 2^(exponent - 127) / 2, but at least 2^-126.
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

// The codes of inputs 4 * Word to 4 * Word + 3, and of the four 16 further, for Word in 0..3.
template <Format F, int Word> inline void tile_codes(const uint8_t* tile, B32& first, B32& second) {
    constexpr Coding coding = coding_of(F);
    constexpr int kWord = Word % coding.low, kAt = Word / coding.low * coding.low;  // its bits begin at kAt
    constexpr int kHalf = coding.low * (4 / coding.low);
    B32 low = load_b32(tile + 32 * kWord);
    first = shifted<kAt>(low, (1 << coding.low) - 1);
    second = shifted<kAt + kHalf>(low, (1 << coding.low) - 1);
    if constexpr (coding.high != 0) {
        constexpr int kHighAt = Word / coding.high * coding.high - coding.low;
        constexpr int kMask = ((1 << coding.high) - 1) << coding.low;
        B32 high = load_b32(tile + 32 * coding.low + 32 * (Word % coding.high));
        first = first | shifted<kHighAt>(high, kMask);
        second = second | shifted<kHighAt + 4>(high, kMask);
    }
}

// Sum over a tile's 32 inputs of number * x, for N tokens. If the halves have scales of their own, N more sums are of
// the second half.
template <Format F, int N> inline void tile_dots(const uint8_t* tile, const int8_t* const* x, I8* out) {
    constexpr int kSecond = by_halves(F) ? N : 0;
    for (int i = 0; i < N + kSecond; ++i) out[i] = no_dots();
    auto add = [&]<int Word>() {
        B32 first, second;
        tile_codes<F, Word>(tile, first, second);
        constexpr const int8_t* table = coding_of(F).table;
        if constexpr (table != nullptr) {
            first = look_up(table, first);
            second = look_up(table, second);
        }
        for (int t = 0; t < N; ++t) {
            if constexpr (table != nullptr) {
                out[t] = dot_signed(out[t], first, x[t] + 4 * Word);
                out[kSecond + t] = dot_signed(out[kSecond + t], second, x[t] + 16 + 4 * Word);
            } else {
                out[t] = dot_codes(out[t], first, x[t] + 4 * Word);
                out[kSecond + t] = dot_codes(out[kSecond + t], second, x[t] + 16 + 4 * Word);
            }
        }
    };
    add.template operator()<0>();
    add.template operator()<1>();
    add.template operator()<2>();
    add.template operator()<3>();
}

// The scales of the halves of a tile's groups, and what is added for each unit of the sum of their codes.
template <Format F> struct HalfLines {
    F8 scale[2], offset[2];

    HalfLines(const uint8_t* factors) {
        constexpr Coding coding = coding_of(F);
        F8 whole = load_half(factors);
        if constexpr (coding.factors == Factors::lines) {
            I8 each = load_int16(factors + 32);
            F8 minimum = load_half(factors + 16) * splat(-1.0f);
            scale[0] = whole * to_float(unsigned_bits<0, 4>(each));
            scale[1] = whole * to_float(unsigned_bits<4, 4>(each));
            offset[0] = minimum * to_float(unsigned_bits<8, 4>(each));
            offset[1] = minimum * to_float(unsigned_bits<12, 4>(each));
        } else {
            I8 each = load_int16(factors + 16);
            if constexpr (coding.unit != 1.0f) whole = whole * splat(coding.unit);
            scale[0] = whole * to_float(signed_bits<0, 8>(each));
            scale[1] = whole * to_float(signed_bits<8, 8>(each));
            for (int i = 0; i < 2; ++i) offset[i] = scale[i] * splat(static_cast<float>(-coding.offset));
        }
    }
};

// acc[t] + low[t] += tile * x for the 8 outputs of a tile. There are two sums, since each addition waits for the one
// before.
template <Format F, int N> inline void add_tile(const uint8_t* tile, const Inputs<F, N>& x, F8* acc, F8* low) {
    constexpr Coding coding = coding_of(F);
    constexpr size_t codes = kTileOutputs * code_bytes(F);
    I8 dot[Inputs<F, N>::kDots];
    if constexpr (F == Format::q8) {
        tile_q8<2 * N>(tile, x.codes, dot);
    } else if constexpr (is_four_bit(F)) {
        tile_q4<N>(tile, x.codes, dot);
    } else {
        tile_dots<F, N>(tile, x.codes, dot);
    }
    if constexpr (by_halves(F)) {
        const HalfLines<F> lines(tile + codes);
        for (int t = 0; t < N; ++t) {
            F8 product = fma(to_float(dot[N + t]), lines.scale[1], to_float(dot[t]) * lines.scale[0]);
            acc[t] = fma(product, splat(*x.scale[t]), acc[t]);
            if constexpr (coding.table == nullptr) {
                low[t] = fma(lines.offset[0], splat(*x.half[t]), low[t]);
                low[t] = fma(lines.offset[1], splat(*x.sum[t] - *x.half[t]), low[t]);
            }
        }
        return;
    } else {
        const F8 scale = load_scales<F>(tile + codes);
        for (int t = 0; t < N; ++t) {
            F8 product = to_float(dot[t]);
            if constexpr (F == Format::q8) product = fma(to_float(dot[N + t]), splat(1.0f / kFine), product);
            product = product * splat(*x.scale[t]);
            if constexpr (coding.offset != 0)
                product = fma(splat(*x.sum[t]), splat(static_cast<float>(-coding.offset)), product);
            acc[t] = fma(product, scale, acc[t]);
            if constexpr (coding.factors == Factors::line)
                low[t] = fma(load_half(tile + codes + 16), splat(*x.sum[t]), low[t]);
        }
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
    const Inputs<F, N> begun(x, token, group);
    float* to[N];
    for (int t = 0; t < N; ++t) to[t] = out(token + t);
    for (size_t output = first; output < last; ++output) {
        F8 acc[N], low[N];
        for (int t = 0; t < N; ++t) low[t] = splat(0.0f);
        for (int t = 0; t < N; ++t) acc[t] = load(to[t] + output * kTileOutputs);
        Inputs<F, N> inputs = begun;
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
        case Format::q6: return work.template operator()<Format::q6>();
        case Format::q5: return work.template operator()<Format::q5>();
        case Format::q3: return work.template operator()<Format::q3>();
        case Format::q2: return work.template operator()<Format::q2>();
        case Format::iq4: return work.template operator()<Format::iq4>();
        case Format::iq3s: return work.template operator()<Format::iq3s>();
        case Format::iq3: return work.template operator()<Format::iq3>();
        case Format::iq2: return work.template operator()<Format::iq2>();
        case Format::iq1: return work.template operator()<Format::iq1>();
        case Format::nvfp4: return work.template operator()<Format::nvfp4>();
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

inline float half_at(const uint8_t* p) {
    uint16_t half;
    std::memcpy(&half, p, 2);
    return half_to_float(half);
}

// The bits of one plane of a code in a tile; the plane has `bits` of each.
inline int plane_at(const uint8_t* plane, int bits, size_t lane, size_t value) {
    int word = static_cast<int>(value / 4);
    uint8_t byte = plane[static_cast<size_t>(word % bits) * 32 + lane * 4 + value % 4];
    return byte >> (word / bits * bits) & ((1 << bits) - 1);
}

// One value of a tile.
inline float tile_value(Format format, const uint8_t* tile, size_t lane, size_t value) {
    const Coding coding = coding_of(format);
    const uint8_t* factors = tile + kTileOutputs * code_bytes(format);
    int code = plane_at(tile, coding.low, lane, value);
    if (format == Format::q8) return half_at(factors + 2 * lane) * static_cast<float>(static_cast<int8_t>(code));
    if (coding.high) code |= plane_at(tile + 32 * coding.low, coding.high, lane, value) << coding.low;
    float number = static_cast<float>(coding.table ? coding.table[code] : code - coding.offset);
    if (coding.factors == Factors::power) return half_of_power(factors[lane]) * number;
    float scale = half_at(factors + 2 * lane) * coding.unit;
    size_t second = value / 16;
    if (coding.factors == Factors::line) return scale * number + half_at(factors + 16 + 2 * lane);
    if (coding.factors == Factors::halves) {
        return scale * static_cast<float>(static_cast<int8_t>(factors[16 + 2 * lane + second])) * number;
    }
    if (coding.factors == Factors::lines) {
        const uint8_t* each = factors + 32 + 2 * lane;
        float minimum = half_at(factors + 16 + 2 * lane) * static_cast<float>(each[1] >> (4 * second) & 15);
        return scale * static_cast<float>(each[0] >> (4 * second) & 15) * number - minimum;
    }
    return scale * number;
}

// The values of one row (row part) or column (column part) of a tiled matrix, [hidden] floats.
inline void tiled_vector(const Matrix& matrix, size_t vector, bool column, float* out) {
    size_t tile_bytes = kTileOutputs * group_bytes(matrix.format);
    size_t within = vector % matrix.width, groups = (column ? matrix.width : matrix.hidden) / kGroup;
    const uint8_t* part = matrix.data + vector / matrix.width * matrix.unit_bytes;
    for (size_t i = 0; i < matrix.hidden; ++i) {
        size_t output = column ? i : within, input = column ? within : i;
        const uint8_t* tile = part + (output / kTileOutputs * groups + input / kGroup) * tile_bytes;
        out[i] = tile_value(matrix.format, tile, output % kTileOutputs, input % kGroup);
    }
}

}  // namespace
}  // namespace tpi
