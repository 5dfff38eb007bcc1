// Preparation of a block's input: the norm of each token, and its rounding to int8 in groups of 32.

// One work-group per token. Without a weight, copies `x`.
KERNEL norm(Floats x, Floats weight, Floats bias, int layer, float eps, int hidden, global float *out) {
    local float scratch[LANES];
    ulong row = (ulong)get_group_id(0) * hidden;
    int lane = get_local_id(0);
    float mean = 0.0f;
    if (layer) {
        float sum = 0.0f;
        for (int i = lane; i < hidden; i += LANES) sum += x[row + i];
        mean = sum_lanes(sum, scratch) / hidden;
    }
    float square = 0.0f;
    for (int i = lane; i < hidden; i += LANES) square += (x[row + i] - mean) * (x[row + i] - mean);
    float root = sqrt(sum_lanes(square, scratch) / hidden + eps);
    for (int i = lane; i < hidden; i += LANES) {
        float scaled = (x[row + i] - mean) / root * weight[i];
        out[row + i] = bias ? scaled + bias[i] : scaled;
    }
}

// Eight work-items per group of 32, four values each. `is_fine`: values have 15 bits; `fine` is in 1/128 of the unit of
// `codes`. Writes codes, scales and sums (scale times the sum of the group's codes) for products of int8; if `kept` is
// not null, writes only the rounded values to it, as floats.
KERNEL round_groups(Floats x, int groups, int is_fine, global char4 *codes, global char4 *fine,
                    global float *scales, global float *sums, global float *kept) {
    local float largest_of[LANES];
    local int sum_of[LANES];
    int lane = get_local_id(0), first = lane / 8 * 8;
    int at = get_global_id(0), group = at / 8;
    float4 values = group < groups ? vload4(at, x) : (float4)(0.0f);
    float4 magnitude = fabs(values);
    largest_of[lane] = fmax(fmax(magnitude.s0, magnitude.s1), fmax(magnitude.s2, magnitude.s3));
    barrier(CLK_LOCAL_MEM_FENCE);
    float largest = largest_of[first];
    for (int i = 1; i < 8; ++i) largest = fmax(largest, largest_of[first + i]);
    float steps = is_fine ? 128.0f : 1.0f, scale = largest / 127.0f;
    float inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
    float4 rounded = rint(values * inverse * steps), coarse = rint(rounded / steps);
    sum_of[lane] = (int)(coarse.s0 + coarse.s1 + coarse.s2 + coarse.s3);
    barrier(CLK_LOCAL_MEM_FENCE);
    if (group >= groups) return;
    if (kept) {
        vstore4(rounded / steps * scale, at, kept);
        return;
    }
    codes[at] = convert_char4_sat(coarse);
    if (is_fine) fine[at] = convert_char4_sat(rounded - coarse * steps);
    if (lane != first) return;
    int sum = 0;
    for (int i = 0; i < 8; ++i) sum += sum_of[first + i];
    scales[group] = scale / steps;
    sums[group] = scale * sum;
}
