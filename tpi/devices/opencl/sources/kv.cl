// One vector of keys or values in each format of the cache, HEAD_DIM values: how a value is read, and a group written.
// A format is a name that is defined (KV_F32, KV_F16, KV_Q8), the bytes of a vector, and these two functions.
#define KV_GROUPS ((HEAD_DIM + GROUP - 1) / GROUP)
#if defined(KV_F32)
#define VECTOR_BYTES (4 * HEAD_DIM)
#elif defined(KV_F16)
#define VECTOR_BYTES (2 * HEAD_DIM)
#elif defined(KV_Q8)  // codes, then a float16 scale per 32 of them
#define VECTOR_BYTES (HEAD_DIM + 2 * KV_GROUPS)
#endif

static inline float kv_value(Bytes vector, int dim) {
#if defined(KV_F32)
    return ((Floats)vector)[dim];
#elif defined(KV_F16)
    return half_at(vector, dim);
#elif defined(KV_Q8)
    return ((global const char *)vector)[dim] * half_at(vector + HEAD_DIM, dim / GROUP);
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
#endif
}

// The vector of the cache for a position of a sequence.
static inline ulong cache_row(global const int *tables, int table_width, int sequence, int position, int kv_head,
                              int kv_heads) {
    ulong page = tables[sequence * table_width + position / PAGE_TOKENS];
    return (page * kv_heads + kv_head) * PAGE_TOKENS + position % PAGE_TOKENS;
}
