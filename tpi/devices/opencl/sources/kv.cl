// One vector of keys or values, HEAD_DIM values, in each format of the cache: reading a value, and writing a group. A
// format is defined by a name (KV_F32, KV_F16, KV_Q8, KV_Q4), the bytes of a vector, and the two functions.
#define KV_GROUPS ((HEAD_DIM + GROUP - 1) / GROUP)
#if defined(KV_F32)
#define VECTOR_BYTES (4 * HEAD_DIM)
#elif defined(KV_F16)
#define VECTOR_BYTES (2 * HEAD_DIM)
#elif defined(KV_Q8)  // codes, then a float16 scale per 32 codes
#define VECTOR_BYTES (HEAD_DIM + 2 * KV_GROUPS)
#elif defined(KV_Q4)  // 16 codes per 8 bytes, with i and i + 8 in one byte; then float16 scale and minimum per 32
#define CODE_BYTES ((HEAD_DIM + 15) / 16 * 8)
#define VECTOR_BYTES (CODE_BYTES + 4 * KV_GROUPS)
#endif

static inline float kv_value(Bytes vector, int dim) {
#if defined(KV_F32)
    return ((Floats)vector)[dim];
#elif defined(KV_F16)
    return half_at(vector, dim);
#elif defined(KV_Q8)
    return ((global const char *)vector)[dim] * half_at(vector + HEAD_DIM, dim / GROUP);
#elif defined(KV_Q4)
    int code = vector[dim / 16 * 8 + dim % 8] >> (dim & 8) / 2 & 15;
    return code * half_at(vector + CODE_BYTES, dim / GROUP * 2) + half_at(vector + CODE_BYTES, dim / GROUP * 2 + 1);
#endif
}

// Store group `group` of a head.
static inline void kv_store(global uchar *vector, int group, Floats head) {
    int first = group * GROUP, end = min(first + GROUP, HEAD_DIM);
#if defined(KV_F32)
    for (int d = first; d < end; ++d) ((global float *)vector)[d] = head[d];
#elif defined(KV_F16)
    for (int d = first; d < end; ++d) vstore_half_rte(head[d], d, (global half *)vector);
#elif defined(KV_Q8)
    float largest = 0.0f;
    for (int d = first; d < end; ++d) largest = fmax(largest, fabs(head[d]));
    vstore_half_rte(largest / 127.0f, group, (global half *)(vector + HEAD_DIM));
    float scale = half_at(vector + HEAD_DIM, group), inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
    for (int d = first; d < end; ++d) {
        char code = convert_char(clamp(rint(head[d] * inverse), -127.0f, 127.0f));
        vector[d] = as_uchar(code);
    }
#elif defined(KV_Q4)
    float least = head[first], most = head[first];
    for (int d = first + 1; d < end; ++d) {
        least = fmin(least, head[d]);
        most = fmax(most, head[d]);
    }
    vstore_half_rte((most - least) / 15.0f, 2 * group, (global half *)(vector + CODE_BYTES));
    vstore_half_rte(least, 2 * group + 1, (global half *)(vector + CODE_BYTES));
    float scale = half_at(vector + CODE_BYTES, 2 * group), inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
    float base = half_at(vector + CODE_BYTES, 2 * group + 1);
    for (int run = first; run < end; run += 16)
        for (int i = 0; i < 8; ++i) {
            int low = run + i < end ? (int)clamp(rint((head[run + i] - base) * inverse), 0.0f, 15.0f) : 0;
            int high = run + i + 8 < end ? (int)clamp(rint((head[run + i + 8] - base) * inverse), 0.0f, 15.0f) : 0;
            vector[run / 2 + i] = (uchar)(low | high << 4);
        }
#endif
}

// Keys in q4, and the queries that meet them, are transformed (`tpi.kernels.paged.hadamard_rotate`). One work-item per (group, head);
// `heads` heads of HEAD_DIM values each.
KERNEL spread(Floats from, int heads, global float *to) {
    int at = get_global_id(0), first = at % KV_GROUPS * GROUP;
    if (at / KV_GROUPS >= heads) return;
    float values[GROUP];
    int count = min(GROUP, HEAD_DIM - first);
    from += (ulong)(at / KV_GROUPS) * HEAD_DIM + first;
    to += (ulong)(at / KV_GROUPS) * HEAD_DIM + first;
    for (int i = 0; i < count; ++i) values[i] = from[i];
    for (int reach = count < GROUP ? 0 : GROUP / 2; reach; reach /= 2)
        for (int i = 0; i < GROUP; ++i) {
            if (i & reach) continue;
            float one = values[i], other = values[i + reach];
            values[i] = one + other;
            values[i + reach] = one - other;
        }
    for (int i = 0; i < count; ++i) to[i] = count < GROUP ? values[i] : values[i] * 0.17677669529663689f;
}

// Return the cached vector for a position of a sequence.
static inline ulong cache_row(global const int *tables, int table_width, int sequence, int position, int kv_head,
                              int kv_heads) {
    ulong page = tables[sequence * table_width + position / PAGE_TOKENS];
    return (page * kv_heads + kv_head) * PAGE_TOKENS + position % PAGE_TOKENS;
}
