// Attending over the cache, cut into tasks for the team: runs of tokens by KV head by chunk of the context.
// What is shorter than a meeting (the one new token of a sequence) is placed by whoever needs it.
#pragma once

#include <cmath>

#include "heads.hpp"

namespace tpi {
namespace {

constexpr size_t kChunk = 128;     // positions per task when a few tokens attend to a long context
constexpr size_t kTaskRows = 32;   // query rows per task, about, when many tokens attend

// Tokens of one sequence that share their reads of the cache.
struct TokenRun { size_t first, count; };

struct Attending {
    const AttentionCall& call;
    const Projection* from;               // or null: `call.projected` has the heads
    size_t padded;                        // head_dim rounded up to whole registers
    bool direct;                          // one token of each sequence, projected in the same call
    float* queries;                       // [tokens, heads, padded], rotated and scaled; direct: in the scratch
    float* partial;                       // [tokens, heads, chunks, padded + 8]: mixed, largest score, total
    size_t chunks;
    TokenRun* runs;
    size_t run_count;
    int32_t* members;                     // query heads by KV head
    size_t* member_start;                 // [kv_heads + 1]

    float* query_of(size_t token, size_t head) const { return queries + (token * call.heads + head) * padded; }
    float* partial_of(size_t token, size_t head, size_t chunk) const {
        return partial + ((token * call.heads + head) * chunks + chunk) * (padded + 8);
    }
};

// ---- tasks ----

inline void place_query(const Attending& job, size_t token, size_t head, float* to) {
    const AttentionCall& call = job.call;
    if (job.from) {
        query_head(*job.from, token, head, to);
    } else {
        const float* query = head_of(call.projected.queries, token, head, call.heads, call.head_dim);
        std::memcpy(to, query, call.head_dim * sizeof(float));
    }
    if (is_spread(call.keys)) spread(to, call.head_dim);
    for (size_t d = 0; d < call.head_dim; ++d) to[d] *= call.scale;
    for (size_t d = call.head_dim; d < job.padded; ++d) to[d] = 0.0f;
}

// `head` is scratch of one head.
inline void place_kv(const Attending& job, float* head, size_t token, size_t kv_head) {
    const AttentionCall& call = job.call;
    size_t row = own_row(call, token, kv_head), dim = call.head_dim;
    if (job.from) key_head(*job.from, token, kv_head, head);
    else std::memcpy(head, head_of(call.projected.keys, token, kv_head, call.kv_heads, dim), dim * sizeof(float));
    if (is_spread(call.keys)) spread(head, dim);
    write_kv(call.keys, row, head, dim);
    if (job.from) value_head(*job.from, token, kv_head, head);
    else std::memcpy(head, head_of(call.projected.values, token, kv_head, call.kv_heads, dim), dim * sizeof(float));
    write_kv(call.values, row, head, dim);
}

// Queries in place and keys and values in the cache, for every token.
inline void place(const Attending& job, float* scratch, Team& team) {
    each_head(job.call, team, [&](size_t token, size_t head) {
        if (head < job.call.heads) place_query(job, token, head, job.query_of(token, head));
        else place_kv(job, scratch, token, head - job.call.heads);
    });
}

inline size_t first_attended(const AttentionCall& call, size_t position) {
    return call.window && position + 1 > call.window ? position + 1 - call.window : 0;
}

// The query rows of one run and KV head, which are placed in `own` where the job is direct. Returns how many.
inline size_t gather_rows(const Attending& job, const TokenRun& run, size_t kv_head, size_t chunk, float* own,
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
    prefetch_bytes(call.keys.data + row * call.keys.vector_bytes, kPageTokens * call.keys.vector_bytes);
    prefetch_bytes(call.values.data + row * call.values.vector_bytes, kPageTokens * call.values.vector_bytes);
}

inline void attend_task(const Attending& job, const TokenRun& run, size_t kv_head, size_t chunk, uint8_t* scratch) {
    const AttentionCall& call = job.call;
    auto* keys = reinterpret_cast<float*>(scratch);
    float* values = keys + kPageTokens * job.padded;
    float* queries = values + kPageTokens * job.padded;
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
    for (size_t base = first / kPageTokens * kPageTokens; count && base <= last; base += kPageTokens) {
        size_t have = last + 1 - base < kPageTokens ? last + 1 - base : kPageTokens;
        size_t at = cache_row(call, sequence, base, kv_head);
        if (base + kPageTokens <= last) prefetch_block(call, cache_row(call, sequence, base + kPageTokens, kv_head));
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

// Ends without a sync.
inline void attend_all(const Attending& job, uint8_t* scratch, Team& team) {
    if (!job.direct) {
        place(job, reinterpret_cast<float*>(scratch), team);
        team.sync();
    }
    size_t per_run = job.call.kv_heads * job.chunks;
    team.each(job.run_count * per_run, [&](size_t task) {
        size_t run = job.run_count - 1 - task / per_run;  // the longest come last in a prompt: take them first
        attend_task(job, job.runs[run], task % per_run / job.chunks, task % job.chunks, scratch);
    });
}

// One head's result from its chunks.
inline void merge_chunks(const Attending& job, size_t token, size_t head, float* out) {
    size_t dim = job.call.head_dim;
    const float* sinks = job.call.sinks;
    float most = sinks ? sinks[head] : kMasked;
    for (size_t c = 0; c < job.chunks; ++c) {
        float high = job.partial_of(token, head, c)[job.padded];
        most = high > most ? high : most;
    }
    float total = sinks ? std::exp(sinks[head] - most) : 0.0f;
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

// All heads of a token, [heads * head_dim].
inline void merge_heads(const Attending& job, size_t token, float* to) {
    for (size_t head = 0; head < job.call.heads; ++head) merge_chunks(job, token, head, to + head * job.call.head_dim);
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

inline Attending take_attending(const AttentionCall& call, const Projection* from, Arena& arena) {
    size_t padded = round_up(call.head_dim, 8), chunks = chunks_of(call);
    bool direct = from && is_direct(call);
    Attending job{call,
                  from,
                  padded,
                  direct,
                  arena.take<float>(direct ? 1 : call.tokens * call.heads * padded),
                  arena.take<float>(call.tokens * call.heads * chunks * (padded + 8)),
                  chunks,
                  arena.take<TokenRun>(call.tokens),
                  0,
                  arena.take<int32_t>(call.heads),
                  arena.take<size_t>(call.kv_heads + 1)};
    job.run_count = cut_runs(call, job.runs);
    sort_members(call, job.members, job.member_start);
    return job;
}

// Bytes of scratch that each thread needs.
inline size_t attending_bytes(const Attending& job) {
    // a run of many tokens times the members of its largest group
    size_t most_rows = (kTaskRows + 1) * (job.call.heads + 1), queries = job.direct ? job.call.heads * job.padded : 0;
    return (2 * kPageTokens * job.padded + queries) * sizeof(float) + most_rows * sizeof(Row);
}

}  // namespace
}  // namespace tpi
