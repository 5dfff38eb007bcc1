// Attention over the cache, cut into tasks for the team: runs of tokens by KV head by chunk of the context. If each
// sequence has one new token, the task that needs its query, key and value computes them: that is faster than a sync.
#pragma once

#include <algorithm>
#include <cmath>

#include "heads.hpp"

namespace tpi {
namespace {

constexpr size_t kChunk = 128;     // least positions of a chunk
constexpr size_t kWhole = SIZE_MAX / 2;  // the chunk of a token whose context is not cut
constexpr size_t kParts = 512;     // approximate number of chunks of all tokens of a step, if they are few
constexpr size_t kTaskRows = 32;   // approximate query rows per task, if many tokens attend
constexpr size_t kTurns = 16;      // least tasks per thread, if there are enough chunks

// Tokens of one sequence that share their reads of the cache, and attend to it in chunks of so many positions.
struct TokenRun { size_t first, count, chunk; };

// A task, for each KV head: attention of a run over its chunks [begin, end). Every chunk has a result of its own, so
// that results do not depend on the thread that computes them.
struct Piece { const TokenRun* run; size_t begin, end, work; };

struct Attending {
    const AttentionCall& call;
    const Projection* from;               // or null: `call.projected` has the heads
    size_t padded;                        // head_dim rounded up to whole registers
    size_t query_values;                  // head_dim rounded up to whole groups: room for a query
    bool direct;                          // one token of each sequence, projected in the same call
    float* queries;                       // [tokens, heads, query_values], rotated and scaled; direct: in the scratch
    size_t* part_start;                   // [tokens + 1]: number of chunks of all tokens before
    float* partial;                       // [chunks of all tokens, heads, padded + 8]: mixed, largest score, total
    Piece* pieces;
    size_t piece_count;
    int32_t* members;                     // query heads by KV head
    size_t* member_start;                 // [kv_heads + 1]

