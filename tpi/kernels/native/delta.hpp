// A gated DeltaNet block in one call: products, convolution over time, the states of the value heads, gated norm, o.
// The team syncs between the phases. tpi/kernels/recurrent/delta.py has the formulas.
#pragma once

#include <cmath>

#include "conv.hpp"
#include "delta_state.hpp"

namespace tpi {
namespace {

struct DeltaJob {
    const DeltaCall& call;
    Input in;
    float *q, *k, *v, *gate;       // products, [tokens, vectors of the part]
    float *queries, *keys;         // after the convolution, scaled; [tokens, key_heads, key]
    float *values, *read;          // after the convolution, and what the heads read; [tokens, heads, value]
    float *decay, *beta;           // [tokens, heads]
    OutputJob output;
    Scratch scratch;
};

inline AttentionCall output_of(const DeltaCall& call) {
    AttentionCall out{};
    out.o = call.o;
    out.heads = call.heads;
    out.head_dim = call.value;
    out.tokens = call.tokens;
    out.hidden = call.hidden;
    out.out = call.out;
    return out;
}

// Multiply `to` with SiLU of `gate`.
inline void multiply_silu(const float* gate, float* to, size_t count) {
    for (size_t i = 0; i < count; i += 8) {
        F8 factor = activate(Activation::silu, 0.0f, load_some(gate + i, count - i));
        store_some(to + i, load_some(to + i, count - i) * factor, count - i);
    }
}

inline void apply_silu(float* x, size_t count) {
    for (size_t i = 0; i < count; i += 8)
        store_some(x + i, activate(Activation::silu, 0.0f, load_some(x + i, count - i)), count - i);
}

inline float dot(const float* a, const float* b, size_t count) {
    F8 total = splat(0.0f);
    size_t i = 0;
    for (; i + 8 <= count; i += 8) total = fma(load(a + i), load(b + i), total);
    float result = sum(total);
    for (; i < count; ++i) result += a[i] * b[i];
    return result;
}

// The factor of a head's state, and the strength of its change.
inline void set_gates(const DeltaJob& job, const Prepared& in, size_t token, size_t head) {
    const DeltaCall& call = job.call;
    const float* x = in.x + token * in.stride;
    float a = dot(call.a + head * call.hidden, x, call.hidden) + call.decay_bias[head];
    float b = dot(call.b + head * call.hidden, x, call.hidden);
    float softplus = a > 20.0f ? a : std::log1p(std::exp(a));
    job.decay[token * call.heads + head] = std::exp(call.decay[head] * softplus);
    job.beta[token * call.heads + head] = 1.0f / (1.0f + std::exp(-b));
}

// ---- the convolution over time ----

inline void scale_to(float* x, size_t count, float length) {
    float factor = length / std::sqrt(dot(x, x, count) + 1e-6f);
    for (size_t i = 0; i < count; ++i) x[i] *= factor;
}

// Convolve all channels of one token; `bias` is [channels] or null.
inline void convolve_token(const DeltaJob& job, const SequenceStates& sequence, size_t token, const float* bias) {
    const DeltaCall& call = job.call;
    size_t keys = call.key_heads * call.key, values = call.heads * call.value;
    const float* before = sequence.read ? sequence.read + call.state_size() + sequence.taken * call.channels() : nullptr;
    auto part = [&](const float* from, const Matrix& matrix, const float* weights, size_t first, size_t count, float* to) {
        Channels channels{from, matrix.vectors(), before ? before + first : nullptr, call.channels(), weights, count,
                          call.taps, bias ? bias + first : nullptr};
        convolve(channels, sequence.first, token, count, to);
        apply_silu(to, count);
    };
    part(job.q, call.q, call.conv_q, 0, keys, job.queries + token * keys);
    part(job.k, call.k, call.conv_k, keys, keys, job.keys + token * keys);
    part(job.v, call.v, call.conv_v, 2 * keys, values, job.values + token * values);
}

// Scale the queries and keys of one token.
inline void scale_token(const DeltaJob& job, size_t token) {
    const DeltaCall& call = job.call;
    size_t keys = call.key_heads * call.key;
    float *q = job.queries + token * keys, *k = job.keys + token * keys;
    float length = 1.0f / std::sqrt(static_cast<float>(call.key));
    for (size_t head = 0; head < call.key_heads; ++head) {
        scale_to(q + head * call.key, call.key, length);
        scale_to(k + head * call.key, call.key, 1.0f);
    }
}

// Copy the inputs of the convolution of one token.
inline void copy_inputs(const DeltaJob& job, size_t token, float* to) {
    const DeltaCall& call = job.call;
    size_t keys = call.key_heads * call.key;
    std::memcpy(to, job.q + token * call.q.vectors(), keys * sizeof(float));
    std::memcpy(to + keys, job.k + token * call.k.vectors(), keys * sizeof(float));
    std::memcpy(to + 2 * keys, job.v + token * call.v.vectors(), call.heads * call.value * sizeof(float));
}

// Copy the decays and strengths of the later tokens of a sequence.
inline void keep_gates(const DeltaJob& job, const SequenceStates& sequence) {
    const DeltaCall& call = job.call;
    float* to = sequence.write + call.gates_at();
    for (size_t i = 0; i < sequence.later; ++i, to += 2 * call.heads) {
        size_t at = (sequence.first + sequence.applied() + i) * call.heads;
        std::memcpy(to, job.decay + at, call.heads * sizeof(float));
        std::memcpy(to + call.heads, job.beta + at, call.heads * sizeof(float));
    }
}

// ---- the states ----

// What the states of a block do with a token.
struct Rule {
    bool erases;              // the delta rule: a change depends on what the key reads; keys have length 1
    const float* conv_bias;   // [channels], or null
};

// Some columns of the state of one head of a sequence.
struct Columns {
    const SequenceStates& sequence;
    size_t head, first, count;
};

// Copy columns of a head's state, [key, value]; from null: zeros.
inline void copy_columns(const DeltaCall& call, const Columns& columns, const float* from, float* to) {
    for (size_t i = 0; i < call.key; ++i) {
        size_t at = i * call.value + columns.first;
        if (from) std::memcpy(to + at, from + at, columns.count * sizeof(float));
        else std::memset(to + at, 0, columns.count * sizeof(float));
    }
}

// Values of scratch for `take_later`, and for a copy of a state.
constexpr size_t later_values(size_t key, size_t value) { return kLater * (key + 2 * value) + key * value; }

// Change the state by the later tokens of the sequence that are `taken`: their keys and values are convolved again, so
// the state gets the bits that it had in the step of these tokens.
inline void take_later(const DeltaCall& call, const Columns& columns, const Rule& rule, float* state, float* scratch) {
    const SequenceStates& sequence = columns.sequence;
    size_t taken = sequence.taken, key = call.key, keys = call.key_heads * key, channels = call.channels();
    size_t key_at = static_cast<size_t>(call.key_index[columns.head]) * key;
    size_t value_at = columns.head * call.value + columns.first;
    float *k = scratch, *v = k + kLater * key, *out = v + kLater * call.value;
    const float *inputs = sequence.read + call.state_size(), *gates = sequence.read + call.gates_at();
    auto convolved = [&](size_t token, size_t channel, const float* weights, size_t stride, size_t count, float* to) {
        const float* before = inputs + channel;
        Channels from{before + (call.taps - 1) * channels, channels, before, channels, weights, stride, call.taps,
                      rule.conv_bias ? rule.conv_bias + channel : nullptr};
        convolve(from, 0, token, count, to);
        apply_silu(to, count);
    };
    for (size_t t = 0; t < taken; ++t) {
        convolved(t, keys + key_at, call.conv_k + key_at, keys, key, k + t * key);
        if (rule.erases) scale_to(k + t * key, key, 1.0f);
        convolved(t, 2 * keys + value_at, call.conv_v + value_at, call.heads * call.value, columns.count,
                  v + t * call.value + columns.first);
    }
    HeadTokens tokens{taken, key, call.value, k, k, v, out, gates + columns.head, gates + call.heads + columns.head,
                      key, call.value, 2 * call.heads, rule.erases};
    update_head(tokens, state, columns.first, columns.count, nullptr);
}

// The tokens of a sequence in this step from number `from` on, for one head.
inline HeadTokens tokens_of(const DeltaJob& job, const Columns& columns, const Rule& rule, size_t from, size_t count) {
    const DeltaCall& call = job.call;
    size_t token = columns.sequence.first + from, keys = call.key_heads * call.key, values = call.heads * call.value;
    size_t key_at = token * keys + static_cast<size_t>(call.key_index[columns.head]) * call.key;
    size_t value_at = token * values + columns.head * call.value, gate_at = token * call.heads + columns.head;
    return {count, call.key, call.value, job.queries + key_at, job.keys + key_at, job.values + value_at,
            job.read + value_at, job.decay + gate_at, job.beta + gate_at, keys, values, call.heads, rule.erases};
}

// All tokens of a sequence, for some columns of one head's state. Later tokens change a copy of it in `scratch`.
inline void update_state(const DeltaJob& job, const Columns& columns, const Rule& rule, float* scratch) {
    const DeltaCall& call = job.call;
    const SequenceStates& sequence = columns.sequence;
    size_t size = call.key * call.value, applied = sequence.applied();
    float* state = sequence.write + columns.head * size;
    if (sequence.read != sequence.write)
        copy_columns(call, columns, sequence.read ? sequence.read + columns.head * size : nullptr, state);
    if (sequence.taken) take_later(call, columns, rule, state, scratch);
    update_head(tokens_of(job, columns, rule, 0, applied), state, columns.first, columns.count, scratch);
    if (!sequence.later) return;
    copy_columns(call, columns, state, scratch);
    update_head(tokens_of(job, columns, rule, applied, sequence.later), scratch, columns.first, columns.count, nullptr);
}

// ---- the block ----

// Write what the heads read, normed and gated: [heads * value].
inline void finish_token(const DeltaJob& job, size_t token, float* to) {
    const DeltaCall& call = job.call;
    size_t width = call.heads * call.value;
    const float* gate = job.gate + token * call.gate.vectors();
    for (size_t head = 0; head < call.heads; ++head) {
        size_t at = head * call.value;
        normalise(Norm{true, call.norm.eps, call.out_norm, nullptr}, job.read + token * width + at, call.value, to + at);
        multiply_silu(gate + at, to + at, call.value);
    }
}

// Columns of a state that one task updates. A chunk's products of keys are shared by all columns of a task, so tasks are
// whole heads if these are enough for all threads, or if tokens come one by one.
inline size_t columns_per_task(const DeltaCall& call, const Team& team) {
    bool many = call.states.count * call.heads >= 4 * team.size();
    return many && call.tokens >= kLeastChunked ? call.value : kStateColumns;
}

// Compute what the heads read, `job.read`, and the new states. `gates(in, token, head)` sets the gates of a head,
// `convolved(token)` computes the convolution of a token.
template <class Gates, class Convolved>
inline void read_states(const DeltaJob& job, Team& team, const Rule& rule, const Gates& gates,
                        const Convolved& convolved) {
    const DeltaCall& call = job.call;
    uint8_t* scratch = job.scratch.of(team);
    const Prepared& in = prepare(job.in, call.norm, call.x, call.hidden, team);
    team.each(call.tokens, [&](size_t token) {
        for (size_t head = 0; head < call.heads; ++head) gates(in, token, head);
    });
    multiply_rows<4>({&call.q, &call.k, &call.v, &call.gate}, {job.q, job.k, job.v, job.gate}, in, scratch, team);
    team.sync();
    team.each(call.tokens, convolved);
    team.sync();
    size_t columns = columns_per_task(call, team), pieces = (call.value + columns - 1) / columns;
    team.each(call.states.count * call.heads * pieces, [&](size_t task) {
        const SequenceStates& sequence = call.states.sequences[task / (call.heads * pieces)];
        size_t first = task % pieces * columns, count = call.value - first < columns ? call.value - first : columns;
        update_state(job, {sequence, task / pieces % call.heads, first, count}, rule,
                     reinterpret_cast<float*>(scratch));
    });
    team.sync();
    team.each(call.states.count, [&](size_t s) {  // after all tasks have read the later inputs that this overwrites
        keep_inputs(call.states.sequences[s], call.state_size(), call.taps, call.channels(),
                    [&](size_t token, float* to) { copy_inputs(job, token, to); });
        keep_gates(job, call.states.sequences[s]);
    });
}

inline void delta_job(const DeltaJob& job, Team& team) {
    read_states(
        job, team, {true, nullptr},
        [&](const Prepared& in, size_t token, size_t head) { set_gates(job, in, token, head); },
        [&](size_t token) {
            convolve_token(job, job.call.states.of(token), token, nullptr);
            scale_token(job, token);
        });
    multiply_output(job.output, job.scratch.of(team), team,
                    [&](size_t token, float* to) { finish_token(job, token, to); });
}

// `out` is `output_of(call)`; the job refers to both.
inline DeltaJob take_job(const DeltaCall& call, const AttentionCall& out, Pool& pool) {
    Arena& arena = pool.arena();
    const Matrix* rows[] = {&call.q, &call.k, &call.v, &call.gate};
    size_t tokens = call.tokens, keys = tokens * call.key_heads * call.key, values = tokens * call.heads * call.value;
    size_t later = later_values(call.key, call.value), chunked = chunked_values(call.key, call.value);
    size_t state = sizeof(float) * (tokens < kLeastChunked || chunked < later ? later : chunked);
    return {call,
            take_input(pool, tokens, call.hidden, rows, 4, call.prepared),
            arena.take<float>(tokens * call.q.vectors()),
            arena.take<float>(tokens * call.k.vectors()),
            arena.take<float>(tokens * call.v.vectors()),
            arena.take<float>(tokens * call.gate.vectors()),
            arena.take<float>(keys),
            arena.take<float>(keys),
            arena.take<float>(values),
            arena.take<float>(values),
            arena.take<float>(tokens * call.heads),
            arena.take<float>(tokens * call.heads),
            take_output(out, pool),
            take_scratch(pool, state > kThreadBytes ? state : kThreadBytes)};
}

inline void delta(const DeltaCall& call, Pool& pool) {
    AttentionCall out = output_of(call);
    run_on(pool, delta_job, take_job(call, out, pool));
}

}  // namespace
}  // namespace tpi
