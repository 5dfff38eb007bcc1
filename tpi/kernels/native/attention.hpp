// The attention half-block: norm, q/k/v, rotation, append to the cache, attend, o; the team meets between these phases.
// What is shorter than a meeting (few values; the one new token of a sequence) is done by whoever needs it instead.
#pragma once

#include <cmath>

#include "attend.hpp"
#include "products.hpp"

namespace tpi {
namespace {

constexpr size_t kChunk = 128;     // positions per task when a few tokens attend to a long context
constexpr size_t kTaskRows = 32;   // query rows per task, about, when many tokens attend

// Tokens of one sequence that share their reads of the cache.
struct TokenRun { size_t first, count; };

struct AttentionJob {
    const AttentionCall& call;
    size_t padded;                        // head_dim rounded up to whole registers
    Copies<Prepared> in;
    float *q, *k, *v;                     // [tokens, vectors of the part]
    float *cosine, *sine;                 // [tokens, half_rotary]
    bool direct;                          // one token of each sequence
    float* queries;                       // [tokens, heads, padded], rotated and scaled; direct: in the scratch
    float* partial;                       // [tokens, heads, chunks, padded + 8]: mixed, largest score, total
    size_t chunks;
    TokenRun* runs;
    size_t run_count;
    int32_t* members;                     // query heads by KV head
    size_t* member_start;                 // [kv_heads + 1]
    Copies<Inner> inner;
    Slices slices;
    uint8_t* scratch;                     // [threads, scratch_bytes]
    size_t scratch_bytes;