    float* query_of(size_t token, size_t head) const { return queries + (token * call.heads + head) * query_values; }
    float* partial_of(size_t token, size_t head, size_t chunk) const {
        return partial + ((part_start[token] + chunk) * call.heads + head) * (padded + 8);
    }
    size_t chunks_of(size_t token) const { return part_start[token + 1] - part_start[token]; }
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
    if (has_codes(call.keys.format)) round_query(to, call.head_dim);
}

// `head` is scratch for one head.
inline void place_kv(const Attending& job, float* head, size_t token, size_t kv_head) {
    const AttentionCall& call = job.call;
    size_t row = own_row(call, token, kv_head), dim = call.head_dim;
    if (job.from) key_head(*job.from, token, kv_head, head);
    else std::memcpy(head, head_of(call.projected.keys, token, kv_head, call.kv_heads, dim), dim * sizeof(float));
    if (is_spread(call.keys)) spread(head, dim);
    write_key(call.keys, row, head, dim);
    if (job.from) value_head(*job.from, token, kv_head, head);
    else std::memcpy(head, head_of(call.projected.values, token, kv_head, call.kv_heads, dim), dim * sizeof(float));
    write_value(call.values, row, head, dim);
}

// Place the queries in the buffer, and keys and values in the cache, for every token.
inline void place(const Attending& job, float* scratch, Team& team) {
    each_head(job.call, team, [&](size_t token, size_t head) {
        if (head < job.call.heads) place_query(job, token, head, job.query_of(token, head));
        else if (!job.call.shared) place_kv(job, scratch, token, head - job.call.heads);
    });
}

inline size_t first_attended(const AttentionCall& call, size_t position) {
    return call.window && position + 1 > call.window ? position + 1 - call.window : 0;
}

// Collect the query rows of one run and KV head; they are placed in `own` if the job is direct. Returns their number.
inline size_t gather_rows(const Attending& job, const TokenRun& run, size_t kv_head, float* own, Row* rows) {
    const AttentionCall& call = job.call;
    size_t count = 0;
    for (size_t token = run.first; token < run.first + run.count; ++token) {
        for (size_t m = job.member_start[kv_head]; m < job.member_start[kv_head + 1]; ++m) {
            auto head = static_cast<size_t>(job.members[m]);
            auto position = static_cast<size_t>(call.positions[token]);
            float* query = job.direct ? own + count * job.query_values : job.query_of(token, head);
            if (job.direct) place_query(job, token, head, query);
            rows[count++] = {query, token, head, first_attended(call, position), position, nullptr, 0.0f, 0.0f};
        }
    }
    return count;
}

inline void begin_chunk(const Attending& job, size_t chunk, Row* rows, size_t count) {
    for (size_t r = 0; r < count; ++r) {
        rows[r].mixed = job.partial_of(rows[r].token, rows[r].head, chunk);
        std::memset(rows[r].mixed, 0, job.padded * sizeof(float));
        rows[r].most = kMasked;
        rows[r].total = 0.0f;
    }
}

inline void end_chunk(const Attending& job, const Row* rows, size_t count) {
    for (size_t r = 0; r < count; ++r) {
        rows[r].mixed[job.padded] = rows[r].most;
        rows[r].mixed[job.padded + 1] = rows[r].total;
    }
}

// A page of one sequence and KV head, with the place of its vectors, and of the next page's if that is used too.
inline Page page_at(const Attending& job, size_t sequence, size_t kv_head, size_t base, size_t last) {
    const AttentionCall& call = job.call;
    size_t row = cache_row(call, sequence, base, kv_head), have = smaller(last + 1 - base, kPageTokens);
    if (base + kPageTokens > last) return {base, have, row, {}, {}};
    size_t next = cache_row(call, sequence, base + kPageTokens, kv_head);
    return {base, have, row, ahead_of(call.keys, next), ahead_of(call.values, next)};
}

inline void attend_task(const Attending& job, const Piece& piece, size_t kv_head, uint8_t* scratch) {
    const AttentionCall& call = job.call;
    const TokenRun& run = *piece.run;
    auto* keys = reinterpret_cast<float*>(scratch);
    float* values = keys + kPageTokens * job.padded;
    float* queries = values + kPageTokens * job.padded;
    auto* rows = reinterpret_cast<Row*>(queries + (job.direct ? call.heads * job.query_values : 0));
    if (job.direct && !call.shared && piece.end == job.chunks_of(run.first)) place_kv(job, queries, run.first, kv_head);
    size_t count = gather_rows(job, run, kv_head, queries, rows);
    if (!count) return;
    auto sequence = static_cast<size_t>(call.sequence[run.first]);
    size_t first = rows[0].first, last = smaller(rows[count - 1].last, piece.end * run.chunk - 1);
    for (size_t chunk = piece.begin; chunk < piece.end; ++chunk) {
        for (; count && rows->last / run.chunk < chunk; --count) ++rows;  // without tokens that end before this chunk
        begin_chunk(job, chunk, rows, count);
        size_t start = larger(first / kPageTokens * kPageTokens, chunk * run.chunk);
        size_t stop = smaller(last + 1, (chunk + 1) * run.chunk);
        for (size_t base = start; base < stop; base += kPageTokens) {
            Page page = page_at(job, sequence, kv_head, base, last);
            KeyPage k = page_keys(call.keys, page, call.head_dim, count, keys);
            Vectors v = page_values(call.values, page, call.head_dim, job.padded, count, values);
            attend_page(rows, count, page, k, v, job.padded, call.softcap);
        }
        end_chunk(job, rows, count);
    }
}

// Ends without a sync.
inline void attend_all(const Attending& job, uint8_t* scratch, Team& team) {
    if (!job.direct) {
        place(job, reinterpret_cast<float*>(scratch), team);
        team.sync();
    }
    size_t heads = job.call.kv_heads;
    team.each(job.piece_count * heads, [&](size_t task) {
        attend_task(job, job.pieces[task / heads], task % heads, scratch);
    });
}

// Merge one head's result from its chunks.
inline void merge_chunks(const Attending& job, size_t token, size_t head, float* out) {
    size_t dim = job.call.head_dim, chunks = job.chunks_of(token);
    const float* sinks = job.call.sinks;
    float most = sinks ? sinks[head] : kMasked;
    for (size_t c = 0; c < chunks; ++c) {
        float high = job.partial_of(token, head, c)[job.padded];
        most = high > most ? high : most;
    }
    float total = sinks ? std::exp(sinks[head] - most) : 0.0f;
    for (size_t d = 0; d < dim; ++d) out[d] = 0.0f;
    for (size_t c = 0; c < chunks; ++c) {
        const float* part = job.partial_of(token, head, c);
        if (part[job.padded + 1] == 0.0f) continue;
        float weight = std::exp(part[job.padded] - most);
        total += weight * part[job.padded + 1];
        for (size_t d = 0; d < dim; ++d) out[d] += weight * part[d];
    }
    for (size_t d = 0; d < dim; ++d) out[d] /= total;
}

// Merge all heads of a token, [heads * head_dim].
inline void merge_heads(const Attending& job, size_t token, float* to) {
    for (size_t head = 0; head < job.call.heads; ++head) merge_chunks(job, token, head, to + head * job.call.head_dim);
}

// ---- set-up ----

// Positions of a chunk for a token. They depend on the token's own position, so that other requests do not change its
// result, and on the number of tokens, so that no step has many more chunks than kParts.
inline size_t chunk_of(size_t tokens, size_t position) {
    size_t most = kParts / larger(tokens, kStreamTokens), chunk = kChunk;
    if (most < 2) return kWhole;
    while (position >= most * chunk) chunk *= 2;
    return chunk;
}

// Cut the tokens into runs of one sequence with about kTaskRows query rows each.
inline size_t cut_runs(const AttentionCall& call, TokenRun* runs) {
    size_t group = call.kv_heads ? (call.heads + call.kv_heads - 1) / call.kv_heads : 1;
    size_t most = group < kTaskRows ? kTaskRows / group : 1, count = 0;
    for (size_t token = 0; token < call.tokens; ++token) {
        size_t chunk = chunk_of(call.tokens, static_cast<size_t>(call.positions[token]));
        bool joins = count && runs[count - 1].count < most && runs[count - 1].chunk == chunk &&
                     call.sequence[token] == call.sequence[token - 1] &&
                     call.positions[token] == call.positions[token - 1] + 1;
        if (joins) ++runs[count - 1].count;
        else runs[count++] = {token, 1, chunk};
    }
    return count;
}

// Return true if each sequence has one token, so that no task needs keys and values that another one appends.
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

// Set `start` to the bounds of every token's chunks.
inline void count_parts(const AttentionCall& call, size_t* start) {
    start[0] = 0;
    for (size_t token = 0; token < call.tokens; ++token) {
        auto position = static_cast<size_t>(call.positions[token]);
        start[token + 1] = start[token] + position / chunk_of(call.tokens, position) + 1;
    }
}

// Cut the attention of the runs into tasks of about the same size, the longest first. Returns their number.
inline size_t cut_pieces(const Attending& job, const TokenRun* runs, size_t run_count, size_t threads, Piece* pieces) {
    const AttentionCall& call = job.call;
    size_t all = 0, count = 0;
    for (size_t r = 0; r < run_count; ++r) all += job.chunks_of(runs[r].first + runs[r].count - 1);
    size_t each = larger(all * call.kv_heads / (kTurns * threads), 1);
    for (const TokenRun* run = runs; run < runs + run_count; ++run) {
        size_t token = run->first + run->count - 1, chunks = job.chunks_of(token);
        auto last = static_cast<size_t>(call.positions[token]);
        size_t first = first_attended(call, static_cast<size_t>(call.positions[run->first]));
        for (size_t begin = 0; begin < chunks; begin += each) {
            size_t end = smaller(begin + each, chunks);
            size_t from = larger(first, begin * run->chunk), to = smaller(last + 1, end * run->chunk);
            pieces[count++] = {run, begin, end, from < to ? (to - from) * run->count : 0};
        }
    }
    std::sort(pieces, pieces + count, [](const Piece& a, const Piece& b) { return a.work > b.work; });
    return count;
}

inline Attending take_attending(const AttentionCall& call, const Projection* from, Pool& pool) {
    Arena& arena = pool.arena();
    size_t padded = round_up(call.head_dim, kWide), query_values = round_up(call.head_dim, kGroup);
    bool direct = from && is_direct(call);
    auto* start = arena.take<size_t>(call.tokens + 1);
    auto* runs = arena.take<TokenRun>(call.tokens);
    count_parts(call, start);
    size_t parts = start[call.tokens];
    Attending job{call,
                  from,
                  padded,
                  query_values,
                  direct,
                  arena.take<float>(direct ? 1 : call.tokens * call.heads * query_values),
                  start,
                  arena.take<float>(parts * call.heads * (padded + 8)),
                  arena.take<Piece>(parts),
                  0,
                  arena.take<int32_t>(call.heads),
                  arena.take<size_t>(call.kv_heads + 1)};
    job.piece_count = cut_pieces(job, runs, cut_runs(call, runs), pool.size(), job.pieces);
    sort_members(call, job.members, job.member_start);
    return job;
}

// Bytes of scratch that each thread needs.
inline size_t attending_bytes(const Attending& job) {
    // a run of many tokens times the members of its largest group
    size_t most_rows = (kTaskRows + 1) * (job.call.heads + 1), queries = job.direct ? job.call.heads * job.query_values : 0;
    return (2 * kPageTokens * job.padded + queries) * sizeof(float) + most_rows * sizeof(Row);
}

}  // namespace
}  // namespace tpi
