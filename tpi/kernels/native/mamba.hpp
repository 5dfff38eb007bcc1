// A Mamba2 block in one call: products, convolution over time, the states of the heads, gate, norm, o.
// All but the ends is as in DeltaNet blocks. tpi/kernels/recurrent/mamba.py has the formulas.
#pragma once

#include "delta.hpp"

namespace tpi {
namespace {

struct MambaJob {
    const MambaCall& call;
    DeltaJob inner;
};

// The factor of a head's state, and its step size.
inline void set_step(const MambaJob& job, const Prepared& in, size_t token, size_t head) {
    const MambaCall& call = job.call;
    float a = dot(call.a + head * call.hidden, in.x + token * in.stride, call.hidden) + call.decay_bias[head];
    float step = a > 20.0f ? a : std::log1p(std::exp(a));
    step = step < call.least_step ? call.least_step : step > call.most_step ? call.most_step : step;
    job.inner.decay[token * call.heads + head] = std::exp(call.decay[head] * step);
    job.inner.beta[token * call.heads + head] = step;
}

// Write the results of the heads of one token, [heads * value], gated and times the weights of their norm.
// Return the sum of their squares if they are normed later.
inline float finish_results(const MambaJob& job, size_t token, float* to) {
    const MambaCall& call = job.call;
    size_t width = call.heads * call.value, first = token * width;
    for (size_t head = 0, i = 0; head < call.heads; ++head)
        for (size_t end = i + call.value; i < end; ++i)
            to[i] = job.inner.read[first + i] + call.skip[head] * job.inner.values[first + i];
    multiply_silu(job.inner.gate + token * call.gate.vectors(), to, width);
    if (call.squares) {
        float squares = dot(to, to, width);
        for (size_t i = 0; i < width; ++i) to[i] *= call.out_norm[i];
        return squares;
    }
    size_t group = width / call.key_heads;
    for (size_t i = 0; i < width; i += group)
        normalise(Norm{true, call.eps, call.out_norm + i, nullptr}, to + i, group, to + i);
    return 0.0f;
}

inline void mamba_job(const MambaJob& job, Team& team) {
    const MambaCall& call = job.call;
    read_states(
        job.inner, team, {false, call.conv_bias},
        [&](const Prepared& in, size_t token, size_t head) { set_step(job, in, token, head); },
        [&](size_t token) { convolve_token(job.inner, call.states.of(token), token, call.conv_bias); });
    const OutputJob& output = job.inner.output;
    bool counts = call.squares && (!output.inner.own || !team.index());  // else all threads finish all tokens
    multiply_output(output, job.inner.scratch.of(team), team, [&](size_t token, float* to) {
        float squares = finish_results(job, token, to);
        if (counts) call.squares[token] = squares;
    });
}

inline void mamba(const MambaCall& call, Pool& pool) {
    AttentionCall out = output_of(call);
    run_on(pool, mamba_job, MambaJob{call, take_job(call, out, pool)});
}

}  // namespace
}  // namespace tpi
