// Attention over paged keys and values with an online softmax: scores are never stored beyond their page of 32
// positions. A work-group has ROWS query rows (heads and tokens of one sequence that share a KV head), with HEAD_DIM
// values per head.
#define DIMS 64  // values of a key that lie in local memory at once
#define PITCH (DIMS + 1)
#define OWN ((HEAD_DIM + LANES - 1) / LANES)  // values of the result for one work-item
#define EACH (ROWS / 2)                       // rows that one work-item scores, at one position of the page

// One work-item per (group, KV head, token): stores keys or values of `heads`, [tokens, kv_heads, HEAD_DIM], in the
// cache. `across` is PAGE_TOKENS for keys, 1 for values.
KERNEL append(global uchar *cache, ulong offset, int across, Floats heads, int kv_heads, int tokens,
              global const int *positions, global const int *sequences, global const int *tables,
              int table_width) {
    int at = get_global_id(0), group = at % KV_GROUPS, kv_head = at / KV_GROUPS % kv_heads;
    int token = at / (KV_GROUPS * kv_heads);
    if (token >= tokens) return;
    ulong row = cache_row(tables, table_width, sequences[token], positions[token], kv_head, kv_heads);
    int place = row % across;
    global uchar *to = cache + offset + (row - place) * VECTOR_BYTES;
    kv_store(to, place, across, group, heads + ((ulong)token * kv_heads + kv_head) * HEAD_DIM);
}

// Attended positions are first..last; none if last is below first.
typedef struct { int first, last; } Span;

static inline Span span_of(int position, int window, int from, int to) {
    Span span = {window && position + 1 > window ? position + 1 - window : 0, position};
    span.first = max(span.first, from);
    span.last = min(span.last, to);
    return span;
}

