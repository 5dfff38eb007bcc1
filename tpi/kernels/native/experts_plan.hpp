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
};

class RouterPlan {
public:
    // settings: (experts, used, sigmoid, normalised, scale, groups, groups_used, group_best)
    RouterPlan(nb::tuple settings, nb::tuple norm, nb::handle weight, nb::object bias, nb::object choice,
               nb::object shared, nb::object factors);
    void route(nb::handle x, nb::handle experts, nb::handle weights, nb::object shared) const;
    // Call without the interpreter's lock.
    Routed route(const Prepared& in) const;

    const RouterSettings& settings() const { return settings_; }
    size_t hidden() const { return hidden_; }
    Norm norm() const { return norm_.view(); }

private:
    Matrix matrix() const;

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

    // For a chain: the whole block, from its input to its result.
    size_t hidden() const { return router_->hidden(); }
    bool empty() const { return bytes() == 0; }
    std::unique_ptr<Array> weights(nb::handle data) const;
    void whole(const Array& weights, size_t tokens, const float* x, float* out, PreparedInput& memory) const;

private:
    struct Parts;
    // Places of the weights: of the shared experts, and of each piece; null leaves them out.
    struct Weights {
        const uint8_t* shared;
        std::vector<const uint8_t*> pieces;
    };
    size_t bytes() const;
    size_t shared_bytes() const { return shared_ ? shared_->run_layout().bytes() : 0; }
    Weights together(const uint8_t* data) const;
    Parts parts_of(const Weights& data, size_t tokens, const int32_t* experts, const float* weights,
                   const float* shared) const;
    void compute(const Weights& data, const Prepared& in, const int32_t* experts, const float* weights,
                 const float* shared, float* out) const;

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
