// The feed-forward block: norm, gate and up, activation, down.
// A few tokens stream each unit once, from gate to down, into per-slice sums; many tokens finish gate and up first.
#pragma once

#include "products.hpp"

namespace tpi {
namespace {

constexpr size_t kNeurons = 8;  // neurons of a record pack that are processed together

struct FfnJob {
    const FfnCall& call;
    Input in;
    Slices slices;
    Inner inner;      // many tokens only
    float* gate;      // many tokens, records: [tokens, neurons]
    uint8_t* scratch;
    size_t scratch_bytes;
};

// gate * sigmoid(slope * gate) * (up + 1), with gate and the magnitude of up at most the limit (gpt-oss)
inline F8 swiglu_clamped(const FfnCall& call, F8 gate, F8 up) {
    const F8 limit = splat(call.threshold), one = splat(1.0f);
    gate = min(gate, limit);
    up = min(max(up, splat(-call.threshold)), limit);
    return gate / (one + exp(gate * splat(-call.slope))) * (up + one);
}

// inner = act(gate) * up, or act(up) if gate is null; drelu and swiglu_clamped combine both. inner may be up.
inline void activate_values(const FfnCall& call, const float* gate, const float* up, size_t count, float* inner) {
    Activation kind = call.activation;
    for (size_t i = 0; i < count; i += 8) {
        F8 value = load_some(up + i, count - i);
        if (kind == Activation::swiglu_clamped) {
            store_some(inner + i, swiglu_clamped(call, load_some(gate + i, count - i), value), count - i);
            continue;
        }
        if (!gate || kind == Activation::drelu) value = activate(kind, call.threshold, value);
        if (gate) value = activate(kind, call.threshold, load_some(gate + i, count - i)) * value;
        store_some(inner + i, value, count - i);
    }
}

inline void add_bias(const float* bias, size_t count, float* values) {
    for (size_t i = 0; bias && i < count; i += 8)
        store_some(values + i, load_some(values + i, count - i) + load_some(bias + i, count - i), count - i);
}

// The same for neurons [neuron, neuron + count), with their biases.
inline void activate_neurons(const FfnCall& call, float* gate, float* up, size_t neuron, size_t count) {
    add_bias(call.up_bias ? call.up_bias + neuron : nullptr, count, up);
    if (gate) add_bias(call.gate_bias ? call.gate_bias + neuron : nullptr, count, gate);
    activate_values(call, gate, up, count, up);
}

// Multiply a token's result by its weight.
inline void weigh(const FfnCall& call, size_t token, size_t count, float* values) {
    for (size_t i = 0; call.weights && i < count; i += 8)
        store_some(values + i, load_some(values + i, count - i) * splat(call.weights[token]), count - i);
}

// ---- a few tokens ----

// Scratch of one thread that streams a unit: gate and up values and their product, rounded.
struct UnitScratch {
    float *gate, *up;
    Rounded rounded;

