// Products of many tokens with weights in the tiled layout. A panel holds some outputs and inputs whose codes are
// unpacked to bytes, and whose factors to floats, once for a block of tokens.
#pragma once

#include "tiles.hpp"
#include "wide.hpp"

namespace tpi {
namespace {

constexpr size_t kPanelOutputs = kVectors * kWide;
constexpr size_t kPanelTiles = kPanelOutputs / kTileOutputs;
constexpr size_t kPanelGroups = 16;  // groups of inputs that are unpacked at a time, so that they stay in the first cache
constexpr size_t kBlockTokens = 64;

// What is added to the numbers of a format, so that they are codes without a sign, as the products want them. 0: they
// keep their sign, or have none.
template <Format F> constexpr int shift_of() {
    constexpr Coding coding = coding_of(F);
    if constexpr (F == Format::q8) return kMostSpread >= 255 ? 128 : 0;
    if constexpr (coding.table == nullptr) return 0;
    int low = 0, high = 0;
    for (int i = 0; coding.table && i < 16; ++i) {
        low = coding.table[i] < low ? coding.table[i] : low;
        high = coding.table[i] > high ? coding.table[i] : high;
    }
    return high - low <= kMostSpread ? -low : 0;
}

// The largest unpacked code; 0 if they have a sign.
template <Format F> constexpr int most_of() {
    constexpr Coding coding = coding_of(F);
    if constexpr (F == Format::q8) return shift_of<F>() ? 255 : 0;
    if constexpr (coding.table == nullptr) return (1 << (coding.low + coding.high)) - 1;
    int most = 0;
    for (int i = 0; coding.table && i < 16; ++i) most = coding.table[i] > most ? coding.table[i] : most;
    return shift_of<F>() ? most + shift_of<F>() : 0;
}

struct Table { int8_t value[16]; };
template <Format F> constexpr Table shifted_table() {
    Table table{};
    for (int i = 0; i < 16; ++i) table.value[i] = static_cast<int8_t>(coding_of(F).table[i] + shift_of<F>());
    return table;
}

// A group of 32 inputs for all outputs of a panel.
template <Format F> struct PanelGroup {
    static constexpr bool kLine = coding_of(F).factors == Factors::line;
    static constexpr bool kHalfOffsets = by_halves(F) && coding_of(F).table == nullptr;

    alignas(64) uint8_t codes[8][4 * kPanelOutputs];  // four inputs of each output, and so on
    float scale[by_halves(F) ? 2 : 1][kPanelOutputs];
    float offset[kHalfOffsets ? 2 : 1][kPanelOutputs];
};

// Unpack a tile to outputs [n * 8, n * 8 + 8) of a panel.
template <Format F> inline void unpack_tile(const uint8_t* tile, PanelGroup<F>& to, size_t n) {
    const uint8_t* factors = tile + kTileOutputs * code_bytes(F);
    if constexpr (F == Format::q8) {
        for (size_t word = 0; word < 8; ++word)
            for (size_t i = 0; i < 32; ++i)
                to.codes[word][32 * n + i] = static_cast<uint8_t>(tile[32 * word + i] + shift_of<F>());
    } else {
        auto unpack = [&]<int Word>() {
            B32 first, second;
            tile_codes<F, Word>(tile, first, second);
            if constexpr (coding_of(F).table != nullptr) {
                static constexpr Table kTable = shifted_table<F>();
                first = look_up(kTable.value, first);
                second = look_up(kTable.value, second);
            }
            std::memcpy(to.codes[Word] + 32 * n, &first, 32);
            std::memcpy(to.codes[Word + 4] + 32 * n, &second, 32);
        };
        unpack.template operator()<0>();
        unpack.template operator()<1>();
        unpack.template operator()<2>();
        unpack.template operator()<3>();
    }
    if constexpr (kPaired) pair_words(to.codes[0]);
    if constexpr (by_halves(F)) {
        const HalfLines<F> lines(factors);
        for (int i = 0; i < 2; ++i) {
            store(to.scale[i] + n * kTileOutputs, lines.scale[i]);
            if constexpr (PanelGroup<F>::kHalfOffsets) store(to.offset[i] + n * kTileOutputs, lines.offset[i]);
        }
    } else {
        store(to.scale[0] + n * kTileOutputs, load_scales<F>(factors));
        if constexpr (PanelGroup<F>::kLine) store(to.offset[0] + n * kTileOutputs, load_half(factors + 16));
    }
}

// Sums of N tokens for all outputs of a panel.
template <int N, class T> struct PanelSums {
    T of[N][kVectors];
};

// True if a panel is nothing but a tile, whose codes are bytes already.
template <Format F> constexpr bool is_tile() { return F == Format::q8 && shift_of<F>() == 0 && !kPaired; }

// Add the products of half a group: `codes` are of its first word, x of its first inputs.
template <Format F, int N>
TPI_INLINE void dot_half(const uint8_t* codes, const int8_t* x, size_t stride, PanelSums<N, WideInt>& dots) {
    add_words<most_of<F>(), N>(codes, x, stride, dots.of);
}

// Set dots to what makes up for the shift of the codes; `sum(t)` is the sum of the activations.
template <Format F, int N, class Sum> TPI_INLINE void begin_dots(PanelSums<N, WideInt>& dots, const Sum& sum) {
    static_assert(!kPaired || shift_of<F>() == 0);
    TPI_UNROLL for (int t = 0; t < N; ++t) {
        WideInt begin = wide_int(shift_of<F>() ? -shift_of<F>() * sum(t) : 0);
        TPI_UNROLL for (int v = 0; v < kVectors; ++v) dots.of[t][v] = begin;
    }
}

// acc[t] += scale * number * x of one group, without the offsets
template <Format F, int N>
TPI_INLINE void add_group(const PanelGroup<F>& panel, const Rounded& x, size_t token, size_t group, PanelSums<N, Wide>& acc) {
    const int8_t* codes = x.codes + token * x.width + group * kGroup;
    const float *scale = x.scale + token * x.groups() + group, *sum = x.sum + token * x.groups() + group;
    const CodeSums* whole = x.whole + token * x.groups() + group;
    size_t groups = x.groups();
    PanelSums<N, WideInt> dots;
    PanelSums<N, Wide> first;
    if constexpr (by_halves(F)) {
        begin_dots<F, N>(dots, [&](int t) { return whole[t * groups].first; });
        dot_half<F, N>(panel.codes[0], codes, x.width, dots);
        end_words<N>(dots.of);
        TPI_UNROLL for (int v = 0; v < kVectors; ++v) {
            const Wide factor = wide_floats(panel.scale[0] + v * kWide);
            TPI_UNROLL for (int t = 0; t < N; ++t) first.of[t][v] = to_float(dots.of[t][v]) * factor;
        }
        begin_dots<F, N>(dots, [&](int t) { return whole[t * groups].second; });
        dot_half<F, N>(panel.codes[4], codes + 16, x.width, dots);
        end_words<N>(dots.of);
        TPI_UNROLL for (int v = 0; v < kVectors; ++v) {
            const Wide factor = wide_floats(panel.scale[1] + v * kWide);
            TPI_UNROLL for (int t = 0; t < N; ++t) {
                Wide product = fma(to_float(dots.of[t][v]), factor, first.of[t][v]);
                acc.of[t][v] = fma(product, wide(scale[t * groups]), acc.of[t][v]);
            }
        }
        return;
    }
    auto both = [&](const int8_t* values) TPI_INLINED {
        dot_half<F, N>(panel.codes[0], values, x.width, dots);
        dot_half<F, N>(panel.codes[4], values + 16, x.width, dots);
        end_words<N>(dots.of);
    };
    if constexpr (is_tile<F>()) {
        const int8_t* values[2 * N];
        for (int t = 0; t < N; ++t) {
            values[t] = codes + t * x.width;
            values[N + t] = x.fine + (token + t) * x.width + group * kGroup;
        }
        WideInt each[2 * N];
        tile_q8<2 * N>(panel.codes[0], values, each);
        TPI_UNROLL for (int t = 0; t < N; ++t) {
            dots.of[t][0] = each[t];
            first.of[t][0] = to_float(each[N + t]) * wide(1.0f / kFine);
        }
    } else {
        if constexpr (F == Format::q8) {
            begin_dots<F, N>(dots, [&](int t) { return whole[t * groups].fine; });
            both(x.fine + token * x.width + group * kGroup);
            TPI_UNROLL for (int t = 0; t < N; ++t)
                TPI_UNROLL for (int v = 0; v < kVectors; ++v)
                    first.of[t][v] = to_float(dots.of[t][v]) * wide(1.0f / kFine);
        }
        begin_dots<F, N>(dots, [&](int t) { return whole[t * groups].first + whole[t * groups].second; });
        both(codes);
    }
    TPI_UNROLL for (int v = 0; v < kVectors; ++v) {
        const Wide factor = wide_floats(panel.scale[0] + v * kWide);
        TPI_UNROLL for (int t = 0; t < N; ++t) {
            Wide product = to_float(dots.of[t][v]);
            if constexpr (F == Format::q8) product = product + first.of[t][v];  // exact
            product = product * wide(scale[t * groups]);
            if constexpr (coding_of(F).offset != 0)
                product = fma(wide(sum[t * groups]), wide(static_cast<float>(-coding_of(F).offset)), product);
            acc.of[t][v] = fma(product, factor, acc.of[t][v]);
        }
    }
}

// low[t] += offset * sum of x of one group
template <Format F, int N>
TPI_INLINE void add_offsets(const PanelGroup<F>& panel, const Rounded& x, size_t token, size_t group, PanelSums<N, Wide>& low) {
    size_t groups = x.groups();
    const float *sum = x.sum + token * groups + group, *half = x.half + token * groups + group;
    TPI_UNROLL for (int t = 0; t < N; ++t)
        TPI_UNROLL for (int v = 0; v < kVectors; ++v) {
            const Wide offset = wide_floats(panel.offset[0] + v * kWide);
            if constexpr (PanelGroup<F>::kLine) {
                low.of[t][v] = fma(offset, wide(sum[t * groups]), low.of[t][v]);
            } else {
                low.of[t][v] = fma(offset, wide(half[t * groups]), low.of[t][v]);
                const Wide second = wide_floats(panel.offset[1] + v * kWide);
                low.of[t][v] = fma(second, wide(sum[t * groups] - half[t * groups]), low.of[t][v]);
            }
        }
}

template <int N> TPI_INLINE PanelSums<N, Wide> load_sums(const float* from) {
    PanelSums<N, Wide> sums;
    TPI_UNROLL for (int t = 0; t < N; ++t)
        TPI_UNROLL for (int v = 0; v < kVectors; ++v) sums.of[t][v] = wide_floats(from + t * kPanelOutputs + v * kWide);
    return sums;
}

template <int N> TPI_INLINE void store_sums(const PanelSums<N, Wide>& sums, float* to) {
    TPI_UNROLL for (int t = 0; t < N; ++t)
        TPI_UNROLL for (int v = 0; v < kVectors; ++v) store(to + t * kPanelOutputs + v * kWide, sums.of[t][v]);
}

// The scratch of a thread that multiplies panels.
template <Format F> struct PanelScratch {
    PanelGroup<F> groups[kPanelGroups];
    float acc[kBlockTokens][kPanelOutputs], low[kBlockTokens][kPanelOutputs];
};

// Add the products of the first `count` groups of the panel, which are `group` and on of x, to tokens [at, at + N) of
// the block that begins at `token`.
template <Format F, int N>
inline void add_panel(PanelScratch<F>& scratch, size_t count, const Rounded& x, size_t token, size_t at, size_t group) {
    auto acc = load_sums<N>(scratch.acc[at]);
    for (size_t g = 0; g < count; ++g) add_group<F, N>(scratch.groups[g], x, token + at, group + g, acc);
    store_sums<N>(acc, scratch.acc[at]);
    if constexpr (PanelGroup<F>::kLine || PanelGroup<F>::kHalfOffsets) {
        auto low = load_sums<N>(scratch.low[at]);
        for (size_t g = 0; g < count; ++g) add_offsets<F, N>(scratch.groups[g], x, token + at, group + g, low);
        store_sums<N>(low, scratch.low[at]);
    }
}

// out[(t - from) * stride + 0..8 * tiles) = panel * x[t] for tokens [from, to), at most kBlockTokens. `tile(n, group)`
// is a tile of the panel; only the first `tiles` exist.
template <Format F, class Tile>
inline void multiply_tiles(PanelScratch<F>& scratch, const Tile& tile, size_t tiles, size_t groups, const Rounded& x,
                           size_t from, size_t to, float* out, size_t stride) {
    size_t tokens = to - from;
    std::memset(scratch.acc, 0, tokens * sizeof(scratch.acc[0]));
    std::memset(scratch.low, 0, tokens * sizeof(scratch.low[0]));
    for (size_t group = 0; group < groups; group += kPanelGroups) {
        size_t count = groups - group < kPanelGroups ? groups - group : kPanelGroups, at = 0;
        for (size_t n = 0; n < kPanelTiles; ++n)
            for (size_t g = 0; g < count; ++g)
                unpack_tile<F>(tile(n < tiles ? n : tiles - 1, group + g), scratch.groups[g], n);
        for (; at + 4 <= tokens; at += 4) add_panel<F, 4>(scratch, count, x, from, at, group);
        for (; at < tokens; ++at) add_panel<F, 1>(scratch, count, x, from, at, group);
    }
    for (size_t t = 0; t < tokens; ++t)
        for (size_t i = 0; i < tiles * kTileOutputs; i += kTileOutputs)
            store(out + t * stride + i, load(scratch.acc[t] + i) + load(scratch.low[t] + i));
}

constexpr size_t kBlockBytes = sizeof(PanelScratch<Format::q6>);  // the largest

// Row part: out[(t - from) * stride + r - first] for rows [first, first + count), whole tiles, and tokens [from, to).
inline void tiled_rows_block(const Matrix& matrix, size_t first, size_t count, const Rounded& x, size_t from, size_t to,
                             uint8_t* scratch, float* out, size_t stride) {
    with_tile_format(matrix.format, [&]<Format F>() {
        static_assert(sizeof(PanelScratch<F>) <= kBlockBytes);
        if constexpr (is_tile<F>())  // which a panel would only copy
            return tiled_rows(matrix, first, count, x, from, to, out, stride);
        constexpr size_t tile_bytes = kTileOutputs * group_bytes(F);
        size_t groups = matrix.hidden / kGroup;
        for (size_t done = 0; done < count; done += kPanelOutputs) {
            const uint8_t* rows[kPanelTiles] = {};
            size_t tiles = (count - done) / kTileOutputs < kPanelTiles ? (count - done) / kTileOutputs : kPanelTiles;
            for (size_t n = 0; n < tiles; ++n) {
                size_t row = first + done + n * kTileOutputs;
                rows[n] = matrix.data + row / matrix.width * matrix.unit_bytes +
                          row % matrix.width / kTileOutputs * groups * tile_bytes;
            }
            auto tile = [&](size_t n, size_t group) { return rows[n] + group * tile_bytes; };
            multiply_tiles(*reinterpret_cast<PanelScratch<F>*>(scratch), tile, tiles, groups, x, from, to, out + done,
                           stride);
        }
    });
}

// Column part: out = all units * x for the outputs of one panel and all tokens.
inline void tiled_columns_block(const Matrix& matrix, size_t panel, const Rounded& x, size_t tokens, uint8_t* scratch,
                                float* out, size_t stride) {
    with_tile_format(matrix.format, [&]<Format F>() {
        constexpr size_t tile_bytes = kTileOutputs * group_bytes(F);
        size_t groups = matrix.width / kGroup, all = matrix.hidden / kTileOutputs, first = panel * kPanelTiles;
        auto tile = [&](size_t n, size_t group) {
            return matrix.data + group / groups * matrix.unit_bytes + ((first + n) * groups + group % groups) * tile_bytes;
        };
        size_t tiles = all - first < kPanelTiles ? all - first : kPanelTiles;
        for (size_t from = 0; from < tokens; from += kBlockTokens) {
            size_t to = tokens - from < kBlockTokens ? tokens : from + kBlockTokens;
            multiply_tiles(*reinterpret_cast<PanelScratch<F>*>(scratch), tile, tiles, matrix.units * groups, x, from, to,
                           out + from * stride + first * kTileOutputs, stride);
        }
    });
}

}  // namespace
}  // namespace tpi
