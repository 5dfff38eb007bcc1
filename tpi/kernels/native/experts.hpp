// A block's experts in one call. A pair is a token and a part that it uses: a piece of one of its experts, or the
// shared experts. A few tokens stream the units of all their parts like one feed-forward network, and each result is
// multiplied by the pair's weight. Their norm, router and choice of experts may be part of the call. Many tokens take
// one part after the other.
#pragma once

#include "ffn.hpp"

namespace tpi {
namespace {

// Memory for the inputs of all pairs, which are copied from those of their tokens, `from`. With a single token, the
// token's input is used in place.
inline Prepared take_pairs(const ExpertsCall& call, const Prepared& from, Arena& arena) {
    if (call.tokens == 1) return from;
    Prepared to = from;
    to.tokens = call.pairs;
    size_t values = call.pairs * from.stride, groups = values / kGroup;
    to.x = call.floats ? arena.take<float>(values) : nullptr;
    to.kept = from.kept ? arena.take<float>(values) : nullptr;
    if (!from.rounded.codes) return to;
    to.rounded.codes = arena.take<int8_t>(values);
    to.rounded.fine = from.rounded.fine ? arena.take<int8_t>(values) : nullptr;
    to.rounded.whole = from.rounded.whole ? arena.take<CodeSums>(groups) : nullptr;
    to.rounded.scale = arena.take<float>(groups);
    to.rounded.sum = arena.take<float>(groups);
    to.rounded.half = arena.take<float>(groups);
    return to;
}

template <class T> inline void copy_row(T* to, size_t pair, const T* from, size_t token, size_t width) {
    if (to) std::memcpy(to + pair * width, from + token * width, width * sizeof(T));
}

inline void copy_pair(const ExpertsCall& call, const Prepared& from, const Prepared& to, size_t pair) {
    auto token = static_cast<size_t>(call.chosen->token[pair]);
    size_t width = from.stride, groups = from.stride / kGroup;
    copy_row(to.x, pair, from.x, token, width);
    copy_row(to.kept, pair, from.kept, token, width);
    if (!from.rounded.codes) return;
    copy_row(to.rounded.codes, pair, from.rounded.codes, token, width);
    copy_row(to.rounded.fine, pair, from.rounded.fine, token, width);
    copy_row(to.rounded.whole, pair, from.rounded.whole, token, groups);
    copy_row(to.rounded.scale, pair, from.rounded.scale, token, groups);
    copy_row(to.rounded.sum, pair, from.rounded.sum, token, groups);
    copy_row(to.rounded.half, pair, from.rounded.half, token, groups);
}

// The inputs of one part's pairs.
inline Prepared inputs_of(const ExpertsCall& call, const Prepared& pairs, const ExpertPart& part) {
    if (call.tokens == 1) return pairs;
    auto from = [&](auto* rows, size_t width) { return rows ? rows + part.first * width : nullptr; };
    size_t width = pairs.stride, groups = pairs.stride / kGroup;
    const Rounded& all = pairs.rounded;
    Prepared some = pairs;
    some.tokens = part.call.tokens;
    some.x = from(pairs.x, width);
    some.kept = from(pairs.kept, width);
    some.rounded = {from(all.codes, width), from(all.fine, width), from(all.whole, groups), from(all.scale, groups),
                    from(all.sum, groups), from(all.half, groups), all.width};
    return some;
}

// ---- a few tokens ----

struct ExpertsJob {
    const ExpertsCall& call;
    Input in;
    Prepared pairs;
    Slices slices;
    uint8_t* scratch;
    size_t scratch_bytes;
};

// Pieces of a part as work items: units, or kNeurons neurons of a record pack.
inline size_t items_of(const ExpertPart& part) {
    return part.call.up.tiled ? part.call.up.units : part.call.up.vectors() / kNeurons;
}

// Items [first, last) of one part.
inline void stream_part(const ExpertsJob& job, const Prepared& pairs, const ExpertPart& part, size_t first, size_t last,
                        float* sums, uint8_t* scratch) {
    Prepared in = inputs_of(job.call, pairs, part);
    const int32_t* token = job.call.chosen->token + part.first;
    auto out = [&](size_t t) { return sums + static_cast<size_t>(token[t]) * job.slices.stride; };
    for (size_t item = first; item < last; ++item) {
        if (part.call.up.tiled) stream_unit(part.call, in, item, scratch, out);
        else stream_neurons(part.call, in, item * kNeurons, kNeurons, (last - item) * kNeurons, out);
    }
}

// Every part is divided among the same slices, whichever parts the other tokens use: then a token's result has the same
// bits in a step of several tokens as alone. Parts begin in turn with other slices, since the first ones may get more.
inline void experts_slice(const ExpertsJob& job, const Prepared& pairs, size_t slice, uint8_t* scratch) {
    float* sums = job.slices.of(slice);
    size_t count = job.slices.count;
    std::memset(sums, 0, job.slices.tokens * job.slices.stride * sizeof(float));
    for (size_t p = 0; p < job.call.chosen->count; ++p) {
        const ExpertPart& part = job.call.chosen->parts[p];
        size_t items = items_of(part), at = (slice + part.turn) % count;
        stream_part(job, pairs, part, items * at / count, items * (at + 1) / count, sums, scratch);
    }
}

// Return the input of all tokens, after choosing their experts if the call has a router.
inline const Prepared& begin_experts(const ExpertsJob& job, uint8_t* scratch, Team& team) {
    const RoutingCall* routing = job.call.routing;
    if (!routing) return prepare(job.in, Norm{}, nullptr, job.call.hidden, team);
    const Prepared& in = prepare(job.in, routing->norm, routing->x, job.call.hidden, team);
    const Matrix& router = routing->router;
    team.each(row_tasks(router, in), [&](size_t task) {
        row_task(router, in, task, scratch, routing->logits, router.vectors());
    });
    team.sync();
    if (team.index() == 0) routing->choose(routing->context, in);
    team.sync();
    return in;
}

inline void experts_stream_job(const ExpertsJob& job, Team& team) {
    const ExpertsCall& call = job.call;
    uint8_t* scratch = job.scratch + team.index() * job.scratch_bytes;
    const Prepared& in = begin_experts(job, scratch, team);
    if (call.tokens > 1) {
        team.each(call.pairs, [&](size_t pair) { copy_pair(call, in, job.pairs, pair); });
        team.sync();
    }
    const Prepared& pairs = call.tokens > 1 ? job.pairs : in;
    team.each(job.slices.count, [&](size_t slice) { experts_slice(job, pairs, slice, scratch); });
    team.sync();
    team.each(reduce_tasks(job.slices), [&](size_t task) { reduce_task(job.slices, task, call.hidden, call.out); });
}

inline void experts_stream(const ExpertsCall& call, Pool& pool) {
    Arena& arena = pool.arena();
    size_t scratch = round_up(UnitScratch::bytes(call.width, call.tokens), 64);
    Input in = take_input(pool, call.tokens, call.hidden, call.routing ? call.routing->forms : Forms{}, call.prepared);
    ExpertsJob job{call,
                   in,
                   take_pairs(call, in.copies.items[0], arena),
                   take_slices(arena, pool.size(), slices_of(pool.size()), call.tokens, call.hidden),
                   arena.take<uint8_t>(scratch * pool.size()),
                   scratch};
    run_on(pool, experts_stream_job, job);
}

// ---- many tokens ----

struct ScatterJob {
    const ExpertsCall& call;
    const int32_t* token;
    size_t tokens;
    const float* from;  // [tokens, hidden]
};

// All tokens of one part are different, so that no two threads add to the same output.
inline void scatter_job(const ScatterJob& job, Team& team) {
    size_t hidden = job.call.hidden;
    team.each(job.tokens, [&](size_t t) {
        float* to = job.call.out + static_cast<size_t>(job.token[t]) * hidden;
        const float* from = job.from + t * hidden;
        for (size_t i = 0; i < hidden; i += 8)
            store_some(to + i, load_some(to + i, hidden - i) + load_some(from + i, hidden - i), hidden - i);
    });
}

struct CopyJob {
    const ExpertsCall& call;
    Prepared to;
};

inline void experts_each(const ExpertsCall& call, Pool& pool) {
    Arena& arena = pool.arena();
    CopyJob copy{call, take_pairs(call, *call.prepared, arena)};
    run_on<CopyJob>(pool,
        [](const CopyJob& job, Team& team) {
            team.each(job.call.pairs, [&](size_t pair) { copy_pair(job.call, *job.call.prepared, job.to, pair); });
        },
        copy);
    std::memset(call.out, 0, call.tokens * call.hidden * sizeof(float));
    auto* product = arena.take<float>(call.tokens * call.hidden);
    size_t used = arena.used();
    for (size_t p = 0; p < call.chosen->count; ++p) {
        arena.rewind(used);
        const ExpertPart& part = call.chosen->parts[p];
        Prepared in = inputs_of(call, copy.to, part);
        FfnCall one = part.call;
        one.prepared = &in;
        one.out = product;
        ffn(one, pool);
        ScatterJob scatter{call, call.chosen->token + part.first, one.tokens, product};
        run_on(pool, scatter_job, scatter, one.tokens * call.hidden > kOwnValues);
    }
}

inline void experts(const ExpertsCall& call, Pool& pool) {
    if (streams(call.tokens)) experts_stream(call, pool);
    else experts_each(call, pool);
}

}  // namespace
}  // namespace tpi
