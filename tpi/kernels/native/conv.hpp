// A gated short convolution in one call: products, convolution over time in each channel, gate, o. Also the convolution
// itself, for other blocks. The team syncs between the phases. tpi/kernels/recurrent/conv.py has the formula.
#pragma once

#include "attention.hpp"

namespace tpi {
namespace {

// ---- the convolution over time ----

// The inputs of some channels: those of this step, and the last ones of the sequence before it.
struct Channels {
    const float* values;  // [tokens, stride]
    size_t stride;
    const float* before;   // [taps - 1, before_stride], or null: zeros
    size_t before_stride;
    const float* weights;  // [taps, weight_stride]
    size_t weight_stride, taps;
    const float* bias = nullptr;  // [count], or null
};

// Set to[c] to the sum over the taps, for `count` channels of one token of a sequence that begins at token `first`.
inline void convolve(const Channels& from, size_t first, size_t token, size_t count, float* to) {
    for (size_t c = 0; c < count; ++c) to[c] = from.bias ? from.bias[c] : 0.0f;
    for (size_t tap = 0; tap < from.taps; ++tap) {
        size_t back = from.taps - 1 - tap;  // tokens before this one
        const float* inputs;
        if (token - first >= back) inputs = from.values + (token - back) * from.stride;
        else if (from.before) inputs = from.before + (token - first + tap) * from.before_stride;
        else continue;
        const float* weights = from.weights + tap * from.weight_stride;
        for (size_t c = 0; c < count; ++c) to[c] += inputs[c] * weights[c];
    }
}

// Keep the last inputs of a sequence and those of its later tokens, [taps - 1 + later, channels], `offset` values after
// the beginning of its state. `copy(token, to)` writes the inputs of a token of this step. The new state may be the old
// one: a row is read before it is written.
template <class Copy>
inline void keep_inputs(const SequenceStates& sequence, size_t offset, size_t taps, size_t channels, const Copy& copy) {
    size_t held = taps - 1 + sequence.taken;  // rows before the first token of the step
    for (size_t row = 0; row < taps - 1 + sequence.later; ++row) {
        float* to = sequence.write + offset + row * channels;
        size_t from = sequence.taken + sequence.applied() + row;
        if (from >= held) copy(sequence.first + from - held, to);
        else if (sequence.read) std::memmove(to, sequence.read + offset + from * channels, channels * sizeof(float));
        else std::memset(to, 0, channels * sizeof(float));
    }
}

// ---- the block ----

struct ConvJob {
    const ConvCall& call;
    Input in;
    float *v, *input, *gate;  // products, [tokens, vectors of the part]; input * v takes the place of v
    float* mixed;             // after the convolution and the gate, [tokens, channels]
    OutputJob output;
    Scratch scratch;
};

inline AttentionCall output_of(const ConvCall& call) {
    AttentionCall out{};
    out.o = call.o;
    out.heads = call.channels;
    out.head_dim = 1;
    out.tokens = call.tokens;
    out.hidden = call.hidden;
    out.out = call.out;
    return out;
}

inline void mix_token(const ConvJob& job, size_t token) {
    const ConvCall& call = job.call;
    const SequenceStates& sequence = call.states.of(token);
    float* to = job.mixed + token * call.channels;
    const float* gate = job.gate + token * call.gate.vectors();
    const float* before = sequence.read ? sequence.read + sequence.taken * call.channels : nullptr;
    convolve({job.v, call.v.vectors(), before, call.channels, call.weights, call.channels, call.taps}, sequence.first,
             token, call.channels, to);
    for (size_t c = 0; c < call.channels; ++c) to[c] *= gate[c];
}

inline void conv_job(const ConvJob& job, Team& team) {
    const ConvCall& call = job.call;
    size_t stride = call.v.vectors(), bytes = call.channels * sizeof(float);
    uint8_t* scratch = job.scratch.of(team);
    const Prepared& in = prepare(job.in, call.norm, call.x, call.hidden, team);
    multiply_rows<3>({&call.v, &call.input, &call.gate}, {job.v, job.input, job.gate}, in, scratch, team);
    team.sync();
    team.each(call.tokens, [&](size_t token) {
        float* v = job.v + token * stride;
        const float* input = job.input + token * stride;
        for (size_t c = 0; c < call.channels; ++c) v[c] *= input[c];
    });
    team.sync();
    team.each(call.tokens, [&](size_t token) { mix_token(job, token); });
    team.sync();
    team.each(call.states.count, [&](size_t s) {
        keep_inputs(call.states.sequences[s], 0, call.taps, call.channels,
                    [&](size_t token, float* to) { std::memcpy(to, job.v + token * stride, bytes); });
    });
    multiply_output(job.output, scratch, team, [&](size_t token, float* to) {
        std::memcpy(to, job.mixed + token * call.channels, bytes);
    });
}

inline void conv(const ConvCall& call, Pool& pool) {
    Arena& arena = pool.arena();
    const Matrix* rows[] = {&call.v, &call.input, &call.gate};
    AttentionCall out = output_of(call);
    ConvJob job{call,
                take_input(pool, call.tokens, call.hidden, rows, 3, call.prepared),
                arena.take<float>(call.tokens * call.v.vectors()),
                arena.take<float>(call.tokens * call.input.vectors()),
                arena.take<float>(call.tokens * call.gate.vectors()),
                arena.take<float>(call.tokens * call.channels),
                take_output(out, pool),
                take_scratch(pool, kThreadBytes)};
    run_on(pool, conv_job, job);
}

}  // namespace
}  // namespace tpi
