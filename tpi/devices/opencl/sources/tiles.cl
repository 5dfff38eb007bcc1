// Products on the packed squares of the tiled layout (formats.cl). Activations are int8.

// The place of squares: rows of a unit are outputs (`per_output` blocks of 8 per unit), columns inputs (`per_input`
// groups).
typedef struct {
    ulong offset, unit_bytes, block_bytes;
    int per_output, per_input;
} Squares;

static inline Bytes outputs_at(Bytes data, Squares to, int block) {
    int unit = to.per_output ? block / to.per_output : 0;
    int inside = to.per_output ? block % to.per_output : block;
    return data + to.offset + unit * to.unit_bytes + inside * to.block_bytes;
}

static inline Bytes square_at(Bytes outputs, Squares to, int group) {
    int unit = to.per_input ? group / to.per_input : 0;
    int inside = to.per_input ? group % to.per_input : group;
    return outputs + unit * to.unit_bytes + (ulong)inside * SQUARE;
}

#define ONES ((int4)(0x01010101))

// ---- a few tokens: TOKENS of them, 8 outputs a work-group, each group of 32 inputs by one work-item of 8 ----

KERNEL tile_vectors(Bytes data, ulong offset, ulong unit_bytes, ulong block_bytes, int per_output, int per_input,
                    int groups, global const int4 *codes, global const int4 *fine, Floats scales, Floats sums,
                    int tokens, global float *out) {
    local float partial[TOKENS * LANES];
    int lane = get_local_id(0), output = lane % 8, first = get_group_id(1) * TOKENS;
    int outputs = 8 * get_num_groups(0);
    Squares to = {offset, unit_bytes, block_bytes, per_output, per_input};
    Bytes row = outputs_at(data, to, get_group_id(0));
    float sum[TOKENS];
    for (int t = 0; t < TOKENS; ++t) sum[t] = 0.0f;
    for (int group = lane / 8; group < groups; group += LANES / 8) {
        Bytes square = square_at(row, to, group);
        int4 first_half, second_half;
        codes_of(square, output, &first_half, &second_half);
        float scale = scale_of(square, output, 0), minimum = minimum_of(square, output, 0);
#if defined(HALVES)
        float other_scale = scale_of(square, output, 1), other_minimum = minimum_of(square, output, 1);
#endif
        for (int t = 0; t < TOKENS; ++t) {
            int at = min(first + t, tokens - 1) * groups + group;
#if defined(HALVES)
            float product = scale * dot16(first_half, codes[2 * at]);
            product += other_scale * dot16(second_half, codes[2 * at + 1]);
#if defined(MINIMA)
            product += minimum * dot16(ONES, codes[2 * at]) + other_minimum * dot16(ONES, codes[2 * at + 1]);
#endif
            sum[t] += scales[at] * product;
            continue;
#endif
            int dot = dot16(first_half, codes[2 * at]) + dot16(second_half, codes[2 * at + 1]);
#if defined(Q8)
            dot = 128 * dot + dot16(first_half, fine[2 * at]) + dot16(second_half, fine[2 * at + 1]);
            sum[t] += scale * scales[at] * dot;
#else
            sum[t] += scale * scales[at] * dot + minimum * sums[at];
#endif
        }
    }
    for (int t = 0; t < TOKENS; ++t) partial[t * LANES + lane] = sum[t];
    barrier(CLK_LOCAL_MEM_FENCE);
    int token = lane / 8;
    if (token >= TOKENS || first + token >= tokens) return;
    float whole = 0.0f;
    for (int i = 0; i < LANES / 8; ++i) whole += partial[token * LANES + 8 * i + output];
    out[(ulong)(first + token) * outputs + 8 * get_group_id(0) + output] = whole;
}

// ---- a prompt: 32 tokens x 32 outputs a work-group, STEP groups of inputs at a time through local memory ----

#define STEP 2  // LANES / SIDE: each work-item loads one output and one token of one group
#define SIDE 32

// Index in local memory of half `half` of group `group` of an output or a token: neighbours are adjacent.
#define HALF_AT(group, half, one) ((2 * (group) + (half)) * SIDE + (one))

