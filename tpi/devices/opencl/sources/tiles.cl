// Products straight on the squares of the tiled layout: 8 outputs x 32 inputs, the codes interleaved by words (word 0 of
// output 0..7, word 1 of output 0..7, ...), then 8 float16 scales, then for q4 8 minima. Activations are int8.
#if defined(Q8)
#define WORDS 8    // of 4 bytes, in the codes of a group
#define FACTORS 1  // float16 scales and minima of a group
#elif defined(Q4)
#define WORDS 4
#define FACTORS 2
#else
#define WORDS 4
#define FACTORS 1
#endif
#define SQUARE (8 * (4 * WORDS + 2 * FACTORS))  // bytes

// Where squares lie: rows of a unit are outputs (`per_output` blocks of 8 a unit), columns inputs (`per_input` groups).
typedef struct {
    ulong offset, unit_bytes, block_bytes;
    int per_output, per_input, blocks, groups;
} Squares;

inline Bytes outputs_at(Bytes data, Squares to, int block) {
    int unit = to.per_output ? block / to.per_output : 0;
    int inside = to.per_output ? block % to.per_output : block;
    return data + to.offset + unit * to.unit_bytes + inside * to.block_bytes;
}

inline Bytes square_at(Bytes outputs, Squares to, int group) {
    int unit = to.per_input ? group / to.per_input : 0;
    int inside = to.per_input ? group % to.per_input : group;
    return outputs + unit * to.unit_bytes + (ulong)inside * SQUARE;
}

inline float scale_of(Bytes square, int output) { return half_at(square + 32 * WORDS, output); }

// What each unit of the activations' sum is worth beside the codes.
inline float minimum_of(Bytes square, int output) {
#if defined(Q4)
    return half_at(square + 32 * WORDS, 8 + output);
#elif defined(Q4S)
    return -8.0f * scale_of(square, output);
#else
    return 0.0f;
#endif
}

#define LOW(word) ((word) & 0x0F0F0F0F)
#define HIGH(word) (((word) >> 4) & 0x0F0F0F0F)

// ---- a few tokens: TOKENS of them, 8 outputs a work-group, each group of 32 inputs by one work-item of 8 ----

