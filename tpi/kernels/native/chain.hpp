// Half-blocks in sequence in one call, for a node that holds the whole model in memory. Between two of them there is
// only the residual connection, and returning to Python for it costs more than many of the half-blocks.
#pragma once

#include <memory>
#include <optional>

#include "experts_plan.hpp"

namespace tpi {

// The end of a block: bias, optional norm of the output (Gemma 2), and the residual connection.
struct Residual {
    std::vector<float> bias;  // empty for none
    std::optional<NormPlan> norm;
    float scale;  // of the hidden states after the addition

    // x = (x + partial) * scale, after bias and norm; both are [tokens, hidden], and `partial` is overwritten
    void add(float* x, float* partial, size_t tokens, size_t hidden) const;
};

class Chain {
public:
    explicit Chain(size_t hidden) : hidden_(hidden) {}
    Chain(const Chain&) = delete;
    // Append a block; the chain keeps its plan and its arrays. `residual` is (bias, norm, scale); the first two may be None.
    void attention(nb::object plan, nb::handle data, nb::handle keys, nb::handle values, nb::tuple residual);
    void recur(nb::object plan, nb::handle data, nb::handle states, nb::tuple residual);
    void ffn(nb::object plan, nb::handle data, nb::tuple residual);
    void experts(nb::object plan, nb::handle data, nb::tuple residual);
    // Run all blocks on x, in place; `partial` has the same size and is overwritten. `ended` is None or [blocks] int64,
    // which is set to the nanoseconds from the beginning of the first block to the end of each.
    // `slots` is that of `RecurrentPlan::place`; None if no block has states.
    void run(nb::handle x, nb::handle positions, nb::handle sequence, nb::handle tables, nb::handle slots,
             nb::handle partial, nb::handle ended) const;

private:
    struct Stage {
        nb::object plan;
        const AttentionPlan* attention;  // or null
        const FfnPlan* ffn;              // or null
        const ExpertsPlan* experts;      // or null
        const RecurrentPlan* recurrent;  // or null
        std::unique_ptr<Array> data, keys, values;
        Residual residual;
        std::unique_ptr<Array> states{};  // of a block with states
        ExpertsPlan::Weights places{};    // of a block of experts
    };
    void compute(const Stage& stage, const BatchArrays& batch, const StepStates* states, size_t tokens, const float* in,
                 float* out) const;
    Residual keep_residual(nb::tuple residual) const;

    size_t hidden_;
    std::vector<Stage> stages_;
    mutable ExpertsMemory memory_;  // of the experts that run, one call at a time
};

}  // namespace tpi