    UnitScratch(uint8_t* bytes, size_t width, size_t tokens, bool fine) {
        gate = reinterpret_cast<float*>(bytes);
        up = gate + tokens * width;
        rounded.scale = up + tokens * width;
        rounded.sum = rounded.scale + tokens * width / kGroup;
        rounded.half = rounded.sum + tokens * width / kGroup;
        rounded.codes = reinterpret_cast<int8_t*>(rounded.half + tokens * width / kGroup);
        rounded.fine = fine ? rounded.codes + tokens * width : nullptr;
        rounded.whole = nullptr;
        rounded.width = width;
    }
    static size_t bytes(size_t width, size_t tokens) { return tokens * width * 11 + 64; }
};

// out(t) += one unit of token t.
template <class Out>
inline void stream_unit(const FfnCall& call, const Prepared& in, size_t unit, uint8_t* bytes, const Out& out) {
    size_t width = call.up.width, tokens = in.tokens;
    UnitScratch scratch(bytes, width, tokens, call.down.format == Format::q8);
    bool gated = call.gate.data != nullptr;
    if (gated) tiled_rows(call.gate, unit * width, width, in.rounded, 0, tokens, scratch.gate, width);
    tiled_rows(call.up, unit * width, width, in.rounded, 0, tokens, scratch.up, width);
    for (size_t t = 0; t < tokens; ++t) {
        float* up = scratch.up + t * width;
        activate_neurons(call, gated ? scratch.gate + t * width : nullptr, up, unit * width, width);
        weigh(call, t, width, up);
        round_vector(up, scratch.rounded, t);
    }
    with_tile_format(call.down.format, [&]<Format F>() {
        add_unit_tokens<F>(call.down.data + unit * call.down.unit_bytes, width / kGroup, 0, 0,
                           call.hidden / kTileOutputs, scratch.rounded, tokens, out);
    });
}

inline size_t neuron_at(const FfnCall& call, size_t i) { return call.active ? static_cast<size_t>(call.active[i]) : i; }

// Set out[t * kNeurons + i] for neurons [first, first + count) of the list and one row part; `all` is the number from
// `first` on.
inline void neuron_rows(const FfnCall& call, const Prepared& in, const Matrix& matrix, const float* bias, size_t first,
                        size_t count, size_t all, float* out) {
    auto at = [&](size_t i) { return neuron_at(call, first + (i < all ? i : all - 1)); };
    if (count == kNeurons && is_four_bit(matrix.format)) {
        if (matrix.format == Format::q4) eight_rows<Format::q4>(matrix, at, in.rounded, in.tokens, out, kNeurons);
        else eight_rows<Format::q4s>(matrix, at, in.rounded, in.tokens, out, kNeurons);
    } else {
        RecordInputs inputs{in.x, in.stride, in.rounded};
        for (size_t i = 0; i < count; ++i)
            record_row(matrix, at(i), inputs, in.tokens, matrix.vector(at(i + 1)), out + i, kNeurons);
    }
    for (size_t i = 0; bias && i < count; ++i)
        for (size_t t = 0; t < in.tokens; ++t) out[t * kNeurons + i] += bias[at(i)];
}

// Add neurons [first, first + count) of the list, count at most kNeurons; `all` is the number from `first` on in this
// slice.
template <class Out>
inline void stream_neurons(const FfnCall& call, const Prepared& in, size_t first, size_t count, size_t all,
                           const Out& out) {
    float gate[kStreamTokens * kNeurons], up[kStreamTokens * kNeurons];
    bool gated = call.gate.data != nullptr;
    if (gated) neuron_rows(call, in, call.gate, call.gate_bias, first, count, all, gate);
    neuron_rows(call, in, call.up, call.up_bias, first, count, all, up);
    for (size_t t = 0; t < in.tokens; ++t) {
        float* value = up + t * kNeurons;
        activate_values(call, gated ? gate + t * kNeurons : nullptr, value, count, value);
        weigh(call, t, count, value);
    }
    record_columns(call.down, count, [&](size_t i) { return neuron_at(call, first + i); }, up, kNeurons, in.tokens, out);
}

inline void stream_slice(const FfnCall& call, const Slices& slices, const Prepared& in, size_t slice,
                         uint8_t* scratch) {
    Rows out{slices.of(slice), slices.stride};
    std::memset(out.sums, 0, slices.tokens * slices.stride * sizeof(float));
    if (call.up.tiled) {
        size_t first = call.up.units * slice / slices.count, last = call.up.units * (slice + 1) / slices.count;
        for (size_t unit = first; unit < last; ++unit) stream_unit(call, in, unit, scratch, out);
        return;
    }
    size_t all = call.active ? call.active_count : call.up.vectors();
    size_t first = all * slice / slices.count, last = all * (slice + 1) / slices.count;
    for (size_t i = first; i < last; i += kNeurons)
        stream_neurons(call, in, i, last - i < kNeurons ? last - i : kNeurons, last - i, out);
}

inline void ffn_stream_job(const FfnJob& job, Team& team) {
    const FfnCall& call = job.call;
    uint8_t* scratch = job.scratch + team.index() * job.scratch_bytes;
    const Prepared& in = prepare(job.in, call.norm, call.x, call.hidden, team);
    team.each(job.slices.count, [&](size_t slice) { stream_slice(call, job.slices, in, slice, scratch); });
    team.sync();
    team.each(reduce_tasks(job.slices), [&](size_t task) { reduce_task(job.slices, task, call.hidden, call.out); });
}

// ---- many tokens ----

// gate, up and activation of one tiled unit for all tokens, rounded into job.inner.
inline void tiled_unit_block(const FfnJob& job, const Prepared& in, size_t unit, uint8_t* bytes) {
    const FfnCall& call = job.call;
    size_t width = call.up.width;
    auto* gate = reinterpret_cast<float*>(bytes);
    float* up = gate + kBlockTokens * width;
    auto* panels = reinterpret_cast<uint8_t*>(up + kBlockTokens * width);
    for (size_t from = 0; from < call.tokens; from += kBlockTokens) {
        size_t to = call.tokens - from < kBlockTokens ? call.tokens : from + kBlockTokens;
        if (call.gate.data) tiled_rows_block(call.gate, unit * width, width, in.rounded, from, to, panels, gate, width);
        tiled_rows_block(call.up, unit * width, width, in.rounded, from, to, panels, up, width);
        for (size_t t = from; t < to; ++t) {
            float* value = up + (t - from) * width;
            activate_neurons(call, call.gate.data ? gate + (t - from) * width : nullptr, value, unit * width, width);
            weigh(call, t, width, value);
            for (size_t g = 0; g < width / kGroup; ++g)
                round_group(value + g * kGroup, job.inner.rounded, t, unit * width / kGroup + g);
        }
    }
}

inline void record_gate_up(const FfnJob& job, const Prepared& in, uint8_t* scratch, Team& team) {
    const FfnCall& call = job.call;
    size_t tasks = row_tasks(call.up, in), neurons = job.inner.width;
    team.each(call.gate.data ? 2 * tasks : tasks, [&](size_t task) {
        if (task < tasks) row_task(call.up, in, task, scratch, job.inner.values, neurons);
        else row_task(call.gate, in, task - tasks, scratch, job.gate, neurons);
    });
    team.sync();
    team.each(call.tokens, [&](size_t t) {
        float* up = job.inner.values + t * neurons;
        activate_neurons(call, call.gate.data ? job.gate + t * neurons : nullptr, up, 0, neurons);
        weigh(call, t, neurons, up);
    });
}

inline void ffn_block_job(const FfnJob& job, Team& team) {
    const FfnCall& call = job.call;
    uint8_t* scratch = job.scratch + team.index() * job.scratch_bytes;
    const Prepared& in = prepare(job.in, call.norm, call.x, call.hidden, team);
    if (call.up.tiled) team.each(call.up.units, [&](size_t unit) { tiled_unit_block(job, in, unit, scratch); });
    else record_gate_up(job, in, scratch, team);
    team.sync();
    multiply_columns(call.down, job.inner, call.tokens, job.slices, scratch, team, call.out);
}

// ---- set-up ----

inline void ffn_stream(const FfnCall& call, Pool& pool) {
    Arena& arena = pool.arena();
    const Matrix* rows[] = {&call.up, &call.gate};
    size_t items = call.up.tiled ? call.up.units : call.active ? call.active_count : call.up.vectors();
    size_t scratch = round_up(UnitScratch::bytes(call.up.width, call.tokens), 64);
    FfnJob job{call,
               take_input(pool, call.tokens, call.hidden, rows, call.gate.data ? 2 : 1, call.prepared),
               take_slices(arena, pool.size(), items, call.tokens, call.hidden),
               {},
               nullptr,
               arena.take<uint8_t>(scratch * pool.size()),
               scratch};
    run_on(pool, ffn_stream_job, job);
}

inline void ffn_block(const FfnCall& call, Pool& pool) {
    Arena& arena = pool.arena();
    const Matrix* rows[] = {&call.up, &call.gate};
    size_t unit = call.up.tiled ? round_up(2 * kBlockTokens * call.up.width * sizeof(float), 64) : 0;
    size_t scratch = unit + kThreadBytes;
    bool gate = call.gate.data && !call.up.tiled;
    FfnJob job{call,
               take_input(pool, call.tokens, call.hidden, rows, call.gate.data ? 2 : 1, call.prepared),
               {},
               take_inner(arena, call.down, call.tokens),
               gate ? arena.take<float>(call.tokens * call.gate.vectors()) : nullptr,
               arena.take<uint8_t>(scratch * pool.size()),
               scratch};
    run_on(pool, ffn_block_job, job);
}

inline void ffn(const FfnCall& call, Pool& pool) {
    if (streams(call.tokens)) return ffn_stream(call, pool);
    if (!call.active) return ffn_block(call, pool);
    for (size_t first = 0; first < call.tokens; first += kStreamTokens) {
        FfnCall some = call;
        some.tokens = call.tokens - first < kStreamTokens ? call.tokens - first : kStreamTokens;
        Prepared part;
        if (call.prepared) {
            part = some_of(*call.prepared, first, some.tokens);
            some.prepared = &part;
        } else {
            some.x = call.x + first * call.hidden;
        }
        some.out = call.out + first * call.hidden;
        if (call.weights) some.weights = call.weights + first;
        pool.arena().begin();
        ffn_stream(some, pool);
    }
}

}  // namespace
}  // namespace tpi
