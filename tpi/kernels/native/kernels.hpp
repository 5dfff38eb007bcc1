// All functions of one instruction set as a table. Each isa_*.cpp includes one simd_*.hpp and this file, so that the
// same text becomes scalar, AVX2, AVX-512 and NEON code. All of it has internal linkage: the linker must never use code
// compiled for one instruction set in place of another's.
#pragma once

#include "experts.hpp"
#include "isa.hpp"
#include "mamba.hpp"

namespace tpi {
namespace {

struct RowsJob {
    const RowsCall& call;
    Input in;
    uint8_t* scratch;
};

inline void rows_job(const RowsJob& job, Team& team) {
    const RowsCall& call = job.call;
    uint8_t* scratch = job.scratch + team.index() * kThreadBytes;
    const Prepared& in = prepare(job.in, Norm{}, call.x, call.matrix.hidden, team);
    team.each(row_tasks(call.matrix, in), [&](size_t task) {
        row_task(call.matrix, in, task, scratch, call.out, call.matrix.vectors());
    });
}

inline void rows(const RowsCall& call, Pool& pool) {
    const Matrix* matrices[] = {&call.matrix};
    RowsJob job{call, take_input(pool, call.tokens, call.matrix.hidden, matrices, 1, call.prepared),
                pool.arena().take<uint8_t>(kThreadBytes * pool.size())};
    run_on(pool, rows_job, job);
}

inline void decode_job(const DecodeCall& call, bool column, Team& team) {
    const Matrix& matrix = call.matrix;
    team.each(call.count, [&](size_t i) {
        size_t vector = call.rows ? static_cast<size_t>(call.rows[i]) : i;
        float* out = call.out + i * matrix.hidden;
        if (matrix.tiled) return tiled_vector(matrix, vector, column, out);
        with_format(matrix.format, [&]<Format F>() { decode_record<F>(matrix.vector(vector), 0, matrix.hidden, out); });
    });
}
constexpr size_t kFewRows = 4;  // rows that are decoded before another thread would be awake

inline void decode_rows(const DecodeCall& call, Pool& pool) {
    run_on<DecodeCall>(pool, [](const DecodeCall& c, Team& team) { decode_job(c, false, team); }, call,
                         call.count > kFewRows);
}
inline void decode_columns(const DecodeCall& call, Pool& pool) {
    run_on<DecodeCall>(pool, [](const DecodeCall& c, Team& team) { decode_job(c, true, team); }, call);
}

inline void norm(const NormCall& call, Pool&) {
    for (size_t t = 0; t < call.tokens; ++t)
        normalise(call.norm, call.x + t * call.hidden, call.hidden, call.out + t * call.hidden);
}

constexpr size_t kReadBytes = 256 * 1024;  // bytes of one task

inline void read_job(const ReadCall& call, Team& team) {
    team.each(call.bytes / kReadBytes, [&](size_t task) {
        const uint8_t* from = call.data + task * kReadBytes;
        F8 acc[4] = {splat(0.0f), splat(0.0f), splat(0.0f), splat(0.0f)};
        for (size_t i = 0; i < kReadBytes; i += 128)
            for (int k = 0; k < 4; ++k) acc[k] = acc[k] + load_bytes(from + i + 32 * k);
        call.sums[team.index()] += sum((acc[0] + acc[1]) + (acc[2] + acc[3]));
    });
}

inline void read(const ReadCall& call, Pool& pool) {
    ReadCall with_sums = call;
    with_sums.sums = pool.arena().take<float>(pool.size());
    for (size_t i = 0; i < pool.size(); ++i) with_sums.sums[i] = 0.0f;
    run_on(pool, read_job, with_sums);
}

constexpr Kernels kTable{kIsaName, prepare_all, attention,   project,        attend, output, conv, delta, mamba,
                         ffn,      experts,     rows,      decode_rows,    decode_columns, norm,   read};

}  // namespace
}  // namespace tpi
