// The states of heads in DeltaNet and Mamba2 blocks: token by token, or in chunks of tokens as matrix products.
//
// A chunk is the WY form of the recurrence (Yang et al. 2024, arXiv:2406.06484 and 2412.06464): with the state S0 before
// it, decays d, and g[t][j] = d[j+1] ... d[t], the changes u of its tokens solve a triangular system:
//
//     u[t] = b[t] (v[t] - g[t][-1] S0 k[t] - sum over j < t of g[t][j] (k[j] k[t]) u[j])
//     out[t] = g[t][-1] S0 q[t] + sum over j <= t of g[t][j] (k[j] q[t]) u[j]
//     S = g[n-1][-1] S0 + sum over j of g[n-1][j] k[j] u[j]
//
// In Mamba2, u[t] = b[t] v[t] (Dao and Gu 2024, arXiv:2405.21060, section 6).
#pragma once

#include "wide.hpp"

namespace tpi {
namespace {

constexpr size_t kChunkTokens = 32;
constexpr size_t kLeastChunked = kStreamTokens + 1;  // fewer tokens of a sequence are computed one by one
constexpr size_t kStateColumns = 64;       // columns of a state that a token updates at once, in registers
constexpr size_t kStatePanel = 2 * kWide;  // columns of a state that a chunk updates at once
constexpr size_t kRowsAtOnce = kWide == 16 ? 8 : 4;  // of a product, in registers
static_assert(kChunkTokens % kStatePanel == 0);

// One head's tokens in a sequence, and its state. Vectors of a token are `*_stride` values apart.
struct HeadTokens {
    size_t count, key, value;             // tokens; values of a key, and of a row of the state
    const float *q, *k, *v;
    float* out;
    const float *decay, *beta;            // [count], `gate_stride` apart
    size_t key_stride, value_stride, gate_stride;
    bool erases;  // the delta rule: a change depends on what the key reads
};

// ---- token by token ----

// Update `Lanes` * kWide columns of a state for one token, and write what the head reads.
template <size_t Lanes, bool Erases>
inline void update_columns(float* state, size_t stride, size_t rows, const float* q, const float* k, const float* v,
                           float decay, float beta, float* out) {
    Wide change[Lanes], read[Lanes];
    for (size_t l = 0; l < Lanes; ++l) change[l] = read[l] = wide(0.0f);
    for (size_t i = 0; Erases && i < rows; ++i) {
        Wide weight = wide(k[i]);
        for (size_t l = 0; l < Lanes; ++l) change[l] = fma(weight, wide_floats(state + i * stride + l * kWide), change[l]);
    }
    Wide seen = wide(-beta * decay), strength = wide(beta), factor = wide(decay);
    for (size_t l = 0; l < Lanes; ++l) change[l] = fma(seen, change[l], strength * wide_floats(v + l * kWide));
    for (size_t i = 0; i < rows; ++i) {
        float* row = state + i * stride;
        Wide weight = wide(k[i]), query = wide(q[i]);
        for (size_t l = 0; l < Lanes; ++l) {
            Wide value = fma(weight, change[l], factor * wide_floats(row + l * kWide));
            read[l] = fma(query, value, read[l]);
            store(row + l * kWide, value);
        }
    }
    for (size_t l = 0; l < Lanes; ++l) store(out + l * kWide, read[l]);
}

// The same for one column.
template <bool Erases>
inline void update_column(float* state, size_t stride, size_t rows, const float* q, const float* k, float v,
                          float decay, float beta, float* out) {
    float seen = 0.0f, read = 0.0f;
    for (size_t i = 0; Erases && i < rows; ++i) seen += k[i] * state[i * stride];
    float change = beta * (v - decay * seen);
    for (size_t i = 0; i < rows; ++i) read += q[i] * (state[i * stride] = decay * state[i * stride] + k[i] * change);
    *out = read;
}

// All tokens, for `count` columns from `first` on.
template <bool Erases>
inline void update_each(const HeadTokens& head, float* state, size_t first, size_t count) {
    for (size_t t = 0; t < head.count; ++t) {
        const float *q = head.q + t * head.key_stride, *k = head.k + t * head.key_stride;
        const float* v = head.v + t * head.value_stride + first;
        float* out = head.out + t * head.value_stride + first;
        float decay = head.decay[t * head.gate_stride], beta = head.beta[t * head.gate_stride];
        size_t c = 0;
        for (; c + kStateColumns <= count; c += kStateColumns)
            update_columns<kStateColumns / kWide, Erases>(state + first + c, head.value, head.key, q, k, v + c, decay, beta,
                                                          out + c);
        for (; c + kWide <= count; c += kWide)
            update_columns<1, Erases>(state + first + c, head.value, head.key, q, k, v + c, decay, beta, out + c);
        for (; c < count; ++c)
            update_column<Erases>(state + first + c, head.value, head.key, q, k, v[c], decay, beta, out + c);
    }
}

// ---- in chunks ----

// A block of rows of a product, in registers.
template <size_t Rows> struct Block {
    Wide at[Rows][2];

    // Add sum over i < count of a[r * row + i * step] * b[i * kStatePanel + column] for each row r.
    void add(const float* a, size_t row, size_t step, const float* b, size_t count) {
        for (size_t i = 0; i < count; ++i) {
            Wide first = wide_floats(b + i * kStatePanel), second = wide_floats(b + i * kStatePanel + kWide);
            for (size_t r = 0; r < Rows; ++r) {
                Wide factor = wide(a[r * row + i * step]);
                at[r][0] = fma(factor, first, at[r][0]);
                at[r][1] = fma(factor, second, at[r][1]);
            }
        }
    }
};

// The tokens of a chunk, padded with zeros; and what its columns share.
struct Chunk {
    float *q, *k;   // [kChunkTokens, key]
    float* turned;  // k transposed, in panels of [key, kStatePanel]
    float inner[kChunkTokens * kChunkTokens];  // [t][j]: -b[t] g[t][j] (k[j] k[t]) for j < t
    float outer[kChunkTokens * kChunkTokens];  // [t][j]: g[t][j] (k[j] q[t]) for j <= t, else 0
    float since[kChunkTokens];                 // g[t][-1]
    float until[kChunkTokens];                 // g[n - 1][t]
    float beta[kChunkTokens];
};

constexpr size_t chunk_values(size_t key) { return 3 * kChunkTokens * key; }

// products[t][j] = sum over i of a[t][i] turned[i][j]
inline void multiply_turned(const float* a, const Chunk& chunk, size_t key, float* products) {
    for (size_t t = 0; t < kChunkTokens; t += kRowsAtOnce)
        for (size_t j = 0; j < kChunkTokens; j += kStatePanel) {
            Block<kRowsAtOnce> sums;
            for (auto& row : sums.at) row[0] = row[1] = wide(0.0f);
            sums.add(a + t * key, key, 1, chunk.turned + j * key, key);
            for (size_t r = 0; r < kRowsAtOnce; ++r)
                for (size_t l = 0; l < 2; ++l) store(products + (t + r) * kChunkTokens + j + l * kWide, sums.at[r][l]);
        }
}

// Copy the queries and keys of `count` tokens from `first` on, and pad them with zeros.
inline void copy_tokens(const HeadTokens& head, size_t first, size_t count, Chunk& chunk) {
    size_t key = head.key;
    for (size_t t = 0; t < kChunkTokens; ++t) {
        for (auto [from, to] : {std::pair{head.q, chunk.q}, std::pair{head.k, chunk.k}}) {
            if (t < count) std::memcpy(to + t * key, from + (first + t) * head.key_stride, key * sizeof(float));
            else std::memset(to + t * key, 0, key * sizeof(float));
        }
        float* turned = chunk.turned + t / kStatePanel * kStatePanel * key + t % kStatePanel;
        for (size_t i = 0; i < key; ++i) turned[i * kStatePanel] = chunk.k[t * key + i];
    }
}

// Take `count` tokens from `first` on.
inline void fill_chunk(const HeadTokens& head, size_t first, size_t count, Chunk& chunk) {
    copy_tokens(head, first, count, chunk);
    if (head.erases) multiply_turned(chunk.k, chunk, head.key, chunk.inner);
    multiply_turned(chunk.q, chunk, head.key, chunk.outer);
    float* faded = chunk.until;  // g[t][j] of the latest token t
    for (size_t t = 0; t < kChunkTokens; ++t) {
        float decay = t < count ? head.decay[(first + t) * head.gate_stride] : 1.0f;
        float beta = t < count ? head.beta[(first + t) * head.gate_stride] : 0.0f;
        chunk.beta[t] = beta;
        chunk.since[t] = t ? chunk.since[t - 1] * decay : decay;
        for (size_t j = 0; j < t; ++j) faded[j] *= decay;
        faded[t] = 1.0f;
        float *inner = chunk.inner + t * kChunkTokens, *outer = chunk.outer + t * kChunkTokens;
        for (size_t j = 0; head.erases && j < t; ++j) inner[j] *= -beta * faded[j];
        for (size_t j = 0; j <= t; ++j) outer[j] *= faded[j];
        for (size_t j = t + 1; j < kChunkTokens; ++j) outer[j] = 0.0f;
    }
}

// The columns of a panel of the state, for the tokens of a chunk.
struct Panel {
    const HeadTokens& head;
    const Chunk& chunk;
    size_t first, count;  // tokens
    size_t column;        // its first, in the head's values
    float* state;         // [key, kStatePanel]
    float* changes;       // [kChunkTokens, kStatePanel]
};

// Set to the products of some rows of `a`, [tokens, key], with the state.
inline Block<kRowsAtOnce> seen_by(const Panel& panel, const float* a) {
    Block<kRowsAtOnce> sums;
    for (auto& row : sums.at) row[0] = row[1] = wide(0.0f);
    sums.add(a, panel.head.key, 1, panel.state, panel.head.key);
    return sums;
}

// Compute the changes of kRowsAtOnce tokens from `t` on; those before are complete.
inline void solve_rows(const Panel& panel, size_t t) {
    const Chunk& chunk = panel.chunk;
    const bool erases = panel.head.erases;
    Block<kRowsAtOnce> rows;
    if (erases) rows = seen_by(panel, chunk.k + t * panel.head.key);
    for (size_t r = 0; r < kRowsAtOnce; ++r) {
        size_t token = t + r < panel.count ? t + r : panel.count - 1;  // beta is 0 beyond
        const float* v = panel.head.v + (panel.first + token) * panel.head.value_stride + panel.column;
        Wide strength = wide(chunk.beta[t + r]), seen = wide(-chunk.beta[t + r] * chunk.since[t + r]);
        for (size_t l = 0; l < 2; ++l) {
            Wide change = strength * wide_floats(v + l * kWide);
            rows.at[r][l] = erases ? fma(seen, rows.at[r][l], change) : change;
        }
    }
    if (erases) rows.add(chunk.inner + t * kChunkTokens, kChunkTokens, 1, panel.changes, t);
    for (size_t r = 0; r < kRowsAtOnce; ++r)
        for (size_t l = 0; l < 2; ++l) {
            for (size_t j = 0; erases && j < r; ++j)
                rows.at[r][l] = fma(wide(chunk.inner[(t + r) * kChunkTokens + t + j]), rows.at[j][l], rows.at[r][l]);
            store(panel.changes + (t + r) * kStatePanel + l * kWide, rows.at[r][l]);
        }
}

// Write what kRowsAtOnce tokens from `t` on read; their changes are complete.
inline void read_rows(const Panel& panel, size_t t) {
    const Chunk& chunk = panel.chunk;
    Block<kRowsAtOnce> rows = seen_by(panel, chunk.q + t * panel.head.key);
    for (size_t r = 0; r < kRowsAtOnce; ++r)
        for (size_t l = 0; l < 2; ++l) rows.at[r][l] = wide(chunk.since[t + r]) * rows.at[r][l];
    rows.add(chunk.outer + t * kChunkTokens, kChunkTokens, 1, panel.changes, t + kRowsAtOnce);
    for (size_t r = 0; r < kRowsAtOnce && t + r < panel.count; ++r) {
        float* out = panel.head.out + (panel.first + t + r) * panel.head.value_stride + panel.column;
        for (size_t l = 0; l < 2; ++l) store(out + l * kWide, rows.at[r][l]);
    }
}

// Apply the changes, which are faded already, to `Rows` rows of the state from `i` on.
template <size_t Rows> inline void change_rows(const Panel& panel, size_t i) {
    float* state = panel.state + i * kStatePanel;
    Wide kept = wide(panel.chunk.since[panel.count - 1]);
    Block<Rows> rows;
    for (size_t r = 0; r < Rows; ++r)
        for (size_t l = 0; l < 2; ++l) rows.at[r][l] = kept * wide_floats(state + r * kStatePanel + l * kWide);
    rows.add(panel.chunk.k + i, 1, panel.head.key, panel.changes, panel.count);
    for (size_t r = 0; r < Rows; ++r)
        for (size_t l = 0; l < 2; ++l) store(state + r * kStatePanel + l * kWide, rows.at[r][l]);
}

inline void update_panel(const Panel& panel) {
    size_t i = 0;
    for (size_t t = 0; t < panel.count; t += kRowsAtOnce) solve_rows(panel, t);
    for (size_t t = 0; t < panel.count; t += kRowsAtOnce) read_rows(panel, t);
    for (size_t t = 0; t < panel.count; ++t)
        for (size_t l = 0; l < 2; ++l) {
            float* at = panel.changes + t * kStatePanel + l * kWide;
            store(at, wide(panel.chunk.until[t]) * wide_floats(at));
        }
    for (; i + kRowsAtOnce <= panel.head.key; i += kRowsAtOnce) change_rows<kRowsAtOnce>(panel, i);
    for (; i < panel.head.key; ++i) change_rows<1>(panel, i);
}

// Values of scratch for `update_chunks`.
constexpr size_t chunked_values(size_t key, size_t columns) { return chunk_values(key) + key * columns; }

// Copy `panels` panels of columns of a state from or to a copy in which the rows of each panel are adjacent.
inline void copy_panels(const HeadTokens& head, float* state, float* copy, size_t panels, bool back) {
    for (size_t p = 0; p < panels; ++p)
        for (size_t i = 0; i < head.key; ++i) {
            float *row = state + i * head.value + p * kStatePanel, *own = copy + (p * head.key + i) * kStatePanel;
            std::memcpy(back ? row : own, back ? own : row, kStatePanel * sizeof(float));
        }
}

// All tokens, for `panels` panels of columns from `first` on.
inline void update_chunks(const HeadTokens& head, float* state, size_t first, size_t panels, float* scratch) {
    Chunk chunk;
    float changes[kChunkTokens * kStatePanel];
    chunk.q = scratch;
    chunk.k = chunk.q + kChunkTokens * head.key;
    chunk.turned = chunk.k + kChunkTokens * head.key;
    float* copy = chunk.turned + kChunkTokens * head.key;
    copy_panels(head, state + first, copy, panels, false);
    for (size_t t = 0; t < head.count; t += kChunkTokens) {
        size_t count = head.count - t < kChunkTokens ? head.count - t : kChunkTokens;
        fill_chunk(head, t, count, chunk);
        for (size_t p = 0; p < panels; ++p)
            update_panel({head, chunk, t, count, first + p * kStatePanel, copy + p * head.key * kStatePanel, changes});
    }
    copy_panels(head, state + first, copy, panels, true);
}

// All tokens, for `count` columns from `first` on. `scratch` has `chunked_values` values.
inline void update_head(const HeadTokens& head, float* state, size_t first, size_t count, float* scratch) {
    size_t panels = head.count < kLeastChunked ? 0 : count / kStatePanel;
    if (panels) update_chunks(head, state, first, panels, scratch);
    size_t rest = first + panels * kStatePanel, left = count - panels * kStatePanel;
    if (head.erases) update_each<true>(head, state, rest, left);
    else update_each<false>(head, state, rest, left);
}

}  // namespace
}  // namespace tpi
