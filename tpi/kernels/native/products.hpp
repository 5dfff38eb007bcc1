// Row and column products of a whole matrix, cut into tasks for the team, for any layout and number of tokens.
#pragma once

#include "blocks.hpp"
#include "panels.hpp"
#include "pool.hpp"
#include "records.hpp"

namespace tpi {
namespace {

// Bytes of scratch that each thread needs for products.
constexpr size_t kThreadBytes = kPanelBytes > kBlockBytes ? kPanelBytes : kBlockBytes;

inline bool streams(size_t tokens) { return tokens <= kStreamTokens; }

inline Rounded take_rounded(Arena& arena, size_t tokens, size_t width, bool fine) {
    size_t values = tokens * width, groups = values / kGroup;
    return {arena.take<int8_t>(values),
            fine ? arena.take<int8_t>(values) : nullptr,
            streams(tokens) ? nullptr : arena.take<CodeSums>(groups),
            arena.take<float>(groups),
            arena.take<float>(groups),
            arena.take<float>(groups),
            width};
}

// Up to so many values, a thread computes them for itself rather than wait for another thread.
constexpr size_t kOwnValues = 8192;

// Data that every thread of a team needs: one shared copy, or a copy for each.
template <class T> struct Copies {
    T* items;
    bool own;

    const T& of(const Team& team) const { return items[own ? team.index() : 0]; }
};

// Calls `make()` once per copy.
template <class T, class Make> inline Copies<T> take_copies(Pool& pool, bool own, const Make& make) {
    Copies<T> copies{pool.arena().take<T>(pool.size()), own};
    for (size_t i = 0; i < (own ? pool.size() : 1); ++i) copies.items[i] = make();
    return copies;
}

inline Prepared take_prepared(Arena& arena, size_t tokens, size_t hidden, const Forms& forms) {
    Prepared in{};
    in.tokens = tokens;
    in.stride = round_up(hidden, kGroup);
    in.x = arena.take<float>(tokens * in.stride);
    if (forms.kept) in.kept = arena.take<float>(tokens * in.stride);
    if (forms.rounded) in.rounded = take_rounded(arena, tokens, in.stride, forms.fine);
    return in;
}

// A block's input: prepared by an earlier call, or by the team in its own buffers.
struct Input {
    Copies<Prepared> copies;
    bool ready;
};

inline Input take_input(Pool& pool, size_t tokens, size_t hidden, const Forms& forms, const Prepared* ready = nullptr) {
    bool own = !ready && tokens * hidden <= kOwnValues;
    auto make = [&] {
        Prepared in = ready ? *ready : take_prepared(pool.arena(), tokens, hidden, forms);
        in.threads = pool.size();
        return in;
    };
    return {take_copies<Prepared>(pool, own, make), ready != nullptr};
}

inline Input take_input(Pool& pool, size_t tokens, size_t hidden, const Matrix* const* matrices, size_t count,
                        const Prepared* ready = nullptr) {
    return take_input(pool, tokens, hidden, forms_of(matrices, count, tokens), ready);
}

// Return `count` tokens of `all`, from `first` on.
inline Prepared some_of(const Prepared& all, size_t first, size_t count) {
    Prepared part = all;
    part.tokens = count;
    part.x += first * all.stride;
    part.kept = nullptr;  // not needed for few tokens
    if (!all.rounded.codes) return part;
    part.rounded.codes += first * all.stride;
    if (all.rounded.fine) part.rounded.fine += first * all.stride;
    part.rounded.whole = nullptr;
    part.rounded.scale += first * all.rounded.groups();
    part.rounded.sum += first * all.rounded.groups();
    part.rounded.half += first * all.rounded.groups();
    return part;
}

// Norm (or copy, if there is no weight), pad and round one token, whose values are at `x`.
inline void prepare_token(const Prepared& in, const Norm& norm, const float* x, size_t hidden, size_t token) {
    float* to = in.x + token * in.stride;
    if (norm.weight) normalise(norm, x, hidden, to);
    else std::memcpy(to, x, hidden * sizeof(float));
    for (size_t i = hidden; i < in.stride; ++i) to[i] = 0.0f;
    if (in.rounded.codes) round_vector(to, in.rounded, token);
    if (in.kept) {
        std::memcpy(in.kept + token * in.stride, to, in.stride * sizeof(float));
        round_in_place(in.kept + token * in.stride, in.stride);
    }
}

// Prepare all tokens, unless they are prepared; returns the complete input for this thread. The first `hidden` of a
// token's `stride` values (0: `hidden`) are its input.
inline const Prepared& prepare(const Input& input, const Norm& norm, const float* x, size_t hidden, Team& team,
                               size_t stride = 0) {
    const Prepared& in = input.copies.of(team);
    if (input.ready) return in;
    size_t step = stride ? stride : hidden;
    if (input.copies.own) {
        for (size_t token = 0; token < in.tokens; ++token) prepare_token(in, norm, x + token * step, hidden, token);
    } else {
        team.each(in.tokens, [&](size_t token) { prepare_token(in, norm, x + token * step, hidden, token); });
        team.sync();
    }
    return in;
}

// Prepare all tokens, for the calls that follow.
inline void prepare_all(const PrepareCall& call, Pool& pool) {
    run_on<PrepareCall>(pool,
        [](const PrepareCall& c, Team& team) {
            team.each(c.out.tokens, [&](size_t token) {
                prepare_token(c.out, c.norm, c.x + token * c.hidden, c.hidden, token);
            });
        },
        call, call.out.tokens * call.hidden > kOwnValues);
}

// ---- rows ----

// Rows of one task. If streaming: about 64 KiB of weights, in whole tiles, but at least two tasks per thread.
inline size_t rows_per_task(const Matrix& matrix, const Prepared& in) {
    if (!streams(in.tokens)) return matrix.tiled ? 32 : kStrip;
    size_t rows = 65536 / vector_bytes(matrix.format, matrix.hidden), share = matrix.vectors() / (2 * in.threads);
    if (rows > share) rows = share;
    return rows < kTileOutputs ? kTileOutputs : rows / kTileOutputs * kTileOutputs;
}

inline size_t row_tasks(const Matrix& matrix, const Prepared& in) {
    size_t rows = rows_per_task(matrix, in);
    return (matrix.vectors() + rows - 1) / rows;
}

// Set out[t * stride + r] for the rows of one task. `scratch` is this thread's, kThreadBytes.
inline void row_task(const Matrix& matrix, const Prepared& in, size_t task, uint8_t* scratch, float* out, size_t stride) {
    size_t rows = rows_per_task(matrix, in), first = task * rows;
    size_t count = matrix.vectors() - first < rows ? matrix.vectors() - first : rows;
    if (matrix.tiled && streams(in.tokens)) {
        tiled_rows(matrix, first, count, in.rounded, 0, in.tokens, out + first, stride);
    } else if (matrix.tiled) {
        for (size_t from = 0; from < in.tokens; from += kBlockTokens) {
            size_t to = in.tokens - from < kBlockTokens ? in.tokens : from + kBlockTokens;
            tiled_rows_block(matrix, first, count, in.rounded, from, to, scratch, out + from * stride + first, stride);
        }
    } else if (streams(in.tokens)) {
        record_rows(matrix, first, count, {in.x, in.stride, in.rounded}, in.tokens, out + first, stride);
    } else {
        const float* x = is_four_bit(matrix.format) ? in.kept : in.x;
        record_strip(matrix, false, task, x, in.stride, in.tokens, reinterpret_cast<float*>(scratch), out, stride);
    }
}

// ---- columns ----

// Partial sums of the streaming column products: each slice of the vectors adds into its own copy of the output.
struct Slices {
    size_t count, tokens, stride;
    float* sums;  // [count, tokens, stride]

