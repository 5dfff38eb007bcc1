// Products on the packed bytes of the record layout: vectors of `count` values, one every `stride` bytes, in any
// format. Activations are floats (rounded ones, for quantised rows). `active` lists the vectors to use; null: all.
#if defined(Q8)
#define GROUP_BYTES 34
#elif defined(Q4)
#define GROUP_BYTES 20
#elif defined(Q4S)
#define GROUP_BYTES 18
#endif

// Return four weights of a vector from `at` on, a multiple of 4; zeros past its end.
static inline float4 weights4(Bytes vector, int at, int count) {
#if defined(F32)
    return floats4((Floats)vector, at, count);
#elif defined(BF16)
    global const ushort *values = (global const ushort *)vector + at;
    ushort4 found = 0;
    if (at + 4 <= count) {
        found = vload4(0, values);
    } else {
        if (at < count) found.s0 = values[0];
        if (at + 1 < count) found.s1 = values[1];
        if (at + 2 < count) found.s2 = values[2];
    }
    return as_float4(convert_uint4(found) << 16);
#elif defined(F16)
    global const half *values = (global const half *)vector + at;
    if (at + 4 <= count) return vload_half4(0, values);
    float4 found = 0.0f;
    if (at < count) found.s0 = vload_half(0, values);
    if (at + 1 < count) found.s1 = vload_half(1, values);
    if (at + 2 < count) found.s2 = vload_half(2, values);
    return found;
#else
    if (at >= count) return 0.0f;
    Bytes group = vector + at / GROUP * GROUP_BYTES;
    float scale = half_at(group, 0);
#if defined(Q8)
    return convert_float4(as_char4(vload2(at % GROUP / 4, (global const ushort *)(group + 2)))) * scale;
#else
    Bytes pairs = group + GROUP_BYTES - GROUP / 2;
    uchar4 both = as_uchar4(vload2(at % 16 / 4, (global const ushort *)pairs));
    float4 codes = convert_float4(at % GROUP < 16 ? both & (uchar4)(15) : both >> (uchar4)(4));
#if defined(Q4)
    return codes * scale + half_at(group, 1);
#else
    return (codes - 8.0f) * scale;
#endif
#endif
#endif
}

static inline Bytes vector_at(Bytes data, ulong offset, ulong stride, global const int *active, int index) {
    return data + offset + (active ? active[index] : index) * stride;
}

// ---- a few tokens: TOKENS of them ----

// Rows: one vector per work-group, its values dealt to the work-items in fours. [tokens, vectors]
KERNEL record_rows(Bytes data, ulong offset, ulong stride, int count, global const int *active, int vectors,
                   Floats x, int tokens, global float *out) {
    local float scratch[LANES];
    int index = get_group_id(0), first = get_group_id(1) * TOKENS;
    Bytes vector = vector_at(data, offset, stride, active, index);
    float4 sum[TOKENS];
    for (int t = 0; t < TOKENS; ++t) sum[t] = 0.0f;
    for (int at = 4 * get_local_id(0); at < count; at += 4 * LANES) {
        float4 weights = weights4(vector, at, count);
        for (int t = 0; t < TOKENS; ++t)
            sum[t] += weights * floats4(x + (ulong)min(first + t, tokens - 1) * count, at, count);
    }
    for (int t = 0; t < TOKENS; ++t) {
        float whole = sum_lanes(sum[t].s0 + sum[t].s1 + sum[t].s2 + sum[t].s3, scratch);
        if (get_local_id(0) == 0 && first + t < tokens) out[(ulong)(first + t) * vectors + index] = whole;
    }
}

// Columns: four outputs per work-item, the vectors dealt to `splits` work-groups. [splits, tokens, count]
KERNEL record_columns(Bytes data, ulong offset, ulong stride, int count, global const int *active, int vectors,
                      int splits, Floats x, int tokens, global float *out) {
    int at = 4 * get_global_id(0), split = get_group_id(1), first = get_group_id(2) * TOKENS;
    if (at >= count) return;
    float4 sum[TOKENS];
    for (int t = 0; t < TOKENS; ++t) sum[t] = 0.0f;
    int each = (vectors + splits - 1) / splits, end = min(vectors, (split + 1) * each);
    for (int index = split * each; index < end; ++index) {
        float4 weights = weights4(vector_at(data, offset, stride, active, index), at, count);
        for (int t = 0; t < TOKENS; ++t) sum[t] += weights * x[(ulong)min(first + t, tokens - 1) * vectors + index];
    }
    for (int t = 0; t < TOKENS && first + t < tokens; ++t)
        store4(sum[t], out + ((ulong)split * tokens + first + t) * count, at, count);
}

// Add the splits of `record_columns`, in order.
KERNEL add_splits(Floats partial, int splits, int values, global float *out) {
    int at = get_global_id(0);
    if (at >= values) return;
    float sum = 0.0f;
    for (int split = 0; split < splits; ++split) sum += partial[(ulong)split * values + at];
    out[at] = sum;
}

// ---- a prompt: 32 tokens x 32 outputs a work-group, 32 inputs at a time through local memory ----

#define SIDE 32
#define PITCH (SIDE + 4)  // floats of a row in local memory, so that neighbours in a column lie in different banks

// Rows: an output is a vector; columns: an output is an index into all vectors. [tokens, outputs]
KERNEL record_prompt(Bytes data, ulong offset, ulong stride, int count, global const int *active, int vectors,
                     int columns, Floats x, int tokens, global float *out) {
    local float4 weights[SIDE * PITCH / 4];  // [input][output]
    local float inputs[SIDE * PITCH];        // [input][token]
    local float *single = (local float *)weights;
    int lane = get_local_id(0), column = lane % 8, line = lane / 8;
    int first_output = SIDE * get_group_id(0), first_token = SIDE * get_group_id(1);
    int outputs = columns ? count : vectors, depth = columns ? vectors : count;
    float4 sum[4];  // of four outputs, for each of four tokens
    for (int i = 0; i < 4; ++i) sum[i] = 0.0f;
    for (int base = 0; base < depth; base += SIDE) {
        barrier(CLK_LOCAL_MEM_FENCE);
        for (int i = lane; i < SIDE * SIDE / 4; i += LANES) {
            int four = i % 8 * 4, one = i / 8;
            int index = one + (columns ? base : first_output), at = four + (columns ? first_output : base);
            float4 found = 0.0f, input = 0.0f;
            if (index < vectors) found = weights4(vector_at(data, offset, stride, active, index), at, count);
            local float *to = single + (columns ? one * PITCH + four : four * PITCH + one);
            int step = columns ? 1 : PITCH;
            to[0] = found.s0;
            to[step] = found.s1;
            to[2 * step] = found.s2;
            to[3 * step] = found.s3;
            if (first_token + one < tokens) input = floats4(x + (ulong)(first_token + one) * depth, base + four, depth);
            inputs[four * PITCH + one] = input.s0;
            inputs[(four + 1) * PITCH + one] = input.s1;
            inputs[(four + 2) * PITCH + one] = input.s2;
            inputs[(four + 3) * PITCH + one] = input.s3;
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        for (int k = 0; k < SIDE; ++k)
            for (int i = 0; i < 4; ++i) sum[i] += weights[k * PITCH / 4 + column] * inputs[k * PITCH + line + 8 * i];
    }
    for (int i = 0; i < 4; ++i) {
        int token = first_token + line + 8 * i, output = first_output + 4 * column;
        if (token < tokens) store4(sum[i], out + (ulong)token * outputs, output, outputs);
    }
}