kernel void tile_vectors(Bytes data, ulong offset, ulong unit_bytes, ulong block_bytes, int per_output, int per_input,
                         int groups, global const int *codes, global const int *fine, Floats scales, Floats sums,
                         int tokens, global float *out) {
    local float partial[TOKENS * LANES];
    int lane = get_local_id(0), output = lane % 8, first = get_group_id(1) * TOKENS;
    int outputs = 8 * get_num_groups(0);
    Squares to = {offset, unit_bytes, block_bytes, per_output, per_input, (int)get_num_groups(0), groups};
    Bytes row = outputs_at(data, to, get_group_id(0));
    float sum[TOKENS];
    for (int t = 0; t < TOKENS; ++t) sum[t] = 0.0f;
    for (int group = lane / 8; group < groups; group += LANES / 8) {
        Bytes square = square_at(row, to, group);
        global const int *words = (global const int *)square + output;
        int weights[8];
        for (int w = 0; w < WORDS; ++w) {
#if defined(Q8)
            weights[w] = words[8 * w];
#else
            weights[w] = LOW(words[8 * w]);
            weights[w + 4] = HIGH(words[8 * w]);
#endif
        }
        float scale = scale_of(square, output), minimum = minimum_of(square, output);
        for (int t = 0; t < TOKENS; ++t) {
            int at = min(first + t, tokens - 1) * groups + group, dot = 0;
            for (int w = 0; w < 8; ++w) dot = dot4(weights[w], codes[8 * at + w], dot);
#if defined(Q8)
            int rest = 0;
            for (int w = 0; w < 8; ++w) rest = dot4(weights[w], fine[8 * at + w], rest);
            dot = 128 * dot + rest;
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

#define STEP 2
#define SIDE 32
#define PITCH (SIDE + 1)  // words of a row in local memory: neighbours in a column lie in different banks

kernel void tile_prompt(Bytes data, ulong offset, ulong unit_bytes, ulong block_bytes, int per_output, int per_input,
                        int groups, int blocks, global const int *codes, global const int *fine, Floats scales,
                        Floats sums, int tokens, global float *out) {
    local int weights[STEP * 8 * PITCH], inputs[STEP * 8 * PITCH];
#if defined(Q8)
    local int rests[STEP * 8 * PITCH];
#endif
    local float scale[STEP * SIDE], minimum[STEP * SIDE], input_scale[STEP * SIDE], input_sum[STEP * SIDE];
    int lane = get_local_id(0), column = lane % 8, line = lane / 8;
    int first_block = 4 * get_group_id(0), first_token = SIDE * get_group_id(1);
    Squares to = {offset, unit_bytes, block_bytes, per_output, per_input, blocks, groups};
    float sum[16];
    for (int i = 0; i < 16; ++i) sum[i] = 0.0f;
    for (int base = 0; base < groups; base += STEP) {
        barrier(CLK_LOCAL_MEM_FENCE);
        for (int i = lane; i < STEP * 4 * 8 * WORDS; i += LANES) {
            int word = i / 8 % WORDS, output = i % 8, group = i / (8 * WORDS) % STEP, block = i / (8 * WORDS * STEP);
            int found = 0;
            if (first_block + block < blocks && base + group < groups) {
                Bytes square = square_at(outputs_at(data, to, first_block + block), to, base + group);
                found = ((global const int *)square)[8 * word + output];
            }
#if defined(Q8)
            weights[(8 * group + word) * PITCH + 8 * block + output] = found;
#else
            weights[(8 * group + word) * PITCH + 8 * block + output] = LOW(found);
            weights[(8 * group + word + 4) * PITCH + 8 * block + output] = HIGH(found);
#endif
        }
        for (int i = lane; i < SIDE * STEP * 8; i += LANES) {
            int word = i % (STEP * 8), token = i / (STEP * 8);
            bool there = first_token + token < tokens && 8 * base + word < 8 * groups;
            ulong at = (ulong)(first_token + token) * groups * 8 + 8 * base + word;
            inputs[word * PITCH + token] = there ? codes[at] : 0;
#if defined(Q8)
            rests[word * PITCH + token] = there ? fine[at] : 0;
#endif
        }
        for (int i = lane; i < STEP * SIDE; i += LANES) {
            int group = i / SIDE, one = i % SIDE;
            bool there = first_block + one / 8 < blocks && base + group < groups;
            scale[i] = minimum[i] = input_scale[i] = input_sum[i] = 0.0f;
            if (there) {
                Bytes square = square_at(outputs_at(data, to, first_block + one / 8), to, base + group);
                scale[i] = scale_of(square, one % 8);
                minimum[i] = minimum_of(square, one % 8);
            }
            if (first_token + one < tokens && base + group < groups) {
                input_scale[i] = scales[(first_token + one) * groups + base + group];
                input_sum[i] = sums[(first_token + one) * groups + base + group];
            }
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        for (int group = 0; group < STEP; ++group) {
            int dots[16];
            for (int i = 0; i < 16; ++i) dots[i] = 0;
            for (int word = 8 * group; word < 8 * group + 8; ++word) {
                for (int i = 0; i < 16; ++i) {
                    int weight = weights[word * PITCH + column + 8 * (i % 4)];
                    dots[i] = dot4(weight, inputs[word * PITCH + line + 8 * (i / 4)], dots[i]);
                }
            }
#if defined(Q8)
            for (int i = 0; i < 16; ++i) dots[i] *= 128;
            for (int word = 8 * group; word < 8 * group + 8; ++word) {
                for (int i = 0; i < 16; ++i) {
                    int weight = weights[word * PITCH + column + 8 * (i % 4)];
                    dots[i] = dot4(weight, rests[word * PITCH + line + 8 * (i / 4)], dots[i]);
                }
            }
#endif
            for (int i = 0; i < 16; ++i) {
                int output = group * SIDE + column + 8 * (i % 4), token = group * SIDE + line + 8 * (i / 4);
                sum[i] += scale[output] * input_scale[token] * dots[i] + minimum[output] * input_sum[token];
            }
        }
    }
    for (int i = 0; i < 16; ++i) {
        int token = first_token + line + 8 * (i / 4), output = 8 * first_block + column + 8 * (i % 4);
        if (token < tokens && output < 8 * blocks) out[(ulong)token * 8 * blocks + output] = sum[i];
    }
}
