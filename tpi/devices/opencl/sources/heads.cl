// From products to heads: bias, RMS norm of each head, rotation by position (RoPE).

// One work-group per (head, token). `from` is [tokens, stride]; bias [heads * dim] or null; weight [dim] or null;
// `head` is local memory for one head. Halves of the first 2 * `half_rotary` values are rotated against each other.
// [tokens, heads, dim]
KERNEL finish_heads(Floats from, int stride, int dim, Floats bias, Floats weight, float eps, Floats inv_freq,
                    int half_rotary, float rope_scale, global const int *positions, local float *head,
                    global float *out) {
    local float scratch[LANES];
    int lane = get_local_id(0), number = get_group_id(0), token = get_group_id(1);
    Floats values = from + (ulong)token * stride + number * dim;
    float square = 0.0f;
    for (int d = lane; d < dim; d += LANES) {
        head[d] = values[d] + (bias ? bias[number * dim + d] : 0.0f);
        square += head[d] * head[d];
    }
    float root = sqrt(sum_lanes(square, scratch) / dim + eps);  // by all work-items: it has barriers
    if (weight)
        for (int d = lane; d < dim; d += LANES) head[d] = head[d] / root * weight[d];
    barrier(CLK_LOCAL_MEM_FENCE);
    out += ((ulong)token * get_num_groups(0) + number) * dim;
    for (int d = lane; d < dim; d += LANES) {
        float turned = head[d];
        if (d < 2 * half_rotary) {
            int pair = d % half_rotary;
            float angle = positions[token] * inv_freq[pair];
            float cosine = cos(angle) * rope_scale, sine = sin(angle) * rope_scale;
            turned = d < half_rotary ? head[d] * cosine - head[d + half_rotary] * sine
                                     : head[d] * cosine + head[d - half_rotary] * sine;
        }
        out[d] = turned;
    }
}
