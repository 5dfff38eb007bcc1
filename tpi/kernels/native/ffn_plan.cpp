#include <nanobind/stl/string.h>

#include "plans.hpp"

namespace tpi {

namespace {

Activation activation_of(const std::string& name) {
    if (name == "silu") return Activation::silu;
    if (name == "gelu") return Activation::gelu;
    if (name == "gelu_tanh") return Activation::gelu_tanh;
    if (name == "relu") return Activation::relu;
    if (name == "relu2") return Activation::relu2;
    if (name == "fatrelu") return Activation::fatrelu;
    if (name == "drelu") return Activation::drelu;
    if (name == "swiglu_clamped") return Activation::swiglu_clamped;
    throw KernelError("unknown activation " + name);
}

}  // namespace

FfnPlan::FfnPlan(nb::tuple neuron, nb::tuple norm, const std::string& activation, bool gated, nb::object gate_bias,
                 nb::object up_bias, float threshold, float slope)
    : neuron_(neuron),
      norm_(norm, neuron_.hidden()),
      activation_(activation_of(activation)),
      threshold_(threshold),
      slope_(slope),
      gated_(gated),
      gate_bias_(keep_vector(gate_bias, "gate_bias", neuron_.vectors())),
      up_bias_(keep_vector(up_bias, "up_bias", neuron_.vectors())) {
    neuron_.matrix("down", nullptr);
    Matrix up = neuron_.matrix("up", nullptr);
    if (!gated_) {
        if (activation_ == Activation::swiglu_clamped) throw KernelError("swiglu_clamped needs a gate");
        forms_ = RowForms{&up};
        return;
    }
    Matrix first = neuron_.matrix("gate", nullptr);
    forms_ = RowForms{&up, &first};
}

std::unique_ptr<Array> FfnPlan::weights(nb::handle data) const {
    return keep_array(data, "the weights", "B", {length(neuron_.bytes())});
}

FfnCall FfnPlan::call(const Array& weights, size_t tokens, const float* x, float* out) const {
    FfnCall call{};
    const uint8_t* data = weights.as<uint8_t>();
    if (gated_) call.gate = neuron_.matrix("gate", data);
    call.up = neuron_.matrix("up", data);
    call.down = neuron_.matrix("down", data);
    call.norm = norm_.view();
    call.activation = activation_;
    call.threshold = threshold_;
    call.slope = slope_;
    call.gate_bias = or_null(gate_bias_);
    call.up_bias = or_null(up_bias_);
    call.tokens = tokens;
    call.hidden = neuron_.hidden();
    call.x = x;
    call.out = out;
    return call;
}

FfnCall FfnPlan::call(const uint8_t* data, size_t first, size_t units) const {
    FfnCall call{};
    if (gated_) call.gate = neuron_.matrix("gate", data, 0, units);
    call.up = neuron_.matrix("up", data, 0, units);
    call.down = neuron_.matrix("down", data, 0, units);
    call.activation = activation_;
    call.threshold = threshold_;
    call.slope = slope_;
    size_t neuron = first * neuron_.width();
    call.gate_bias = gate_bias_.empty() ? nullptr : gate_bias_.data() + neuron;
    call.up_bias = up_bias_.empty() ? nullptr : up_bias_.data() + neuron;
    call.hidden = neuron_.hidden();
    return call;
}

void FfnPlan::prepare(nb::handle x, bool normed, PreparedInput& into) const {
    run_prepare(normed ? Norm{} : norm_.view(), x, hidden(), forms_, into);
}

void FfnPlan::run(nb::handle data, nb::handle x, nb::handle active, nb::handle out) const {
    auto held = weights(data);
    BlockInput input(x, hidden(), forms_);
    Array result(out, "out", "f", {length(input.tokens()), length(hidden())}, true);
    FfnCall call = this->call(*held, input.tokens(), input.x(), result.as<float>());
    call.prepared = input.prepared();
    if (!call.tokens || !neuron_.units()) return zero(result);
    if (active.is_none()) return launch(kernels().ffn, call);
    if (neuron_.tiled())
        throw KernelError("a list of active neurons needs a pack in the record layout; this one is tiled");
    Array list(active, "the list of active neurons", "i", {kAny});
    check_indices(list, "active neuron", neuron_.vectors());
    if (!list.total()) return zero(result);
    call.active = list.as<int32_t>();
    call.active_count = list.total();
    launch(kernels().ffn, call);
}

}  // namespace tpi
