// From a block's input to heads: q, k and v, their biases, norms and rotation, and their place in the cache.
#pragma once

#include <cmath>

#include "attend.hpp"
#include "products.hpp"

namespace tpi {
namespace {

struct Projection {
    const AttentionCall& call;
    Input in, ranked, q_ranked;           // the block's input; those of k and v, and of q, if they have others
    float *q, *k, *v, *gate;              // [tokens, vectors of the part]
    float *latent, *q_latent;             // [tokens, vectors of the run]
    float *cosine, *sine;                 // [tokens, half_rotary]
};

inline Projection take_projection(const AttentionCall& call, Pool& pool) {
    Arena& arena = pool.arena();
    const QueryLatent& own = call.query_latent;
    const Matrix *rows[] = {&call.q, &call.k, &call.v, &call.gate};
    const Matrix *first[] = {own.rank ? &own.matrix : &call.q, &call.latent.matrix};
    bool latent = call.latent.is_there(), gated = call.gate.units;
    return {call,
            take_input(pool, call.tokens, call.hidden, latent ? first : rows, latent ? 2 : gated ? 4 : 3, call.prepared),
            latent ? take_input(pool, call.tokens, call.latent.rank, rows + 1, 2) : Input{},
            own.rank ? take_input(pool, call.tokens, own.rank, rows, 1) : Input{},
            arena.take<float>(call.tokens * call.q.vectors()),
            arena.take<float>(call.tokens * call.k.vectors()),
            arena.take<float>(call.tokens * call.v.vectors()),
            arena.take<float>(gated ? call.tokens * call.gate.vectors() : 0),
            arena.take<float>(latent ? call.tokens * call.latent.matrix.vectors() : 0),
            arena.take<float>(own.rank ? call.tokens * own.matrix.vectors() : 0),
            arena.take<float>(call.tokens * call.half_rotary),
            arena.take<float>(call.tokens * call.half_rotary)};
}

inline void rotation_of(const Projection& job, size_t token) {
    const AttentionCall& call = job.call;
    for (size_t i = 0; i < call.half_rotary; ++i) {
        float angle = static_cast<float>(call.positions[token]) * call.inv_freq[i];
        job.cosine[token * call.half_rotary + i] = std::cos(angle) * call.rope_scale;
        job.sine[token * call.half_rotary + i] = std::sin(angle) * call.rope_scale;
    }
}

// Multiply one input with some parts, into `outs`. Ends without a sync.
template <size_t Parts>
inline void multiply_rows(const Matrix* const (&parts)[Parts], float* const (&outs)[Parts], const Prepared& in,
                          uint8_t* scratch, Team& team) {
    size_t tasks[Parts], all = 0;
    for (size_t p = 0; p < Parts; ++p) all += tasks[p] = row_tasks(*parts[p], in);
    team.each(all, [&](size_t task) {
        size_t p = 0;
        while (task >= tasks[p]) task -= tasks[p++];
        row_task(*parts[p], in, task, scratch, outs[p], parts[p]->vectors());
    });
}

// Add a bias, if there is one, to the first `count` of each token's `stride` values. Ends without a sync.
inline void add_bias(const float* bias, size_t count, size_t stride, size_t tokens, float* values, Team& team) {
    if (!bias) return;
    team.each(tokens, [&](size_t token) {
        for (size_t i = 0; i < count; ++i) values[token * stride + i] += bias[i];
    });
}

// Compute the latent vectors, then q, k and v from them. Ends without a sync.
inline void multiply_latents(const Projection& job, const Prepared& in, uint8_t* scratch, Team& team) {
    const AttentionCall& call = job.call;
    const Latent& latent = call.latent;
    const QueryLatent& own = call.query_latent;
    size_t stride = latent.matrix.vectors(), q_stride = own.matrix.vectors();
    if (own.rank)
        multiply_rows<2>({&latent.matrix, &own.matrix}, {job.latent, job.q_latent}, in, scratch, team);
    else
        multiply_rows<2>({&latent.matrix, &call.q}, {job.latent, job.q}, in, scratch, team);
    team.sync();
    add_bias(latent.bias, latent.rank + latent.rope, stride, call.tokens, job.latent, team);
    add_bias(own.bias, own.rank, q_stride, call.tokens, job.q_latent, team);
    if (latent.bias || own.bias) team.sync();
    if (own.rank) {
        const Prepared& q_in = prepare(job.q_ranked, own.norm, job.q_latent, own.rank, team, q_stride);
        multiply_rows<1>({&call.q}, {job.q}, q_in, scratch, team);
    }
    const Prepared& ranked = prepare(job.ranked, latent.norm, job.latent, latent.rank, team, stride);
    multiply_rows<2>({&call.k, &call.v}, {job.k, job.v}, ranked, scratch, team);
}

// Compute the angles, and q, k and v before bias and norm. Ends without a sync.
inline void multiply_heads(const Projection& job, uint8_t* scratch, Team& team) {
    const AttentionCall& call = job.call;
    team.each(call.tokens, [&](size_t token) { rotation_of(job, token); });
    const Prepared& in = prepare(job.in, call.norm, call.x, call.hidden, team);
    if (call.gate.units)
        return multiply_rows<4>({&call.q, &call.k, &call.v, &call.gate}, {job.q, job.k, job.v, job.gate}, in, scratch, team);
    if (!call.latent.is_there())
        return multiply_rows<3>({&call.q, &call.k, &call.v}, {job.q, job.k, job.v}, in, scratch, team);
    multiply_latents(job, in, scratch, team);
}

// The heads of q, k or v as the products result in them, [tokens, stride].
struct Heads {
    const float* values;
    size_t stride, count;
    const float *bias, *norm;  // or null
    bool turn;
};

// 1 / the root mean square of all heads of a token together, with their biases.
inline float inverse_of_all(const AttentionCall& call, const float* values, const Heads& heads) {
    size_t width = heads.count * call.head_dim;
    float sum = 0.0f;
    for (size_t d = 0; d < width; ++d) {
        float value = values[d] + (heads.bias ? heads.bias[d] : 0.0f);
        sum += value * value;
    }
    return 1.0f / std::sqrt(sum / static_cast<float>(width) + call.norm.eps);
}

inline void norm_head(const AttentionCall& call, const float* weight, float* head) {
    normalise(Norm{true, call.norm.eps, weight, nullptr}, head, call.head_dim, head);
}

// Bias, norm, clipping and rotation of one head; or the norm last.
inline void finish_head(const Projection& job, const Heads& heads, size_t token, size_t number, float* head) {
    const AttentionCall& call = job.call;
    const float* all = heads.values + token * heads.stride;
    size_t first = number * call.head_dim;
    for (size_t d = 0; d < call.head_dim; ++d) head[d] = all[first + d] + (heads.bias ? heads.bias[first + d] : 0.0f);
    if (heads.norm && call.whole_norms) {
        float scale = inverse_of_all(call, all, heads);
        for (size_t d = 0; d < call.head_dim; ++d) head[d] *= scale * heads.norm[first + d];
    } else if (heads.norm && !call.late_norms) {
        norm_head(call, heads.norm, head);
    }
    for (size_t d = 0; call.clip > 0 && d < call.head_dim; ++d)
        head[d] = head[d] > call.clip ? call.clip : head[d] < -call.clip ? -call.clip : head[d];
    size_t at = token * call.half_rotary;
    if (heads.turn && call.half_rotary) rotate(head, job.cosine + at, job.sine + at, call.half_rotary);
    if (heads.norm && call.late_norms) norm_head(call, heads.norm, head);
}

inline void query_head(const Projection& job, size_t token, size_t head, float* to) {
    const AttentionCall& call = job.call;
    finish_head(job, {job.q, call.q.vectors(), call.heads, call.q_bias, call.q_norm, true}, token, head, to);
    if (call.growth == 0) return;
    float scale = 1.0f + call.growth * std::log(1.0f + static_cast<float>(call.positions[token] / call.growth_tokens));
    for (size_t d = 0; d < call.head_dim; ++d) to[d] *= scale;
}

// Set a key to the part that all heads share, then the head's own part, and rotate it.
inline void latent_key(const Projection& job, size_t token, size_t kv_head, float* to) {
    const AttentionCall& call = job.call;
    const Latent& latent = call.latent;
    const float* shared = job.latent + token * latent.matrix.vectors() + latent.rank;
    const float* own = job.k + token * call.k.vectors() + kv_head * latent.width;
    std::memcpy(to, shared, latent.rope * sizeof(float));
    std::memcpy(to + latent.rope, own, (call.head_dim - latent.rope) * sizeof(float));
    size_t at = token * call.half_rotary;
    rotate(to, job.cosine + at, job.sine + at, call.half_rotary);
}

inline void latent_value(const Projection& job, size_t token, size_t kv_head, float* to) {
    const AttentionCall& call = job.call;
    size_t width = call.latent.width;
    std::memcpy(to, job.v + token * call.v.vectors() + kv_head * width, width * sizeof(float));
    for (size_t d = width; d < call.head_dim; ++d) to[d] = 0.0f;
}

inline void key_head(const Projection& job, size_t token, size_t kv_head, float* to) {
    const AttentionCall& call = job.call;
    if (call.latent.is_there()) return latent_key(job, token, kv_head, to);
    finish_head(job, {job.k, call.k.vectors(), call.kv_heads, call.k_bias, call.k_norm, true}, token, kv_head, to);
}

inline void value_head(const Projection& job, size_t token, size_t kv_head, float* to) {
    const AttentionCall& call = job.call;
    if (call.latent.is_there()) return latent_value(job, token, kv_head, to);
    finish_head(job, {job.v, call.v.vectors(), call.kv_heads, call.v_bias, call.v_norm, false}, token, kv_head, to);
}

// Call `work(token, head)` for all query heads and, numbered after them, KV heads. A task has neighbouring tokens of a
// head, whose keys share cache lines.
template <class Work> inline void each_head(const AttentionCall& call, Team& team, const Work& work) {
    size_t piece = call.tokens > kStreamTokens ? 16 : 2, all = call.tokens * (call.heads + call.kv_heads);
    team.each((all + piece - 1) / piece, [&](size_t task) {
        for (size_t i = task * piece; i < all && i < (task + 1) * piece; ++i) work(i % call.tokens, i / call.tokens);
    });
}

inline float* head_of(float* values, size_t token, size_t head, size_t heads, size_t dim) {
    return values + (token * heads + head) * dim;
}

// Write all heads, and the output gate, to `call.projected`.
inline void finish_heads(const Projection& job, Team& team) {
    const AttentionCall& call = job.call;
    const Projected& to = call.projected;
    size_t width = call.heads * call.head_dim;
    if (to.gate)
        team.each(call.tokens, [&](size_t token) {
            std::memcpy(to.gate + token * width, job.gate + token * call.gate.vectors(), width * sizeof(float));
        });
    each_head(call, team, [&](size_t token, size_t head) {
        size_t dim = call.head_dim;
        if (head < call.heads) return query_head(job, token, head, head_of(to.queries, token, head, call.heads, dim));
        if (call.shared) return;
        head -= call.heads;
        key_head(job, token, head, head_of(to.keys, token, head, call.kv_heads, dim));
        value_head(job, token, head, head_of(to.values, token, head, call.kv_heads, dim));
    });
}

inline size_t cache_row(const AttentionCall& call, size_t sequence, size_t position, size_t kv_head) {
    auto block = static_cast<size_t>(call.tables[sequence * call.table_width + position / kPageTokens]);
    return (block * call.kv_heads + kv_head) * kPageTokens + position % kPageTokens;
}

// The row of the cache for a token's key and value.
inline size_t own_row(const AttentionCall& call, size_t token, size_t kv_head) {
    auto sequence = static_cast<size_t>(call.sequence[token]), position = static_cast<size_t>(call.positions[token]);
    return cache_row(call, sequence, position, kv_head);
}

}  // namespace
}  // namespace tpi