// Load a page of keys piece by piece through local memory; set `found` to EACH rows' products with the key at this
// position.
static inline void score_page(Bytes page, int have, local const float *queries, local float *keys, float *found) {
    int lane = get_local_id(0), place = lane % PAGE_TOKENS, parity = lane / PAGE_TOKENS;
    for (int j = 0; j < EACH; ++j) found[j] = 0.0f;
    for (int piece = 0; piece < HEAD_DIM; piece += DIMS) {
        barrier(CLK_LOCAL_MEM_FENCE);
        for (int i = lane; i < PAGE_TOKENS * DIMS; i += LANES) {
            int one = i % PAGE_TOKENS, dim = piece + i / PAGE_TOKENS;
            bool there = one < have && dim < HEAD_DIM;
            keys[one * PITCH + i / PAGE_TOKENS] = there ? kv_value(page, one, PAGE_TOKENS, dim) : 0.0f;
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        for (int d = 0; d < min(DIMS, HEAD_DIM - piece); ++d)
            for (int j = 0; j < EACH; ++j)
                found[j] += keys[place * PITCH + d] * queries[(2 * j + parity) * HEAD_DIM + piece + d];
    }
}

// One work-group per (task, chunk of `chunk` positions). A task is (first row, rows, KV head, sequence); a row is token
// * heads + head. Writes for each row in its chunk: HEAD_DIM sums, the largest score, the total weight.
KERNEL attend(Floats queries, Bytes keys, ulong key_offset, Bytes values, ulong value_offset,
              global const int4 *tasks, global const int *rows, global const int *positions,
              global const int *tables, int table_width, int heads, int kv_heads, float scale, float softcap,
              int window, int chunk, global float *partial) {
    local float query[ROWS * HEAD_DIM], page_keys[PAGE_TOKENS * PITCH], score[ROWS * PAGE_TOKENS];
    local float most[ROWS], total[ROWS], factor[ROWS];
    local int first_of[ROWS], last_of[ROWS];
    int lane = get_local_id(0), place = lane % PAGE_TOKENS, parity = lane / PAGE_TOKENS;
    int4 task = tasks[get_group_id(0)];
    int from = get_group_id(1) * chunk, chunks = get_num_groups(1);
    for (int i = lane; i < ROWS * HEAD_DIM; i += LANES) {
        int row = i / HEAD_DIM;
        query[i] = row < task.s1 ? queries[(ulong)rows[task.s0 + row] * HEAD_DIM + i % HEAD_DIM] : 0.0f;
    }
    if (lane < ROWS) {
        Span span = {0, -1};
        if (lane < task.s1) span = span_of(positions[rows[task.s0 + lane] / heads], window, from, from + chunk - 1);
        first_of[lane] = span.first;
        last_of[lane] = span.last;
        most[lane] = -INFINITY;
        total[lane] = 0.0f;
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    int first = INT_MAX, last = -1;
    for (int row = 0; row < ROWS; ++row) {
        if (last_of[row] < first_of[row]) continue;
        first = min(first, first_of[row]);
        last = max(last, last_of[row]);
    }
    float mixed[ROWS * OWN];
    for (int i = 0; i < ROWS * OWN; ++i) mixed[i] = 0.0f;
    for (int base = first / PAGE_TOKENS * PAGE_TOKENS; base <= last; base += PAGE_TOKENS) {
        int have = min(PAGE_TOKENS, last + 1 - base);
        ulong at = cache_row(tables, table_width, task.s3, base, task.s2, kv_heads) * VECTOR_BYTES;
        float found[EACH];
        score_page(keys + key_offset + at, have, query, page_keys, found);
        for (int j = 0; j < EACH; ++j) {
            int row = 2 * j + parity, position = base + place;
            float one = found[j] * scale;
            if (softcap > 0.0f) one = softcap * tanh(one / softcap);
            bool seen = position >= first_of[row] && position <= last_of[row];
            score[row * PAGE_TOKENS + place] = seen ? one : -INFINITY;
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        if (lane < ROWS) {
            float high = most[lane];
            for (int i = 0; i < PAGE_TOKENS; ++i) high = fmax(high, score[lane * PAGE_TOKENS + i]);
            factor[lane] = most[lane] == -INFINITY ? 0.0f : exp(most[lane] - high);
            most[lane] = high;
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        for (int i = lane; i < ROWS * PAGE_TOKENS; i += LANES)
            score[i] = score[i] == -INFINITY ? 0.0f : exp(score[i] - most[i / PAGE_TOKENS]);
        barrier(CLK_LOCAL_MEM_FENCE);
        if (lane < ROWS) {
            float sum = 0.0f;
            for (int i = 0; i < PAGE_TOKENS; ++i) sum += score[lane * PAGE_TOKENS + i];
            total[lane] = total[lane] * factor[lane] + sum;
        }
        for (int j = 0; j < OWN; ++j) {
            int dim = lane + LANES * j;
            if (dim >= HEAD_DIM) continue;
            for (int row = 0; row < ROWS; ++row) mixed[row * OWN + j] *= factor[row];
            for (int i = 0; i < have; ++i) {
                float value = kv_value(values + value_offset + at + (ulong)i * VECTOR_BYTES, 0, 1, dim);
                for (int row = 0; row < ROWS; ++row) mixed[row * OWN + j] += score[row * PAGE_TOKENS + i] * value;
            }
        }
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    for (int row = 0; row < task.s1; ++row) {
        global float *to = partial + ((ulong)(task.s0 + row) * chunks + get_group_id(1)) * (HEAD_DIM + 2);
        for (int j = 0; j < OWN; ++j)
            if (lane + LANES * j < HEAD_DIM) to[lane + LANES * j] = mixed[row * OWN + j];
        if (lane == 0) {
            to[HEAD_DIM] = most[row];
            to[HEAD_DIM + 1] = total[row];
        }
    }
}

// One work-group per row: merges its chunks into [tokens, stride].
KERNEL merge_chunks(Floats partial, int chunks, global const int *rows, int heads, int stride,
                    global float *out) {
    int lane = get_local_id(0), row = rows[get_group_id(0)];
    Floats parts = partial + (ulong)get_group_id(0) * chunks * (HEAD_DIM + 2);
    float most = -INFINITY, total = 0.0f;
    for (int i = 0; i < chunks; ++i) most = fmax(most, parts[i * (HEAD_DIM + 2) + HEAD_DIM]);
    for (int i = 0; i < chunks; ++i) {
        Floats part = parts + i * (HEAD_DIM + 2) + HEAD_DIM;
        if (part[1] > 0.0f) total += exp(part[0] - most) * part[1];
    }
    for (int dim = lane; dim < HEAD_DIM; dim += LANES) {
        float sum = 0.0f;
        for (int i = 0; i < chunks; ++i) {
            Floats part = parts + i * (HEAD_DIM + 2);
            if (part[HEAD_DIM + 1] > 0.0f) sum += exp(part[HEAD_DIM] - most) * part[dim];
        }
        out[(ulong)(row / heads) * stride + row % heads * HEAD_DIM + dim] = sum / total;
    }
}
