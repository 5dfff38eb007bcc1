// Compares every instruction set of this machine with the scalar kernels on random blocks, without Python, so that it
// runs under an emulator (NEON). AVX-VNNI is emulated on Linux where the processor does not have it. Instruction sets
// whose vectors of floats have the same width must give the same bits. Prints what differs and exits with 1.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "isa.hpp"
#if defined(TPI_X86) && defined(__linux__)
#include "emulate_vnni.hpp"
#endif

using namespace tpi;

namespace {

std::mt19937 generator(1);

float uniform(float low, float high) { return std::uniform_real_distribution<float>(low, high)(generator); }
int below(int limit) { return std::uniform_int_distribution<int>(0, limit - 1)(generator); }

std::vector<float> floats(size_t count, float size = 1.0f) {
    std::vector<float> values(count);
    for (float& value : values) value = uniform(-size, size);
    return values;
}

// An f16 with the given sign and exponent.
void put_factor(uint8_t* to, int exponent, bool negative = false) {
    uint16_t bits = static_cast<uint16_t>((negative ? 0x8000 : 0) + (exponent + 15) * 1024 + below(1024));
    std::memcpy(to, &bits, 2);
}

// Random weights of one matrix alone in its run.
struct Weights {
    std::vector<uint8_t> bytes;
    Matrix matrix;

