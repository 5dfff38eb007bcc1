// The activation between the products of a feed-forward block, residual connections, and plain reading of weights.
#define SILU 0
#define GELU 1
#define GELU_TANH 2
#define RELU 3
#define RELU2 4
#define FATRELU 5
#define DRELU 6

static inline float activated(float x, int activation, float threshold) {
    float kept = x < 0.0f ? 0.0f : x;  // NaN stays NaN, also with a threshold
    if (activation == RELU || activation == DRELU) return kept;
    if (activation == RELU2) return kept * kept;
    if (activation == FATRELU) return x <= threshold ? 0.0f : x;
    if (activation == SILU) return x / (1.0f + exp(fmin(-x, 88.0f)));
    if (activation == GELU_TANH) return 0.5f * x * (1.0f + tanh(0.7978845608f * (x + 0.044715f * x * x * x)));
    return 0.5f * x * (1.0f + erf(x * 0.70710678118f));
}

// Set `up`, [tokens, neurons], to act(gate) * up (DRELU: act(gate) * act(up)), or to act(up) if gate is null. Biases
// are of all neurons, or null; `active` lists the neurons, or is null for all.
KERNEL activate(Floats gate, global float *up, Floats gate_bias, Floats up_bias, global const int *active, int neurons,
                int tokens, int activation, float threshold) {
    int at = get_global_id(0);
    if (at >= neurons * tokens) return;
    int neuron = active ? active[at % neurons] : at % neurons;
    float value = up[at] + (up_bias ? up_bias[neuron] : 0.0f);
    if (!gate || activation == DRELU) value = activated(value, activation, threshold);
    if (gate) value *= activated(gate[at] + (gate_bias ? gate_bias[neuron] : 0.0f), activation, threshold);
    up[at] = value;
}

// Set `out` to (first + (second + bias)) * scale, all [tokens, width] but `bias`, [width]; null stands for zeros.
KERNEL add(Floats first, Floats second, Floats bias, int width, int tokens, float scale, global float *out) {
    int at = get_global_id(0);
    if (at >= width * tokens) return;
    float value = bias ? second[at] + bias[at % width] : second[at];
    out[at] = (first ? first[at] + value : value) * scale;
}

// Every work-item reads every global-size-th 16 bytes; `out` prevents the compiler from removing the reads.
KERNEL read_bytes(Bytes data, ulong offset, ulong words, global uint *out) {
    uint4 sum = 0;
    global const uint *from = (global const uint *)(data + offset);
    for (ulong at = get_global_id(0); at < words / 4; at += get_global_size(0)) sum += vload4(at, from);
    out[get_global_id(0)] = sum.s0 + sum.s1 + sum.s2 + sum.s3;
}
