// The arguments of the kernels: plain structures shared by the bindings, the pool and the instruction-set sources. They
// own no memory. Sizes are counts of values unless a name says bytes.
#pragma once

#include <cstddef>
#include <cstdint>

// Small loops whose arrays belong in registers; compilers call and loop too soon by themselves.
#define TPI_INLINED __attribute__((always_inline))
#define TPI_INLINE inline TPI_INLINED
#define TPI_UNROLL _Pragma("GCC unroll 8")

namespace tpi {

constexpr size_t kGroup = 32;        // values that share a scale, of weights, activations, keys and values
constexpr size_t kTileOutputs = 8;   // outputs of a tile
constexpr size_t kPageTokens = 32;  // tokens of a page of keys and values
constexpr size_t kStreamTokens = 16; // steps of so many tokens stream weights once; longer ones are matrix products
constexpr size_t kLater = kStreamTokens - 1;  // tokens after a recurrent state whose inputs are stored with it
constexpr size_t kCodeRun = 16;      // 4-bit keys and values whose codes lie in 8 bytes
constexpr size_t kWordBytes = 4;     // the codes of a q8 or q4 key or value take whole words of so many bytes
constexpr size_t kMostThreads = 1024;

// Number of slices in which so many threads sum a short step's columns.
constexpr size_t slices_of(size_t threads) { return threads == 1 ? 1 : threads * (threads <= 4 ? 4 : 2); }

enum class Format : uint8_t { f32, bf16, f16, q8, q4, q4s, mxfp4, q6, q5, q3, q2, iq4, iq3s, iq3, iq2, iq1, nvfp4 };
enum class Activation : uint8_t { silu, gelu, gelu_tanh, relu, relu2, fatrelu, drelu, swiglu_clamped };
enum class KvFormat : uint8_t { f32, f16, q8, q4 };

// What a group's values are multiplied with, and what is added; see tpi/pack/groups.py.
enum class Factors : uint8_t { power, scale, line, halves, lines };

// How the codes of a group are stored: `low` bits of each in a plane, and `high` more in another. A code stands for
// itself minus `offset`, or for a value of `table`.
struct Coding {
    int low, high;
    Factors factors;
    int offset;
    const int8_t* table;  // 16 values, or null
    float unit;           // multiplies the scale
};

constexpr int8_t kE2m1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};  // twice the values of e2m1
constexpr int8_t kIq4[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr int8_t kIq3s[16] = {-15, -13, -11, -9, -7, -5, -3, -1, 1, 3, 5, 7, 9, 11, 13, 15};
constexpr int8_t kIq3[16] = {-62, -52, -44, -36, -28, -20, -12, -4, 4, 12, 20, 28, 36, 44, 52, 62};
constexpr int8_t kIq2[16] = {-43, -25, -8, 8, 25, 43};
constexpr int8_t kIq1[16] = {-9, -7, -1, 1, 7, 9};

// The coding of a quantised format; q8 has one plane of whole bytes.
static constexpr Coding coding_of(Format format) {
    switch (format) {
        case Format::q8: return {8, 0, Factors::scale, 0, nullptr, 1.0f};
        case Format::q4: return {4, 0, Factors::line, 0, nullptr, 1.0f};
        case Format::mxfp4: return {4, 0, Factors::power, 0, kE2m1, 1.0f};
        case Format::q6: return {4, 2, Factors::halves, 32, nullptr, 1.0f};
        case Format::q5: return {4, 1, Factors::line, 0, nullptr, 1.0f};
        case Format::q3: return {2, 1, Factors::halves, 4, nullptr, 1.0f};
        case Format::q2: return {2, 0, Factors::lines, 0, nullptr, 1.0f};
        case Format::iq4: return {4, 0, Factors::scale, 0, kIq4, 1.0f};
        case Format::iq3s: return {4, 0, Factors::scale, 0, kIq3s, 1.0f};
        case Format::iq3: return {4, 0, Factors::scale, 0, kIq3, 1.0f};
        case Format::iq2: return {2, 1, Factors::halves, 0, kIq2, 0.125f};
        case Format::iq1: return {2, 1, Factors::halves, 0, kIq1, 0.125f};
        case Format::nvfp4: return {4, 0, Factors::halves, 0, kE2m1, 0.0078125f};
        default: return {4, 0, Factors::scale, 8, nullptr, 1.0f};
    }
}

static constexpr size_t bytes_of(Factors factors) {
    switch (factors) {
        case Factors::power: return 1;
        case Factors::scale: return 2;
        case Factors::lines: return 6;
        default: return 4;
    }
}

static constexpr bool is_quantised(Format format) {
    return format != Format::f32 && format != Format::bf16 && format != Format::f16;
}

// Bytes of the codes of a group.
static constexpr size_t code_bytes(Format format) {
    Coding coding = coding_of(format);
    return static_cast<size_t>(coding.low + coding.high) * kGroup / 8;
}

// Bytes of a group of 32 values. The tile of 8 such groups is 8 times as large.
static constexpr size_t group_bytes(Format format) {
    if (!is_quantised(format)) return (format == Format::f32 ? 4 : 2) * kGroup;
    return code_bytes(format) + bytes_of(coding_of(format).factors);
}

// Formats that records may have, in addition to floats and q8.
static constexpr bool is_four_bit(Format format) { return format == Format::q4 || format == Format::q4s; }

static constexpr bool is_record(Format format) { return !is_quantised(format) || format == Format::q8 || is_four_bit(format); }

static constexpr size_t vector_bytes(Format format, size_t hidden) {
    if (format == Format::f32) return 4 * hidden;
    if (!is_quantised(format)) return 2 * hidden;
    return hidden / kGroup * group_bytes(format);
}

constexpr size_t round_up(size_t value, size_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// Return the bytes of the first `count` values of a key or value of one head, without the factors of their groups.
static constexpr size_t code_bytes(KvFormat format, size_t count) {
    switch (format) {
        case KvFormat::f32: return 4 * count;
        case KvFormat::f16: return 2 * count;
        case KvFormat::q8: return round_up(count, kWordBytes);
        default: return round_up(count, kCodeRun) / 2;
    }
}

// Return the bytes of the factors of a group: a scale, in q4 also a minimum, each an f16.
static constexpr size_t factor_bytes(KvFormat format) {
    return format == KvFormat::q8 ? 2 : format == KvFormat::q4 ? 4 : 0;
}

// Return the bytes of a key or value of one head.
static constexpr size_t vector_bytes(KvFormat format, size_t head_dim) {
    return code_bytes(format, head_dim) + round_up(head_dim, kGroup) / kGroup * factor_bytes(format);
}

// One part of a run of units: `units * width` vectors of `hidden` values each.
struct Matrix {
    const uint8_t* data;  // of the part in the first unit
    Format format;
    bool tiled;
    size_t units, width, hidden;
    size_t unit_bytes, record_bytes;

    size_t vectors() const { return units * width; }
    // record layout: the r-th vector
    const uint8_t* vector(size_t r) const { return data + r * record_bytes; }
};

struct Norm {
    bool rms;  // else LayerNorm
    float eps;
    const float* weight;  // [hidden]; null: the input stays as it is
    const float* bias;    // [hidden] or null
};

// Sums of the codes of a group.
struct CodeSums {
    int16_t first, second, fine;  // the first 16 codes, the others, and the fine codes
};

// Activations of several tokens for the integer products. 8-bit weights need more than 8 bits of the activations: then
// each code has a second one, `fine`, with the remainder in 1/128 of its unit.
struct Rounded {
    int8_t* codes;    // [tokens, width]
    int8_t* fine;     // the same; null if no weights have 8 bits
    CodeSums* whole;  // [tokens, width / 32]; null for a few tokens
    float* scale;     // [tokens, width / 32]
    float* sum;       // [tokens, width / 32]: scale * sum of the group's codes
    float* half;      // [tokens, width / 32]: the same of the first 16 of them
    size_t width;

    size_t groups() const { return width / kGroup; }
};

// The forms of a block's input that its row parts need in addition to floats.
struct Forms {
    bool rounded, fine;  // as int8, and with the remainder
    bool kept;           // rounded but float, for float32 products with records in 4 bits
};

// Internal to each source: it is compiled for several instruction sets.
static inline Forms forms_of(const Matrix* const* matrices, size_t count, size_t tokens) {
    Forms forms{};
    for (size_t i = 0; i < count; ++i) {
        const Matrix& matrix = *matrices[i];
        forms.rounded |= is_quantised(matrix.format);
        forms.fine |= matrix.format == Format::q8;
        forms.kept |= is_four_bit(matrix.format) && !matrix.tiled && tokens > kStreamTokens;
    }
    return forms;
}

// The normed input of a block in every form that its matrices need.
struct Prepared {
    size_t tokens, stride, threads;
    float* x;         // [tokens, stride]
    float* kept;      // or null
    Rounded rounded;  // codes null if no matrix is quantised
};

// Fills the buffers of `out` that are not null.
struct PrepareCall {
    Norm norm;
    size_t hidden;
    const float* x;  // [tokens, hidden]
    Prepared out;
};

struct Kv {
    uint8_t* data;  // pages [blocks, kv_heads, kPageTokens * vector_bytes]; those of keys lie transposed (keys.hpp)
    KvFormat format;
    size_t vector_bytes;
};

// Heads of several tokens with biases, norms and rotation: queries, and the keys and values to append to the cache.
struct Projected {
    float* queries;         // [tokens, heads, head_dim]
    float *keys, *values;   // [tokens, kv_heads, head_dim]
    float* gate;            // [tokens, heads * head_dim], before the sigmoid; null without an output gate
};

// The latent vector of keys and values: products of the input. The first `rank` values are normed and multiplied with k
// and v. The next `rope` values are rotated and begin every key.
struct Latent {
    Matrix matrix;
    Norm norm;          // of the first `rank` values
    const float* bias;  // [rank + rope], before the norm; or null
    size_t rank, rope;  // 0: there is no latent vector
    size_t width;       // vectors of k, and of v, that a KV head has

    bool is_there() const { return rank; }
};

// The latent vector of queries: products of the input, which are normed and multiplied with q.
struct QueryLatent {
    Matrix matrix;
    Norm norm;          // its length is the number of values
    const float* bias;  // [rank], before the norm; or null
    size_t rank;        // 0: q multiplies the block's input
};

// An attention block, or one of its steps: projecting writes `projected`; attending appends that to the caches and
// writes [tokens, heads * head_dim] to `out`; the output step takes that as `x`.
struct AttentionCall {
    Matrix q, o, k, v;
    Matrix gate;                                                // of the output, beside q; no units if there is none
    Norm norm;
    Latent latent;
    QueryLatent query_latent;
    size_t heads, kv_heads, head_dim, tokens, hidden;
    const int32_t* kv_index;                                    // [heads]
    const float *q_bias, *k_bias, *v_bias, *q_norm, *k_norm;    // or null; norms: [head_dim], or of all heads
    const float* v_norm;                                        // [head_dim], or null
    bool shared;                                                // an earlier layer has appended the keys and values
    bool whole_norms;                                           // q_norm and k_norm are over all heads at once
    bool late_norms;                                            // q_norm and k_norm come after RoPE
    float growth;           // queries are multiplied by 1 + growth * ln(1 + position / growth_tokens)
    int32_t growth_tokens;  // positive if growth is not 0
    float clip;                                                 // the largest magnitude of heads before RoPE; 0: any
    const float* sinks;                                         // [heads], scores without a value; or null
    const float* inv_freq;                                      // [half_rotary]
    size_t half_rotary;
    float rope_scale, scale, softcap;
    size_t window;
    const float* x;                                             // [tokens, hidden]
    const Prepared* prepared;                                   // x, prepared earlier; or null
    Projected projected;                                        // null except in steps
    float* out;                                                 // [tokens, hidden]
    Kv keys, values;
    const int32_t *positions, *sequence, *tables;
    size_t table_width;
};

// The tokens of one sequence in a step, and its states: the one to continue from (null: zeros), and the one to write,
// which may be the same. With a state, the inputs of up to kLater later tokens are stored, which have not changed it.
struct SequenceStates {
    size_t first, count;
    const float* read;
    float* write;
    size_t taken;  // the first of the stored later tokens that belong to the sequence: they change the state first
    size_t later;  // tokens at the end of the step whose inputs are stored, and which do not change what is written

    size_t applied() const { return count - later; }
};

// The sequences of a step.
struct StatesView {
    const SequenceStates* sequences;
    size_t count;
    const uint32_t* of_token;  // [tokens], the sequence of each

    const SequenceStates& of(size_t token) const { return sequences[of_token[token]]; }
};

// A gated short convolution (tpi/kernels/recurrent/conv.py). A state is the last inputs, and those of later tokens,
// [taps - 1 + kLater, channels].
struct ConvCall {
    Matrix v, input, gate, o;
    Norm norm;
    size_t channels, taps, tokens, hidden;
    const float* weights;      // [taps, channels]
    const float* x;            // [tokens, hidden]
    const Prepared* prepared;  // x, prepared earlier; or null
    float* out;                // [tokens, hidden]
    StatesView states;

    size_t state_values() const { return (taps - 1 + kLater) * channels; }
};

// A gated DeltaNet block (tpi/kernels/recurrent/delta.py).
struct DeltaCall {
    Matrix q, k, v, gate, o;
    Norm norm;                                         // of the input; its eps is that of `out_norm`, too
    size_t heads, key_heads, key, value, taps;         // heads: value heads
    size_t tokens, hidden;
    const int32_t* key_index;                          // [heads]
    const float *a, *b;                                // [heads, hidden]
    const float *decay, *decay_bias;                   // [heads]
    const float *conv_q, *conv_k, *conv_v, *out_norm;  // [taps, channels]; [value]
    const float* x;                                    // [tokens, hidden]
    const Prepared* prepared;                          // x, prepared earlier; or null
    float* out;                                        // [tokens, hidden]
    StatesView states;

    size_t channels() const { return 2 * key_heads * key + heads * value; }
    // Values of the heads' states. The last inputs of the convolution and those of later tokens follow them,
    // [taps - 1 + kLater, channels]; then `decay` and `beta` of later tokens, [kLater, 2, heads].
    size_t state_size() const { return heads * key * value; }
    size_t gates_at() const { return state_size() + (taps - 1 + kLater) * channels(); }
    size_t state_values() const { return gates_at() + kLater * 2 * heads; }
};

// A Mamba2 block (tpi/kernels/recurrent/mamba.py). `a` has the step sizes, `out_norm` a weight for each value of each
// head; there is no `b`.
struct MambaCall : DeltaCall {
    const float* conv_bias;        // [channels], or null
    const float* skip;             // [heads]
    float eps;                     // of the norm of the results
    float least_step, most_step;
    float* squares;                // [tokens]: sums of squares of results that are normed later; null: normed here
};

struct FfnCall {
    Matrix gate, up, down;  // gate.data is null if not gated
    Norm norm;
    Activation activation;
    float threshold, slope;  // of fatrelu and swiglu_clamped; slope of the latter
    const float *gate_bias, *up_bias;  // or null
    size_t tokens, hidden;
    const float* x;
    const Prepared* prepared;  // x, prepared earlier; or null
    float* out;
    const int32_t* active;  // or null: all neurons
    size_t active_count;
    const float* weights;  // [tokens]: factor of each token's output; or null
};

// The part of a block of experts that some tokens use: a piece of a routed expert, or the shared experts.
struct ExpertPart {
    FfnCall call;  // of these tokens, weighted; without input and output
    size_t first;  // its first pair; it has as many pairs as tokens
    size_t turn;   // the slice that gets its first units: the number of its piece
};

// The parts that the tokens of a step use.
struct ExpertParts {
    const ExpertPart* parts;
    size_t count;
    const int32_t* token;  // [pairs]; the tokens of a part are all different
};

// The beginning of a block of experts: its norm, its router, and the choice of experts.
struct RoutingCall {
    Norm norm;
    const float* x;     // [tokens, hidden]
    Forms forms;        // of the normed input, in addition to floats
    Matrix router;      // [experts, hidden]
    float* logits;      // [tokens, experts]; the router's bias is not added
    // Set the call's `chosen`, given the normed input and the logits. One thread calls it.
    void (*choose)(void* context, const Prepared& in);
    void* context;
};

struct ExpertsCall {
    const ExpertParts* chosen;
    const RoutingCall* routing;  // null if `prepared` and `chosen` are set; only for steps of a few tokens
    size_t pairs;
    bool floats;                 // true if a part needs its input as floats
    size_t width;                // neurons of a unit, the most of all parts
    size_t tokens, hidden;
    const Prepared* prepared;
    float* out;
};

// x times every row of a matrix: [tokens, rows].
struct RowsCall {
    Matrix matrix;
    size_t tokens;
    const float* x;
    float* out;
    const Prepared* prepared;  // x, prepared earlier; or null
};

// Vectors of a matrix as float32: those of `rows`, or all if it is null.
struct DecodeCall {
    Matrix matrix;
    const int32_t* rows;
    size_t count;
    float* out;
};

// Reads memory and computes nothing, to measure the bandwidth.
struct ReadCall {
    const uint8_t* data;
    size_t bytes;
    float* sums;  // one per thread
};

struct NormCall {
    Norm norm;
    size_t tokens, hidden;
    const float* x;
    float* out;
};

}  // namespace tpi