    float* query_of(size_t token, size_t head) const { return queries + (token * call.heads + head) * padded; }
    float* partial_of(size_t token, size_t head, size_t chunk) const {
        return partial + ((token * call.heads + head) * chunks + chunk) * (padded + 8);
    }
};

// ---- phases ----

inline void rotation_of(const AttentionJob& job, size_t token) {
    const AttentionCall& call = job.call;
    for (size_t i = 0; i < call.half_rotary; ++i) {
        float angle = static_cast<float>(call.positions[token]) * call.inv_freq[i];
        job.cosine[token * call.half_rotary + i] = std::cos(angle) * call.rope_scale;
        job.sine[token * call.half_rotary + i] = std::sin(angle) * call.rope_scale;
    }
}

inline void project(const AttentionJob& job, const Prepared& in, uint8_t* scratch, Team& team) {
    const Matrix* parts[] = {&job.call.q, &job.call.k, &job.call.v};
    float* outs[] = {job.q, job.k, job.v};
    size_t tasks[3], all = 0;
    for (int p = 0; p < 3; ++p) all += tasks[p] = row_tasks(*parts[p], in);
    team.each(all, [&](size_t task) {
        int p = 0;
        while (task >= tasks[p]) task -= tasks[p++];
        row_task(*parts[p], in, task, reinterpret_cast<float*>(scratch), outs[p], parts[p]->vectors());
    });
}

// Bias, norm and rotation of one head.
inline void finish_head(const AttentionJob& job, const float* from, const float* bias, const float* norm, bool turn,
                        size_t token, float* head) {
    const AttentionCall& call = job.call;
    for (size_t d = 0; d < call.head_dim; ++d) head[d] = from[d] + (bias ? bias[d] : 0.0f);
    if (norm) normalise(Norm{true, call.norm.eps, norm, nullptr}, head, call.head_dim, head);
    size_t at = token * call.half_rotary;
    if (turn && call.half_rotary) rotate(head, job.cosine + at, job.sine + at, call.half_rotary);
}

inline size_t cache_row(const AttentionCall& call, size_t sequence, size_t position, size_t kv_head) {
    auto block = static_cast<size_t>(call.tables[sequence * call.table_width + position / kBlockTokens]);
    return (block * call.kv_heads + kv_head) * kBlockTokens + position % kBlockTokens;
}

inline void place_query(const AttentionJob& job, size_t token, size_t head, float* to) {
    const AttentionCall& call = job.call;
    const float* bias = call.q_bias ? call.q_bias + head * call.head_dim : nullptr;
    finish_head(job, job.q + token * call.q.vectors() + head * call.head_dim, bias, call.q_norm, true, token, to);
    for (size_t d = 0; d < call.head_dim; ++d) to[d] *= call.scale;
    for (size_t d = call.head_dim; d < job.padded; ++d) to[d] = 0.0f;
}

inline void place_kv(const AttentionJob& job, float* head, size_t token, size_t kv_head) {
    const AttentionCall& call = job.call;
    size_t at = kv_head * call.head_dim;
    size_t row = cache_row(call, static_cast<size_t>(call.sequence[token]), static_cast<size_t>(call.positions[token]), kv_head);
    finish_head(job, job.k + token * call.k.vectors() + at, call.k_bias ? call.k_bias + at : nullptr, call.k_norm, true,
                token, head);
    write_kv(call.keys, row, head, call.head_dim);
    finish_head(job, job.v + token * call.v.vectors() + at, call.v_bias ? call.v_bias + at : nullptr, nullptr, false,
                token, head);
    write_kv(call.values, row, head, call.head_dim);
}

// Queries in place and keys and values in the cache, for every token.
inline void place(const AttentionJob& job, float* scratch, Team& team) {
    const AttentionCall& call = job.call;
    size_t heads = call.heads + call.kv_heads, piece = call.tokens > kStreamTokens ? 16 : 2;
    size_t all = call.tokens * heads;
    team.each((all + piece - 1) / piece, [&](size_t task) {
        for (size_t i = task * piece; i < all && i < (task + 1) * piece; ++i) {
            size_t token = i / heads, head = i % heads;
            if (head < call.heads) place_query(job, token, head, job.query_of(token, head));
            else place_kv(job, scratch, token, head - call.heads);
        }
    });
}

inline size_t first_attended(const AttentionCall& call, size_t position) {
    return call.window && position + 1 > call.window ? position + 1 - call.window : 0;
}

// The query rows of one run and KV head, which are placed in `own` where the job is direct. Returns how many.
inline size_t gather_rows(const AttentionJob& job, const TokenRun& run, size_t kv_head, size_t chunk, float* own,
                          Row* rows) {
    const AttentionCall& call = job.call;
    size_t count = 0;
    for (size_t token = run.first; token < run.first + run.count; ++token) {
        for (size_t m = job.member_start[kv_head]; m < job.member_start[kv_head + 1]; ++m) {
            auto head = static_cast<size_t>(job.members[m]);
            float* mixed = job.partial_of(token, head, chunk);
            std::memset(mixed, 0, job.padded * sizeof(float));
            auto position = static_cast<size_t>(call.positions[token]);
            float* query = job.direct ? own + count * job.padded : job.query_of(token, head);
            if (job.direct) place_query(job, token, head, query);
            rows[count++] = {query, first_attended(call, position), position, mixed, kMasked, 0.0f};
        }
    }
    return count;
}

inline void prefetch_block(const AttentionCall& call, size_t row) {
    prefetch_bytes(call.keys.data + row * call.keys.vector_bytes, kBlockTokens * call.keys.vector_bytes);
    prefetch_bytes(call.values.data + row * call.values.vector_bytes, kBlockTokens * call.values.vector_bytes);
}

inline void attend_task(const AttentionJob& job, const TokenRun& run, size_t kv_head, size_t chunk, uint8_t* scratch) {
    const AttentionCall& call = job.call;
    auto* keys = reinterpret_cast<float*>(scratch);
    float* values = keys + kBlockTokens * job.padded;
    float* queries = values + kBlockTokens * job.padded;
    auto* rows = reinterpret_cast<Row*>(queries + (job.direct ? call.heads * job.padded : 0));
    bool newest = static_cast<size_t>(call.positions[run.first]) / kChunk == chunk;
    if (job.direct && newest) place_kv(job, queries, run.first, kv_head);
    size_t count = gather_rows(job, run, kv_head, chunk, queries, rows);
    size_t first = static_cast<size_t>(-1), last = 0;
    for (size_t r = 0; r < count; ++r) {
        if (rows[r].first < first) first = rows[r].first;
        if (rows[r].last > last) last = rows[r].last;
    }
    if (job.chunks > 1) {
        if (first < chunk * kChunk) first = chunk * kChunk;
        if (last > chunk * kChunk + kChunk - 1) last = chunk * kChunk + kChunk - 1;
    }
    auto sequence = static_cast<size_t>(call.sequence[run.first]);
    for (size_t base = first / kBlockTokens * kBlockTokens; count && base <= last; base += kBlockTokens) {
        size_t have = last + 1 - base < kBlockTokens ? last + 1 - base : kBlockTokens;
        size_t at = cache_row(call, sequence, base, kv_head);
        if (base + kBlockTokens <= last) prefetch_block(call, cache_row(call, sequence, base + kBlockTokens, kv_head));
        const float* k = block_vectors(call.keys, at, have, call.head_dim, job.padded, keys);
        const float* v = block_vectors(call.values, at, have, call.head_dim, job.padded, values);
        for (size_t r = 0; r < count; ++r)
            if (rows[r].last >= base && rows[r].first < base + have)
                attend_block(rows[r], k, v, job.padded, base, have, call.softcap);
    }
    for (size_t r = 0; r < count; ++r) {
        rows[r].mixed[job.padded] = rows[r].most;
        rows[r].mixed[job.padded + 1] = rows[r].total;
    }
}

inline void attend(const AttentionJob& job, uint8_t* scratch, Team& team) {
    size_t per_run = job.call.kv_heads * job.chunks;
    team.each(job.run_count * per_run, [&](size_t task) {
        size_t run = job.run_count - 1 - task / per_run;  // the longest come last in a prompt: take them first
        attend_task(job, job.runs[run], task % per_run / job.chunks, task % job.chunks, scratch);
    });
}

// One head's result from its chunks.
inline void merge_chunks(const AttentionJob& job, size_t token, size_t head, float* out) {
    size_t dim = job.call.head_dim;
    float most = kMasked, total = 0.0f;
    for (size_t c = 0; c < job.chunks; ++c) {
        float high = job.partial_of(token, head, c)[job.padded];
        most = high > most ? high : most;
    }
    for (size_t d = 0; d < dim; ++d) out[d] = 0.0f;
    for (size_t c = 0; c < job.chunks; ++c) {
        const float* part = job.partial_of(token, head, c);
        if (part[job.padded + 1] == 0.0f) continue;
        float weight = std::exp(part[job.padded] - most);
        total += weight * part[job.padded + 1];
        for (size_t d = 0; d < dim; ++d) out[d] += weight * part[d];
    }
    for (size_t d = 0; d < dim; ++d) out[d] /= total;
}

inline void merge_token(const AttentionJob& job, const Inner& inner, size_t token) {
    const AttentionCall& call = job.call;
    float* to = inner.values + token * inner.width;
    for (size_t head = 0; head < call.heads; ++head) merge_chunks(job, token, head, to + head * call.head_dim);
    for (size_t i = call.heads * call.head_dim; i < inner.width; ++i) to[i] = 0.0f;
    if (inner.rounded.codes) round_vector(to, inner.rounded, token);
}

// All tokens; returns what this thread is to multiply with o, complete.
inline const Inner& merge(const AttentionJob& job, Team& team) {
    const Inner& inner = job.inner.of(team);
    if (job.inner.own) {
        for (size_t token = 0; token < job.call.tokens; ++token) merge_token(job, inner, token);
    } else {
        team.each(job.call.tokens, [&](size_t token) { merge_token(job, inner, token); });
        team.sync();
    }
    return inner;
}

inline void attention_job(const AttentionJob& job, Team& team) {
    const AttentionCall& call = job.call;
    uint8_t* scratch = job.scratch + team.index() * job.scratch_bytes;
    team.each(call.tokens, [&](size_t token) { rotation_of(job, token); });
    project(job, prepare(job.in, call.norm, call.x, call.hidden, team), scratch, team);
    team.sync();
    if (!job.direct) {
        place(job, reinterpret_cast<float*>(scratch), team);
        team.sync();
    }
    attend(job, scratch, team);
    team.sync();
    multiply_columns(call.o, merge(job, team), call.tokens, job.slices, scratch, team, call.out);
}

// ---- set-up ----

// Cut the tokens into runs of one sequence with about kTaskRows query rows each.
inline size_t cut_runs(const AttentionCall& call, TokenRun* runs) {
    size_t group = call.kv_heads ? (call.heads + call.kv_heads - 1) / call.kv_heads : 1;
    size_t most = group < kTaskRows ? kTaskRows / group : 1, count = 0;
    for (size_t token = 0; token < call.tokens; ++token) {
        bool joins = count && runs[count - 1].count < most && call.sequence[token] == call.sequence[token - 1];
        if (joins) ++runs[count - 1].count;
        else runs[count++] = {token, 1};
    }
    return count;
}

// Whether each sequence has one token, so that nobody needs the keys and values that another task appends.
inline bool is_direct(const AttentionCall& call) {
    for (size_t token = 1; token < call.tokens; ++token)
        if (call.sequence[token] <= call.sequence[token - 1]) return false;
    return streams(call.tokens);
}

inline void sort_members(const AttentionCall& call, int32_t* members, size_t* start) {
    size_t count = 0;
    for (size_t kv = 0; kv < call.kv_heads; ++kv) {
        start[kv] = count;
        for (size_t head = 0; head < call.heads; ++head)
            if (static_cast<size_t>(call.kv_index[head]) == kv) members[count++] = static_cast<int32_t>(head);
    }
    start[call.kv_heads] = count;
}

inline size_t chunks_of(const AttentionCall& call) {
    if (!streams(call.tokens)) return 1;
    int32_t last = 0;
    for (size_t t = 0; t < call.tokens; ++t) last = call.positions[t] > last ? call.positions[t] : last;
    return static_cast<size_t>(last) / kChunk + 1;
}

inline void attention(const AttentionCall& call, Pool& pool) {
    Arena& arena = pool.arena();
    const Matrix* rows[] = {&call.q, &call.k, &call.v};
    size_t tokens = call.tokens, padded = round_up(call.head_dim, 8), chunks = chunks_of(call);
    // a run of many tokens times the members of its largest group
    size_t most_rows = (kTaskRows + 1) * (call.heads + 1);
    bool direct = is_direct(call);
    size_t queries = direct ? call.heads * padded : 0;
    size_t attend_bytes = (2 * kBlockTokens * padded + queries) * sizeof(float) + most_rows * sizeof(Row);
    size_t columns_bytes = thread_bytes(call.o);
    size_t scratch = round_up(attend_bytes > columns_bytes ? attend_bytes : columns_bytes, 64);
    AttentionJob job{call,
                     padded,
                     prepare_buffers(pool, tokens, call.hidden, rows, 3),
                     arena.take<float>(tokens * call.q.vectors()),
                     arena.take<float>(tokens * call.k.vectors()),
                     arena.take<float>(tokens * call.v.vectors()),
                     arena.take<float>(tokens * call.half_rotary),
                     arena.take<float>(tokens * call.half_rotary),
                     direct,
                     arena.take<float>(direct ? 1 : tokens * call.heads * padded),
                     arena.take<float>(tokens * call.heads * chunks * (padded + 8)),
                     chunks,
                     arena.take<TokenRun>(tokens),
                     0,
                     arena.take<int32_t>(call.heads),
                     arena.take<size_t>(call.kv_heads + 1),
                     take_copies<Inner>(pool, tokens * call.o.vectors() <= kOwnValues,
                                        [&] { return take_inner(arena, call.o, tokens); }),
                     take_slices(arena, pool.size(), call.o.vectors(), streams(tokens) ? tokens : 0, call.hidden),
                     arena.take<uint8_t>(scratch * pool.size()),
                     scratch};
    job.run_count = cut_runs(call, job.runs);
    sort_members(call, job.members, job.member_start);
    pool.run(attention_job, job);
}

}  // namespace
}  // namespace tpi
