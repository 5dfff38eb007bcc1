// A block of experts as a Python object: its router, its pieces, and the computation for a routing.
#pragma once

#include "plans.hpp"
#include "routing.hpp"

namespace tpi {

// The experts that the tokens of a step chose; `shared` is empty if shared experts have no weights.
struct Routed {
    std::vector<int32_t> experts;  // [tokens, used]
    std::vector<float> weights;    // [tokens, used]
    std::vector<float> shared;     // [tokens]
    // Of the choice itself, reused by the next one.
    std::vector<float> logits;     // [tokens, experts]
    RouterMemory memory;
};

// The parts that some tokens use, and their pairs: for each expert the tokens that chose it, in order.
struct PartList {
    std::vector<ExpertPart> parts;
    std::vector<int32_t> token;
    std::vector<float> weight;
    std::vector<size_t> first, next;  // scratch: the first pair of each expert, and the next to be set

    ExpertParts view() const { return {parts.data(), parts.size(), token.data()}; }
};

// What a chain's blocks of experts need for a step. A later step reuses it, and then allocates nothing.
struct ExpertsMemory {
    PreparedInput prepared;
    Routed routed;
    PartList list;
    ExpertParts chosen;
};

class RouterPlan {
public:
    // settings: (experts, used, sigmoid, normalised, scale, groups, groups_used, group_best)
    RouterPlan(nb::tuple settings, nb::tuple norm, nb::handle weight, nb::object bias, nb::object choice,
               nb::object shared, nb::object factors);
    void route(nb::handle x, nb::handle experts, nb::handle weights, nb::object shared) const;
    // Call without the interpreter's lock.
    void route(const Prepared& in, Routed& chosen) const;
    // The parts of `route`: allocate memory for so many tokens; choose their experts by the logits in `chosen`.
    void fit(size_t tokens, Routed& chosen) const;
    void choose(const Prepared& in, Routed& chosen) const;
    Matrix matrix() const;

    const RouterSettings& settings() const { return settings_; }
    size_t hidden() const { return hidden_; }
    Norm norm() const { return norm_.view(); }

private:
    RouterSettings settings_;
    std::unique_ptr<Array> weight_;  // [experts, hidden], in Python's memory
    size_t hidden_;
    NormPlan norm_;
    std::vector<float> bias_, choice_, shared_, factors_;
    RowForms forms_{};
};

class ExpertsPlan {
public:
    // pieces: (expert, units) in the order of their weights, which come after those of the shared experts
    // down_bias: [experts, hidden] or None, added by the pieces that begin their experts
    ExpertsPlan(nb::object router, nb::object routed, nb::object shared, std::vector<std::pair<size_t, size_t>> pieces,
                nb::object down_bias, std::vector<bool> begins);
    void prepare(nb::handle x, bool normed, PreparedInput& into) const;
    void run(nb::handle data, nb::handle x, nb::handle experts, nb::handle weights, nb::object shared,
             nb::handle out) const;
    // Compute only some pieces, (number, weights) each, whose weights lie anywhere; the shared experts if `beside` has
    // theirs.
    void run_pieces(std::vector<std::pair<size_t, nb::object>> data, nb::object beside, nb::handle x,
                    nb::handle experts, nb::handle weights, nb::object shared, nb::handle out) const;

    // Places of the weights: of the shared experts, and of each piece; null leaves them out.
    struct Weights {
        const uint8_t* shared;
        std::vector<const uint8_t*> pieces;
    };
    // The places if all weights are at `data`, the shared experts' first.
    Weights together(const uint8_t* data) const;

    // For a chain: the whole block, from its input to its result. A short step is one job of the pool.
    size_t hidden() const { return router_->hidden(); }
    bool empty() const { return bytes() == 0; }
    std::unique_ptr<Array> weights(nb::handle data) const;
    void whole(const Weights& data, size_t tokens, const float* x, float* out, ExpertsMemory& memory) const;

private:
    size_t bytes() const;
    size_t shared_bytes() const { return shared_ ? shared_->run_layout().bytes() : 0; }
    size_t pairs(size_t tokens, const Weights& data) const {
        return tokens * (router_->settings().used + (data.shared ? 1 : 0));
    }
    void fit(size_t tokens, const Weights& data, PartList& list) const;
    void list_parts(const Weights& data, size_t tokens, const int32_t* experts, const float* weights,
                    const float* shared, PartList& list) const;
    ExpertsCall call(const Weights& data, size_t tokens, const ExpertParts& chosen, float* out) const;
    void compute(const Weights& data, const Prepared& in, const int32_t* experts, const float* weights,
                 const float* shared, float* out, PartList& list) const;
    void whole_in_one_job(const Weights& data, size_t tokens, const float* x, float* out, ExpertsMemory& memory) const;
    void add_biases(const Weights& data, size_t tokens, const int32_t* experts, const float* weights, float* out) const;

    nb::object kept_[3];
    const RouterPlan* router_;
    const FfnPlan *routed_, *shared_;  // shared: or null
    std::vector<std::pair<size_t, size_t>> pieces_;
    std::vector<bool> begins_;          // of each piece
    std::unique_ptr<Array> down_bias_;  // in Python's memory; or null
    RowForms forms_{};
};

}  // namespace tpi
