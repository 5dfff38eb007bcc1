// The feed-forward block, gate first. If the gate is a run of its own, a few tokens multiply all of it, and of up and
// down only the neurons with a large activation (CATS, TEAL, WINA). Many tokens compute all neurons, as in ffn.hpp.
#pragma once

#include "ffn.hpp"

namespace tpi {
namespace {

struct GatedJob {
    const FfnCall& call;
    Input in;
    Slices slices;
    float* activations;  // [tokens, neurons]
    int32_t* chosen;     // [threads, neurons + 1]: the active ones, in order, if the call chooses neurons
    size_t* count;
    uint8_t* scratch;  // kPanelBytes for each thread
};

// The activations of the gate's rows of one task, for all tokens.
inline void gate_task(const GatedJob& job, const Prepared& in, size_t task, float* panels) {
    const FfnCall& call = job.call;
    size_t neurons = call.gate.vectors(), rows = rows_per_task(call.gate, in), first = task * rows;
    size_t count = neurons - first < rows ? neurons - first : rows;
    row_task(call.gate, in, task, panels, job.activations, neurons);
    for (size_t t = 0; t < in.tokens; ++t) {
        float* values = job.activations + t * neurons + first;
        add_bias(call.gate_bias ? call.gate_bias + first : nullptr, count, values);
        activate_values(call, nullptr, values, count, values);
    }
}

// Find the active neurons of all tokens, and their number. Every thread finds them for itself: that is faster than a
// sync.
inline size_t choose_active(const GatedJob& job, int32_t* chosen) {
    const FfnCall& call = job.call;
    size_t neurons = call.gate.vectors(), found = 0;
    for (size_t n = 0; n < neurons; ++n) {
        bool counts = false;
        for (size_t t = 0; t < call.tokens; ++t)
            counts |= !(std::fabs(job.activations[t * neurons + n]) < call.least[n]);  // a NaN counts as large
        chosen[found] = static_cast<int32_t>(n);
        found += counts;
    }
    return found;
}

inline void gated_job(const GatedJob& job, Team& team) {
    FfnCall call = job.call;
    uint8_t* scratch = job.scratch + team.index() * kPanelBytes;
    const Prepared& in = prepare(job.in, call.norm, call.x, call.hidden, team);
    team.each(row_tasks(call.gate, in),
              [&](size_t task) { gate_task(job, in, task, reinterpret_cast<float*>(scratch)); });
    team.sync();
    if (call.least) {
        int32_t* chosen = job.chosen + team.index() * (call.gate.vectors() + 1);
        call.active = chosen;
        call.active_count = choose_active(job, chosen);
        if (team.index() == 0) *job.count = call.active_count;
    }
    call.activations = job.activations;
    team.each(job.slices.count, [&](size_t slice) { stream_slice(call, job.slices, in, slice, scratch); });
    team.sync();
    team.each(reduce_tasks(job.slices), [&](size_t task) { reduce_task(job.slices, task, call.hidden, call.out); });
}

inline void gated_stream(const FfnCall& call, Pool& pool) {
    Arena& arena = pool.arena();
    const Matrix* rows[] = {&call.up, &call.gate};
    size_t neurons = call.up.vectors(), count = 0;
    GatedJob job{call,
                 take_input(pool, call.tokens, call.hidden, rows, 2, call.prepared),
                 take_slices(arena, pool.size(), neurons, call.tokens, call.hidden),
                 arena.take<float>(call.tokens * neurons),
                 arena.take<int32_t>((neurons + 1) * pool.size()),
                 &count,
                 arena.take<uint8_t>(kPanelBytes * pool.size())};
    run_on(pool, gated_job, job);
    if (call.least) *call.chosen = count;
}

inline void ffn_few(const FfnCall& call, Pool& pool) {
    call.gate_first ? gated_stream(call, pool) : ffn_stream(call, pool);
}

inline void ffn(const FfnCall& call, Pool& pool) {
    if (streams(call.tokens)) return ffn_few(call, pool);
    if (!call.active) {
        if (call.least) *call.chosen = call.up.vectors();  // many tokens leave out few common neurons
        return ffn_block(call, pool);
    }
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
        ffn_few(some, pool);
    }
}

}  // namespace
}  // namespace tpi