    Weights(Format format, bool tiled, size_t units, size_t width, size_t hidden) {
        size_t vector = vector_bytes(format, hidden);
        bytes.resize(units * width * vector);
        if (is_quantised(format)) fill_groups(format, tiled);
        else fill_plain(format);
        matrix = {bytes.data(), format, tiled, units, width, hidden, width * vector, vector};
    }
    void fill_plain(Format format) {
        for (size_t i = 0; i < bytes.size(); i += format == Format::f32 ? 4 : 2) {
            float value = uniform(-0.1f, 0.1f);
            uint32_t bits;
            if (format == Format::f16) {
                put_factor(&bytes[i], -6);
                continue;
            }
            std::memcpy(&bits, &value, 4);
            if (format == Format::f32) std::memcpy(&bytes[i], &bits, 4);
            else bytes[i] = static_cast<uint8_t>(bits >> 16), bytes[i + 1] = static_cast<uint8_t>(bits >> 24);
        }
    }
    void fill_groups(Format format, bool tiled) {
        for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(below(256));
        if (format == Format::mxfp4) {  // tiled alone: 128 bytes of codes, then 8 exponents
            for (size_t i = 0; i < bytes.size(); ++i)
                if (i % 136 >= 128) bytes[i] = static_cast<uint8_t>(118 + below(6));
            return;
        }
        size_t group = group_bytes(format), codes = code_bytes(format);
        Factors kind = coding_of(format).factors;
        size_t factors = kind == Factors::line || kind == Factors::lines ? 2 : 1;  // others are any bytes
        bool table = coding_of(format).table != nullptr;
        int exponent = kind == Factors::halves ? -14 : kind == Factors::lines || table ? -9 : -6;
        size_t block = tiled ? 8 * group : group, count = tiled ? 8 : 1, at = tiled ? 8 * codes : 0;
        for (size_t b = 0; b < bytes.size(); b += block)
            for (size_t f = 0; f < factors; ++f)
                for (size_t i = 0; i < count; ++i) {
                    bool minimum = f == 1 && kind == Factors::line;
                    put_factor(&bytes[b + at + (f * count + i) * 2], minimum ? -4 : exponent, minimum);
                }
    }
};

int failures = 0;

// The instruction set whose bits an instruction set has, or null if it may round differently.
const Kernels* twin_of([[maybe_unused]] const Kernels& isa) {
#if defined(TPI_X86)
    if (&isa == &kAvxVnniKernels) return &kAvx2Kernels;
#elif defined(TPI_ARM)
    if (&isa == &kNeonDotprodKernels || &isa == &kNeonI8mmKernels) return &kNeonKernels;
#endif
    return nullptr;
}

// Compares `run(kernels)` of an instruction set with that of the scalar kernels, and with that of its twin.
template <class Run> void compare(const char* what, const Kernels& isa, const Run& run, float tolerance) {
    const std::vector<float> got = run(isa), expected = run(kScalarKernels);
    if (const Kernels* twin = twin_of(isa)) {
        const std::vector<float> same = run(*twin);
        if (std::memcmp(same.data(), got.data(), got.size() * sizeof(float)) != 0) {
            std::printf("%s: bits on %s and %s differ\n", what, isa.name, twin->name);
            ++failures;
        }
    }
    float most = 1e-3f, worst = 0;
    for (size_t i = 0; i < got.size(); ++i) {
        most = std::fmax(most, std::fabs(expected[i]));
        float difference = std::fabs(got[i] - expected[i]);
        worst = std::isfinite(got[i]) ? std::fmax(worst, difference) : INFINITY;
    }
    if (worst <= tolerance * most) return;
    std::printf("%s on %s: off by %g of %g\n", what, isa.name, worst, most);
    ++failures;
}

template <class Call> std::vector<float> run(void (*kernel)(const Call&, Pool&), Call call, size_t size) {
    std::vector<float> out(size, NAN);
    call.out = out.data();
    Pool::instance().arena().begin();
    kernel(call, Pool::instance());
    return out;
}

void check_ffn(const Kernels& isa, Format format, bool tiled, size_t tokens, size_t hidden) {
    Weights gate(format, tiled, 3, 32, hidden), up(format, tiled, 3, 32, hidden), down(format, tiled, 3, 32, hidden);
    auto x = floats(tokens * hidden), weight = floats(hidden), bias = floats(96);
    FfnCall call{};
    call.gate = gate.matrix;
    call.up = up.matrix;
    call.down = down.matrix;
    call.norm = {true, 1e-5f, weight.data(), nullptr};
    call.activation = format == Format::mxfp4 ? Activation::swiglu_clamped : static_cast<Activation>(below(4));
    call.threshold = 0.5f;
    call.slope = 1.7f;
    call.gate_bias = bias.data();
    call.tokens = tokens;
    call.hidden = hidden;
    call.x = x.data();
    auto once = [&](const Kernels& kernels) { return run(kernels.ffn, call, tokens * hidden); };
    compare("ffn", isa, once, is_quantised(format) ? 2e-2f : 1e-5f);
}

void check_attention(const Kernels& isa, Format format, bool tiled, size_t tokens, KvFormat kv_format) {
    size_t hidden = 96, heads = 4, kv_heads = 2, dim = 32, past = 40, width = dim;
    Weights q(format, tiled, heads, width, hidden), o(format, tiled, heads, width, hidden);
    Weights k(format, tiled, kv_heads, width, hidden), v(format, tiled, kv_heads, width, hidden);
    auto x = floats(tokens * hidden), weight = floats(hidden), frequencies = floats(dim / 2);
    std::vector<int32_t> index{0, 0, 1, 1}, positions(tokens), sequence(tokens, 0), table{2, 0, 3, 1, 5, 4};
    for (size_t t = 0; t < tokens; ++t) positions[t] = static_cast<int32_t>(past + t);
    size_t vector = vector_bytes(kv_format, dim);
    std::vector<uint8_t> cache(6 * kv_heads * kPageTokens * vector, 0);
    auto sinks = floats(heads);
    AttentionCall call{};
    call.sinks = sinks.data();
    call.q = q.matrix;
    call.o = o.matrix;
    call.k = k.matrix;
    call.v = v.matrix;
    call.norm = {false, 1e-5f, weight.data(), weight.data()};
    call.heads = heads;
    call.kv_heads = kv_heads;
    call.head_dim = dim;
    call.tokens = tokens;
    call.hidden = hidden;
    call.kv_index = index.data();
    call.inv_freq = frequencies.data();
    call.half_rotary = dim / 2;
    call.rope_scale = 1.0f;
    call.scale = 0.2f;
    call.softcap = below(2) ? 5.0f : 0.0f;
    call.window = static_cast<size_t>(below(2) * 30);
    call.x = x.data();
    call.positions = positions.data();
    call.sequence = sequence.data();
    call.tables = table.data();
    call.table_width = table.size();
    auto once = [&](const Kernels& kernels) {
        auto keys = cache, values = cache;
        call.keys = {keys.data(), kv_format, vector};
        call.values = {values.data(), kv_format, vector};
        return run(kernels.attention, call, tokens * hidden);
    };
    compare("attention", isa, once, is_quantised(format) ? 2e-2f : 5e-3f);
}

void check_rows(const Kernels& isa, Format format, bool tiled, size_t tokens, size_t hidden) {
    Weights table(format, tiled, 3, 32, hidden);
    auto x = floats(tokens * hidden);
    RowsCall call{table.matrix, tokens, x.data(), nullptr, nullptr};
    compare("rows", isa, [&](const Kernels& kernels) { return run(kernels.rows, call, tokens * 96); }, 2e-3f);
    DecodeCall all{table.matrix, nullptr, 96, nullptr};
    compare("decode", isa, [&](const Kernels& kernels) { return run(kernels.decode_rows, all, 96 * hidden); }, 1e-6f);
}

// Check one format with some counts of tokens, each with another KV format at every `turn`.
void check(const Kernels& isa, Format format, bool tiled, size_t turn) {
    constexpr size_t kTokens[] = {1, 3, 6, 19};
    constexpr KvFormat kKv[] = {KvFormat::f32, KvFormat::f16, KvFormat::q8, KvFormat::q4};
    for (size_t i = 0; i < 4; ++i) {
        check_ffn(isa, format, tiled, kTokens[i], 320);
        check_rows(isa, format, tiled, kTokens[i], 288);
        if (!is_quantised(format)) check_ffn(isa, format, tiled, kTokens[i], 43);
        check_attention(isa, format, tiled, kTokens[i], kKv[(i + turn) % 4]);
    }
}

std::vector<const Kernels*> tested_kernels() {
    std::vector<const Kernels*> tested = available_kernels();
#if defined(TPI_X86) && defined(__linux__)
    if (find_kernels("avx2") && !find_kernels("avx_vnni")) {
        emulated::begin();
        tested.push_back(&kAvxVnniKernels);
    }
#endif
    return tested;
}

}  // namespace

int main() {
    Pool::instance().resize(2);
    for (const Kernels* isa : tested_kernels()) {
        std::printf("%s\n", isa->name);
        generator.seed(1);  // the same blocks for each
        size_t turn = 0;
        for (Format format : {Format::f32, Format::bf16, Format::f16, Format::q8, Format::q4, Format::q4s})
            check(*isa, format, false, turn++);
        for (Format format : {Format::q8, Format::q4, Format::q4s, Format::mxfp4, Format::q6, Format::q5, Format::q3,
                              Format::q2, Format::iq4, Format::iq3s, Format::iq3, Format::iq2, Format::iq1, Format::nvfp4})
            check(*isa, format, true, turn++);
    }
    return failures ? 1 : 0;
}