    float* of(size_t slice) const { return sums + slice * tokens * stride; }
};

inline Slices take_slices(Arena& arena, size_t threads, size_t items, size_t tokens, size_t hidden) {
    size_t count = slices_of(threads);
    if (count > items) count = items ? items : 1;
    size_t stride = round_up(hidden, kGroup);
    return {count, tokens, stride, arena.take<float>(count * tokens * stride)};
}

// out[tokens, hidden] = the sum of all slices, for one task of `reduce_tasks`.
constexpr size_t kReduceWidth = 1024;
inline size_t reduce_tasks(const Slices& slices) {
    return slices.tokens * ((slices.stride + kReduceWidth - 1) / kReduceWidth);
}
inline void reduce_task(const Slices& slices, size_t task, size_t hidden, float* out) {
    size_t pieces = (slices.stride + kReduceWidth - 1) / kReduceWidth;
    size_t token = task / pieces, first = task % pieces * kReduceWidth;
    size_t last = hidden < first + kReduceWidth ? hidden : first + kReduceWidth;
    for (size_t i = first; i < last; i += 8) {
        F8 total = load(slices.of(0) + token * slices.stride + i);
        for (size_t s = 1; s < slices.count; ++s)
            total = total + load(slices.of(s) + token * slices.stride + i);
        store_some(out + token * hidden + i, total, last - i);
    }
}

// The input of a column part: floats for records, rounded for tiles.
struct Inner {
    float* values;    // [tokens, width]
    size_t width;     // units * width of the matrix
    Rounded rounded;  // codes null in the record layout
};

inline Inner take_inner(Arena& arena, const Matrix& matrix, size_t tokens) {
    Inner inner{arena.take<float>(tokens * matrix.vectors()), matrix.vectors(), {}};
    if (matrix.tiled) inner.rounded = take_rounded(arena, tokens, inner.width, matrix.format == Format::q8);
    return inner;
}

// out[tokens, hidden] = matrix * inner; inner must be complete. Ends without a sync.
inline void multiply_columns(const Matrix& matrix, const Inner& inner, size_t tokens, const Slices& slices,
                             uint8_t* scratch, Team& team, float* out) {
    size_t hidden = matrix.hidden;
    if (!streams(tokens)) {
        if (matrix.tiled)
            team.each((hidden + kPanelOutputs - 1) / kPanelOutputs, [&](size_t panel) {
                tiled_columns_block(matrix, panel, inner.rounded, tokens, scratch, out, hidden);
            });
        else
            team.each((hidden + kStrip - 1) / kStrip, [&](size_t strip) {
                record_strip(matrix, true, strip, inner.values, inner.width, tokens,
                             reinterpret_cast<float*>(scratch), out, hidden);
            });
    } else if (matrix.tiled) {
        size_t tiles = hidden / kTileOutputs, tasks = team.size();
        team.each(tasks, [&](size_t task) {
            size_t first = tiles * task / tasks, last = tiles * (task + 1) / tasks;
            for (size_t t = 0; t < tokens; ++t)
                std::memset(out + t * hidden + first * kTileOutputs, 0, (last - first) * kTileOutputs * sizeof(float));
            tiled_columns_stream(matrix, first, last, inner.rounded, tokens, out, hidden);
        });
    } else {
        team.each(slices.count, [&](size_t slice) {
            size_t first = matrix.vectors() * slice / slices.count, last = matrix.vectors() * (slice + 1) / slices.count;
            std::memset(slices.of(slice), 0, tokens * slices.stride * sizeof(float));
            record_columns(matrix, last - first, [&](size_t i) { return first + i; }, inner.values + first, inner.width,
                           tokens, Rows{slices.of(slice), slices.stride});
        });
        team.sync();
        team.each(reduce_tasks(slices), [&](size_t task) { reduce_task(slices, task, hidden, out); });
    }
}

}  // namespace
}  // namespace tpi
