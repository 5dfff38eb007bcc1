#include "plans.hpp"

namespace tpi {

namespace {

// Transpose [channels, taps] into [taps, channels], so that neighbouring channels are computed together.
std::vector<float> by_tap(const std::vector<float>& weights, size_t taps) {
    std::vector<float> turned(weights.size());
    size_t channels = weights.size() / taps;
    for (size_t i = 0; i < weights.size(); ++i) turned[i % taps * channels + i / taps] = weights[i];
    return turned;
}

}  // namespace

// ---- all blocks with states ----

RecurrentPlan::RecurrentPlan(nb::tuple values, nb::tuple norm, size_t taps)
    : values_(values), norm_(norm, values_.hidden()), taps_(taps) {
    if (taps_ < 2) throw KernelError("a convolution over time needs two taps or more");
}

std::unique_ptr<Array> RecurrentPlan::weights(nb::handle data) const {
    return keep_array(data, "the weights", "B", {length(bytes())});
}

std::unique_ptr<Array> RecurrentPlan::states(nb::handle array) const {
    return keep_array(array, "the states", "f", {kAny, length(state_values())}, true);
}

StepStates RecurrentPlan::place(const Array& states, nb::handle sequence, nb::handle slots, size_t tokens) const {
    Array rows(sequence, "sequence", "i", {length(tokens)}), all_slots(slots, "the states' numbers", "i", {kAny, 4});
    check_indices(rows, "sequence", all_slots.size(0));
    const auto *row = rows.as<int32_t>(), *slot = all_slots.as<int32_t>();
    auto count = static_cast<int32_t>(states.size(0));
    StepStates found;
    for (size_t t = 0; t < tokens; ++t) {
        if (!t || row[t] != row[t - 1]) {
            const int32_t* own = slot + 4 * row[t];
            int32_t read = own[0], write = own[1], most = static_cast<int32_t>(kLater);
            if (read < -1 || read >= count || write < 0 || write >= count)
                throw KernelError("a state is outside the " + std::to_string(count) + " of this node");
            if (own[2] < 0 || own[2] > (read < 0 ? 0 : most) || own[3] < 0 || own[3] > most)
                throw KernelError("a state has fewer later tokens than the step names");
            auto* all = states.as<float>();
            size_t width = states.size(1);
            found.sequences.push_back({t, 0, read < 0 ? nullptr : all + static_cast<size_t>(read) * width,
                                       all + static_cast<size_t>(write) * width, static_cast<size_t>(own[2]),
                                       static_cast<size_t>(own[3])});
        }
        ++found.sequences.back().count;
        found.of_token.push_back(static_cast<uint32_t>(found.sequences.size() - 1));
    }
    for (const SequenceStates& one : found.sequences)
        if (one.later >= one.count) throw KernelError("the first token of a sequence in a step must change its state");
    return found;
}

void RecurrentPlan::prepare(nb::handle x, bool normed, PreparedInput& into) const {
    run_prepare(normed ? Norm{} : norm_.view(), x, hidden(), forms_, into);
}

void RecurrentPlan::run(nb::handle data, nb::handle x, nb::handle states, nb::handle sequence, nb::handle slots,
                        nb::handle out, nb::handle squares) const {
    auto held = weights(data), held_states = this->states(states);
    BlockInput input(x, hidden(), forms_);
    StepStates step = place(*held_states, sequence, slots, input.tokens());
    Array result(out, "out", "f", {length(input.tokens()), length(hidden())}, true);
    std::optional<Array> sums;
    if (!squares.is_none()) sums.emplace(squares, "squares", "f", Dims{length(input.tokens())}, true);
    if (empty() || !result.total()) {
        if (sums) zero(*sums);
        return zero(result);
    }
    nb::gil_scoped_release unlocked;
    compute(*held, step, input.tokens(), input.x(), input.prepared(), result.as<float>(),
            sums ? sums->as<float>() : nullptr);
}

// ---- gated short convolutions ----

ConvPlan::ConvPlan(nb::tuple values, nb::tuple norm, nb::tuple shape, nb::object weights)
    : RecurrentPlan(values, norm, field<size_t>(shape, 1)),
      channels_(field<size_t>(shape, 0)),
      weights_(keep_vector(weights, "the convolution", channels_ * taps_)) {
    if (values_.vectors() < channels_) throw KernelError("the run holds fewer vectors than there are channels");
    weights_ = by_tap(weights_, taps_);
    ConvCall all = call(nullptr);  // throws unless all parts are there
    forms_ = RowForms{&all.v, &all.input, &all.gate};
}

ConvCall ConvPlan::call(const uint8_t* data) const {
    ConvCall call{};
    call.v = values_.matrix("v", data);
    call.input = values_.matrix("input", data);
    call.gate = values_.matrix("gate", data);
    call.o = values_.matrix("o", data);
    call.norm = norm_.view();
    call.channels = channels_;
    call.taps = taps_;
    call.hidden = hidden();
    call.weights = weights_.data();
    return call;
}

void ConvPlan::compute(const Array& weights, const StepStates& states, size_t tokens, const float* x,
                       const Prepared* prepared, float* out, float*) const {
    ConvCall call = this->call(weights.as<uint8_t>());
    fill(call, states, tokens, x, prepared, out);
    run_alone(kernels().conv, call);
}

// ---- gated DeltaNet ----

DeltaPlan::DeltaPlan(nb::tuple values, nb::tuple keys, nb::tuple norm, nb::tuple shape, nb::object key_index,
                     nb::tuple vectors, size_t normed)
    : RecurrentPlan(values, norm, field<size_t>(shape, 4)),
      keys_(keys),
      heads_(field<size_t>(shape, 0)),
      key_heads_(field<size_t>(shape, 1)),
      key_(field<size_t>(shape, 2)),
      value_(field<size_t>(shape, 3)) {
    size_t hidden = values_.hidden(), keys_all = key_heads_ * key_, values_all = heads_ * value_;
    Array index(key_index, "key_index", "i", {length(heads_)});
    check_indices(index, "key head", key_heads_);
    key_index_.assign(index.as<int32_t>(), index.as<int32_t>() + heads_);
    const struct { const char* name; size_t count; } wanted[] = {
        {"a", heads_ * hidden}, {"b", heads_ * hidden}, {"decay", heads_}, {"decay_bias", heads_},
        {"conv_q", keys_all * taps_}, {"conv_k", keys_all * taps_}, {"conv_v", values_all * taps_}, {"out_norm", normed ? normed : value_}};
    for (size_t i = 0; i < kVectors; ++i) vectors_[i] = keep_vector(vectors[i], wanted[i].name, wanted[i].count);
    for (size_t i : {kFirstConvolution, kFirstConvolution + 1, kFirstConvolution + 2})
        vectors_[i] = by_tap(vectors_[i], taps_);
    if (keys_.hidden() != hidden) throw KernelError("the value and key runs differ in hidden size");
    if (values_.vectors() < values_all || keys_.vectors() < keys_all)
        throw KernelError("the runs hold fewer vectors than the heads need");
    DeltaCall all = call(nullptr);  // throws unless all parts are there
    forms_ = RowForms{&all.q, &all.k, &all.v, &all.gate};
}

DeltaCall DeltaPlan::call(const uint8_t* data) const {
    DeltaCall call{};
    const uint8_t* key_data = data ? data + values_.bytes() : nullptr;
    call.v = values_.matrix("v", data);
    call.gate = values_.matrix("gate", data);
    call.o = values_.matrix("o", data);
    call.q = keys_.matrix("q", key_data);
    call.k = keys_.matrix("k", key_data);
    call.norm = norm_.view();
    call.heads = heads_;
    call.key_heads = key_heads_;
    call.key = key_;
    call.value = value_;
    call.taps = taps_;
    call.hidden = hidden();
    call.key_index = key_index_.data();
    const float** to[kVectors] = {&call.a, &call.b, &call.decay, &call.decay_bias,
                                  &call.conv_q, &call.conv_k, &call.conv_v, &call.out_norm};
    for (size_t i = 0; i < kVectors; ++i) *to[i] = vectors_[i].data();
    return call;
}

void DeltaPlan::compute(const Array& weights, const StepStates& states, size_t tokens, const float* x,
                        const Prepared* prepared, float* out, float*) const {
    DeltaCall call = this->call(weights.as<uint8_t>());
    fill(call, states, tokens, x, prepared, out);
    run_alone(kernels().delta, call);
}

// ---- Mamba2 ----

MambaPlan::MambaPlan(nb::tuple values, nb::tuple keys, nb::tuple norm, nb::tuple shape, nb::object key_index,
                     nb::tuple vectors, nb::tuple numbers)
    : DeltaPlan(values, keys, norm, shape, key_index, vectors, field<size_t>(shape, 0) * field<size_t>(shape, 3)),
      conv_bias_(keep_vector(vectors[8], "the convolution's bias", 2 * key_heads_ * key_ + heads_ * value_)),
      skip_(keep_vector(vectors[9], "skip", heads_)),
      eps_(field<float>(numbers, 0)),
      least_step_(field<float>(numbers, 1)),
      most_step_(field<float>(numbers, 2)) {
    if (key_heads_ && heads_ % key_heads_) throw KernelError("the heads cannot be divided among the key heads");
}

void MambaPlan::compute(const Array& weights, const StepStates& states, size_t tokens, const float* x,
                        const Prepared* prepared, float* out, float* squares) const {
    MambaCall call{};
    static_cast<DeltaCall&>(call) = this->call(weights.as<uint8_t>());
    call.conv_bias = conv_bias_.empty() ? nullptr : conv_bias_.data();
    call.skip = skip_.data();
    call.eps = eps_;
    call.least_step = least_step_;
    call.most_step = most_step_;
    call.squares = squares;
    fill(call, states, tokens, x, prepared, out);
    run_alone(kernels().mamba, call);
}

}  // namespace tpi
