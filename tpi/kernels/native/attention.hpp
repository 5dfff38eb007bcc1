// The attention block in one call (norm, q/k/v, rotation, append to the cache, attend, o) and in three with the same
// bits: project, attend, output. The team syncs between the phases.
#pragma once

#include "attending.hpp"

namespace tpi {
namespace {

// The scratch of each thread of the pool.
struct Scratch {
    uint8_t* data;
    size_t bytes;

    uint8_t* of(const Team& team) const { return data + team.index() * bytes; }
};

inline Scratch take_scratch(Pool& pool, size_t bytes) {
    bytes = round_up(bytes, 64);
    return {pool.arena().take<uint8_t>(bytes * pool.size()), bytes};
}

// ---- the output ----

struct OutputJob {
    const AttentionCall& call;
    Copies<Inner> inner;
    Slices slices;
};

inline OutputJob take_output(const AttentionCall& call, Pool& pool) {
    Arena& arena = pool.arena();
    return {call,
            take_copies<Inner>(pool, call.tokens * call.o.vectors() <= kOwnValues,
                               [&] { return take_inner(arena, call.o, call.tokens); }),
            take_slices(arena, pool.size(), call.o.vectors(), streams(call.tokens) ? call.tokens : 0, call.hidden)};
}

// out = o times the vectors that `fill(token, to)` writes for each token, [heads * head_dim].
template <class Fill>
inline void multiply_output(const OutputJob& job, uint8_t* scratch, Team& team, const Fill& fill) {
    const AttentionCall& call = job.call;
    const Inner& inner = job.inner.of(team);
    auto complete = [&](size_t token) {
        float* to = inner.values + token * inner.width;
        fill(token, to);
        for (size_t i = call.heads * call.head_dim; i < inner.width; ++i) to[i] = 0.0f;
        if (inner.rounded.codes) round_vector(to, inner.rounded, token);
    };
    if (job.inner.own) {
        for (size_t token = 0; token < call.tokens; ++token) complete(token);
    } else {
        team.each(call.tokens, complete);
        team.sync();
    }
    multiply_columns(call.o, inner, call.tokens, job.slices, scratch, team, call.out);
}

// Multiply what the heads of a token attended to with the sigmoid of its gate.
inline void apply_gate(const AttentionCall& call, const float* gate, float* mixed) {
    size_t width = call.heads * call.head_dim;
    for (size_t i = 0; i < width; i += 8) {
        F8 weight = splat(1.0f) / (splat(1.0f) + exp(splat(0.0f) - load_some(gate + i, width - i)));
        store_some(mixed + i, load_some(mixed + i, width - i) * weight, width - i);
    }
}

// ---- in one call ----

struct AttentionJob {
    Projection projection;
    Attending attending;
    OutputJob output;
    Scratch scratch;
};

inline void attention_job(const AttentionJob& job, Team& team) {
    uint8_t* scratch = job.scratch.of(team);
    multiply_heads(job.projection, scratch, team);
    team.sync();
    attend_all(job.attending, scratch, team);
    team.sync();
    const float* gate = job.projection.call.gate.units ? job.projection.gate : nullptr;
    size_t stride = job.projection.call.gate.vectors();
    multiply_output(job.output, scratch, team, [&](size_t token, float* to) {
        merge_heads(job.attending, token, to);
        if (gate) apply_gate(job.output.call, gate + token * stride, to);
    });
}

inline void attention(const AttentionCall& call, Pool& pool) {
    Projection projection = take_projection(call, pool);
    Attending attending = take_attending(call, &projection, pool);
    size_t attend = attending_bytes(attending), multiply = kThreadBytes;
    AttentionJob job{projection, attending, take_output(call, pool),
                     take_scratch(pool, attend > multiply ? attend : multiply)};
    run_on(pool, attention_job, job);
}

// ---- in three ----

struct ProjectJob {
    Projection projection;
    Scratch scratch;
};

inline void project(const AttentionCall& call, Pool& pool) {
    ProjectJob job{take_projection(call, pool), take_scratch(pool, kThreadBytes)};
    run_on<ProjectJob>(pool,
        [](const ProjectJob& j, Team& team) {
            multiply_heads(j.projection, j.scratch.of(team), team);
            team.sync();
            finish_heads(j.projection, team);
        },
        job);
}

struct AttendJob {
    Attending attending;
    Scratch scratch;
};

inline void attend(const AttentionCall& call, Pool& pool) {
    Attending attending = take_attending(call, nullptr, pool);
    AttendJob job{attending, take_scratch(pool, attending_bytes(attending))};
    run_on<AttendJob>(pool,
        [](const AttendJob& j, Team& team) {
            attend_all(j.attending, j.scratch.of(team), team);
            team.sync();
            const AttentionCall& c = j.attending.call;
            size_t width = c.heads * c.head_dim;
            team.each(c.tokens, [&](size_t t) {
                merge_heads(j.attending, t, c.out + t * width);
                if (c.projected.gate) apply_gate(c, c.projected.gate + t * width, c.out + t * width);
            });
        },
        job);
}

struct MultiplyJob {
    OutputJob output;
    Scratch scratch;
};

inline void output(const AttentionCall& call, Pool& pool) {
    MultiplyJob job{take_output(call, pool), take_scratch(pool, kThreadBytes)};
    run_on<MultiplyJob>(pool,
        [](const MultiplyJob& j, Team& team) {
            const AttentionCall& c = j.output.call;
            size_t width = c.heads * c.head_dim;
            multiply_output(j.output, j.scratch.of(team), team, [&](size_t token, float* to) {
                std::memcpy(to, c.x + token * width, width * sizeof(float));
            });
        },
        job);
}

}  // namespace
}  // namespace tpi