KERNEL tile_prompt(Bytes data, ulong offset, ulong unit_bytes, ulong block_bytes, int per_output, int per_input,
                   int groups, int blocks, global const int4 *codes, global const int4 *fine, Floats scales,
                   Floats sums, int tokens, global float *out) {
    local int4 weights[STEP * 2 * SIDE], inputs[STEP * 2 * SIDE];
#if defined(Q8)
    local int4 rests[STEP * 2 * SIDE];
#endif
#if defined(HALVES)
    local float other_scale[STEP * SIDE], other_minimum[STEP * SIDE];
#endif
    local float scale[STEP * SIDE], minimum[STEP * SIDE], input_scale[STEP * SIDE], input_sum[STEP * SIDE];
    int lane = get_local_id(0), column = lane % 8, line = lane / 8;
    int first_block = 4 * get_group_id(0), first_token = SIDE * get_group_id(1);
    Squares to = {offset, unit_bytes, block_bytes, per_output, per_input};
    float sum[16];
    for (int i = 0; i < 16; ++i) sum[i] = 0.0f;
    for (int base = 0; base < groups; base += STEP) {
        barrier(CLK_LOCAL_MEM_FENCE);
        int group = lane / SIDE, one = lane % SIDE, at = lane;
        bool there = first_block + one / 8 < blocks && base + group < groups;
        int4 first_half = 0, second_half = 0;
        scale[at] = minimum[at] = input_scale[at] = input_sum[at] = 0.0f;
        if (there) {
            Bytes square = square_at(outputs_at(data, to, first_block + one / 8), to, base + group);
            codes_of(square, one % 8, &first_half, &second_half);
            scale[at] = scale_of(square, one % 8, 0);
            minimum[at] = minimum_of(square, one % 8, 0);
#if defined(HALVES)
            other_scale[at] = scale_of(square, one % 8, 1);
            other_minimum[at] = minimum_of(square, one % 8, 1);
#endif
        }
        weights[HALF_AT(group, 0, one)] = first_half;
        weights[HALF_AT(group, 1, one)] = second_half;
        bool given = first_token + one < tokens && base + group < groups;
        ulong from = (ulong)(first_token + one) * groups + base + group;
        inputs[HALF_AT(group, 0, one)] = given ? codes[2 * from] : 0;
        inputs[HALF_AT(group, 1, one)] = given ? codes[2 * from + 1] : 0;
#if defined(Q8)
        rests[HALF_AT(group, 0, one)] = given ? fine[2 * from] : 0;
        rests[HALF_AT(group, 1, one)] = given ? fine[2 * from + 1] : 0;
#endif
        if (given) {
            input_scale[at] = scales[from];
            input_sum[at] = sums[from];
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        for (int part = 0; part < STEP; ++part) {
            for (int i = 0; i < 16; ++i) {
                int output = column + 8 * (i % 4), token = line + 8 * (i / 4);
                int4 low = weights[HALF_AT(part, 0, output)], high = weights[HALF_AT(part, 1, output)];
#if defined(HALVES)
                int4 from_low = inputs[HALF_AT(part, 0, token)], from_high = inputs[HALF_AT(part, 1, token)];
                int first_dot = dot16(low, from_low), second_dot = dot16(high, from_high);
                output += part * SIDE;
                float product = scale[output] * first_dot + other_scale[output] * second_dot;
#if defined(MINIMA)
                product += minimum[output] * dot16(ONES, from_low) + other_minimum[output] * dot16(ONES, from_high);
#endif
                sum[i] += input_scale[token + part * SIDE] * product;
                continue;
#endif
                int dot = dot16(low, inputs[HALF_AT(part, 0, token)]) + dot16(high, inputs[HALF_AT(part, 1, token)]);
#if defined(Q8)
                dot = 128 * dot + dot16(low, rests[HALF_AT(part, 0, token)]);
                dot += dot16(high, rests[HALF_AT(part, 1, token)]);
#endif
                output += part * SIDE;
                token += part * SIDE;
                sum[i] += scale[output] * input_scale[token] * dot + minimum[output] * input_sum[token];
            }
        }
    }
    for (int i = 0; i < 16; ++i) {
        int token = first_token + line + 8 * (i / 4), output = 8 * first_block + column + 8 * (i % 4);
        if (token < tokens && output < 8 * blocks) out[(ulong)token * 8 * blocks + output] = sum[i];
    }
}
