// One vector of keys or values, HEAD_DIM values, in each format of the cache: reading a value, and writing a group. A
// format is defined by a name (KV_F32, KV_F16, KV_Q8, KV_Q4), the bytes of a vector, and the two functions.
// `tpi.kernels.kv.KvPages` says how each format stores a vector. A vector is given by `from`, `token` and `across`. For
// values, `from` is the vector, `token` is 0 and `across` 1. For keys, which lie transposed, `from` is the page of one
// head, `token` is the number of the token in it, and `across` is PAGE_TOKENS.
#define KV_GROUPS ((HEAD_DIM + GROUP - 1) / GROUP)
#if defined(KV_F32)
#define VECTOR_BYTES (4 * HEAD_DIM)
#elif defined(KV_F16)
#define VECTOR_BYTES (2 * HEAD_DIM)
#elif defined(KV_Q8)
#define CODE_BYTES ((HEAD_DIM + 3) / 4 * 4)
#define VECTOR_BYTES (CODE_BYTES + 2 * KV_GROUPS)
#elif defined(KV_Q4)
#define CODE_BYTES ((HEAD_DIM + 15) / 16 * 8)
#define VECTOR_BYTES (CODE_BYTES + 4 * KV_GROUPS)
#endif

// Return the place of element `at`, if units of `unit` elements stay together.
static inline int kv_place(int at, int unit, int token, int across) {
    return at / unit * unit * across + token * unit + at % unit;
}

static inline float kv_value(Bytes from, int token, int across, int dim) {
#if defined(KV_F32)
    return ((Floats)from)[kv_place(dim, 1, token, across)];
#elif defined(KV_F16)
    return half_at(from, kv_place(dim, 1, token, across));
#elif defined(KV_Q8)
    float scale = half_at(from + CODE_BYTES * across, kv_place(dim / GROUP, 1, token, across));
    return ((global const char *)from)[kv_place(dim, 4, token, across)] * scale;
#elif defined(KV_Q4)
    Bytes factors = from + CODE_BYTES * across;
    int code = from[kv_place(dim / 16 * 8 + dim % 8, 4, token, across)] >> (dim & 8) / 2 & 15;
    return code * half_at(factors, kv_place(dim / GROUP * 2, 1, token, across)) +
           half_at(factors, kv_place(dim / GROUP * 2 + 1, 1, token, across));
#endif
}

// Store group `group` of a head.
static inline void kv_store(global uchar *to, int token, int across, int group, Floats head) {
    int first = group * GROUP, end = min(first + GROUP, HEAD_DIM);
#if defined(KV_F32)
    for (int d = first; d < end; ++d) ((global float *)to)[kv_place(d, 1, token, across)] = head[d];
#elif defined(KV_F16)
    for (int d = first; d < end; ++d) vstore_half_rte(head[d], kv_place(d, 1, token, across), (global half *)to);
#elif defined(KV_Q8)
    float largest = 0.0f;
    for (int d = first; d < end; ++d) largest = fmax(largest, fabs(head[d]));
    global uchar *factors = to + CODE_BYTES * across;
    int place = kv_place(group, 1, token, across);
    vstore_half_rte(largest / 127.0f, place, (global half *)factors);
    float scale = half_at(factors, place), inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
    for (int d = first; d < min(first + GROUP, CODE_BYTES); ++d) {
        char code = d < end ? convert_char(clamp(rint(head[d] * inverse), -127.0f, 127.0f)) : 0;
        to[kv_place(d, 4, token, across)] = as_uchar(code);
    }
#elif defined(KV_Q4)
    float least = head[first], most = head[first];
    for (int d = first + 1; d < end; ++d) {
        least = fmin(least, head[d]);
        most = fmax(most, head[d]);
    }
    global uchar *factors = to + CODE_BYTES * across;
    int at = kv_place(2 * group, 1, token, across), next = kv_place(2 * group + 1, 1, token, across);
    vstore_half_rte((most - least) / 15.0f, at, (global half *)factors);
    vstore_half_rte(least, next, (global half *)factors);
    float scale = half_at(factors, at), inverse = scale > 0.0f ? 1.0f / scale : 0.0f, base = half_at(factors, next);
    for (int run = first; run < end; run += 16)
        for (int i = 0; i < 8; ++i) {
            int low = run + i < end ? (int)clamp(rint((head[run + i] - base) * inverse), 0.0f, 15.0f) : 0;
            int high = run + i + 8 < end ? (int)clamp(rint((head[run + i + 8] - base) * inverse), 0.0f, 15.0f) : 0;
            to[kv_place(run / 2 + i, 4, token, across)] = (uchar)(low | high << 4);
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
