#include "chain.hpp"

#include <chrono>

namespace tpi {

namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::milliseconds kDeaf{50};  // the most that Ctrl-C waits, in addition to the running block

template <class Plan> void check_plan(const Plan& plan, size_t hidden) {
    if (plan.hidden() != hidden) throw KernelError("a block differs from its chain in hidden size");
    if (plan.empty()) throw KernelError("a chain needs whole blocks, but this one has no units on this node");
}

// Let Python handle the signals that have arrived; throws what a handler raises.
void heed_signals() {
    nb::gil_scoped_acquire locked;
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
}

}  // namespace

void Residual::add(float* x, float* partial, size_t tokens, size_t hidden) const {
    for (size_t t = 0; t < tokens && !bias.empty(); ++t)
        for (size_t i = 0; i < hidden; ++i) partial[t * hidden + i] += bias[i];
    if (norm) kernels().norm({norm->view(), tokens, hidden, partial, partial}, Pool::instance());
    for (size_t i = 0; i < tokens * hidden; ++i) x[i] += partial[i];
    if (scale == 1.0f) return;
    for (size_t i = 0; i < tokens * hidden; ++i) x[i] *= scale;
}

Residual Chain::keep_residual(nb::tuple residual) const {
    Residual kept{keep_vector(residual[0], "the output's bias", hidden_), std::nullopt, field<float>(residual, 2)};
    if (!residual[1].is_none()) kept.norm.emplace(nb::cast<nb::tuple>(residual[1]), hidden_);
    return kept;
}

void Chain::attention(nb::object plan, nb::handle data, nb::handle keys, nb::handle values, nb::tuple residual) {
    const auto* kernel = nb::cast<const AttentionPlan*>(plan);
    check_plan(*kernel, hidden_);
    stages_.push_back({std::move(plan), kernel, nullptr, nullptr, nullptr, kernel->weights(data),
                       kernel->cache(keys, "the key cache"), kernel->cache(values, "the value cache"),
                       keep_residual(residual)});
}

void Chain::ffn(nb::object plan, nb::handle data, nb::tuple residual) {
    const auto* kernel = nb::cast<const FfnPlan*>(plan);
    check_plan(*kernel, hidden_);
    stages_.push_back({std::move(plan), nullptr, kernel, nullptr, nullptr, kernel->weights(data), nullptr, nullptr,
                       keep_residual(residual)});
}

void Chain::recur(nb::object plan, nb::handle data, nb::handle states, nb::tuple residual) {
    const auto* kernel = nb::cast<const RecurrentPlan*>(plan);
    check_plan(*kernel, hidden_);
    stages_.push_back({std::move(plan), nullptr, nullptr, nullptr, kernel, kernel->weights(data), nullptr, nullptr,
                       keep_residual(residual), kernel->states(states)});
}

void Chain::experts(nb::object plan, nb::handle data, nb::tuple residual) {
    const auto* kernel = nb::cast<const ExpertsPlan*>(plan);
    check_plan(*kernel, hidden_);
    auto weights = kernel->weights(data);
    ExpertsPlan::Weights places = kernel->together(weights->as<uint8_t>());
    stages_.push_back({std::move(plan), nullptr, nullptr, kernel, nullptr, std::move(weights), nullptr, nullptr,
                       keep_residual(residual), nullptr, std::move(places)});
}

void Chain::compute(const Stage& stage, const BatchArrays& batch, const StepStates* states, size_t tokens,
                    const float* in, float* out) const {
    if (stage.experts) return stage.experts->whole(stage.places, tokens, in, out, memory_);
    if (stage.recurrent) return stage.recurrent->compute(*stage.data, *states, tokens, in, nullptr, out, nullptr);
    if (stage.attention)
        run_alone(kernels().attention, stage.attention->call(*stage.data, *stage.keys, *stage.values, batch, in, out));
    else
        run_alone(kernels().ffn, stage.ffn->call(*stage.data, tokens, in, out));
}

void Chain::run(nb::handle x, nb::handle positions, nb::handle sequence, nb::handle tables, nb::handle slots,
                nb::handle partial, nb::handle ended) const {
    Array values(x, "x", "f", {kAny, length(hidden_)}, true);
    size_t tokens = values.size(0);
    Array between(partial, "partial", "f", {length(tokens), length(hidden_)}, true);
    BatchArrays batch(positions, sequence, tables, tokens);
    std::optional<Array> ends;
    if (!ended.is_none()) ends.emplace(ended, "ended", "lq", Dims{length(stages_.size())}, true);
    for (const Stage& stage : stages_)
        if (stage.attention) stage.attention->check_batch(batch, *stage.keys, *stage.values);
    std::vector<StepStates> states;  // of each block with states, in order
    for (const Stage& stage : stages_)
        if (stage.recurrent) states.push_back(stage.recurrent->place(*stage.states, sequence, slots, tokens));
    if (!tokens) return;
    const StepStates* next = states.data();
    auto *in = values.as<float>(), *out = between.as<float>();
    auto* end = ends ? ends->as<int64_t>() : nullptr;
    nb::gil_scoped_release unlocked;
    const auto began = Clock::now();
    auto heeded = began;
    for (const Stage& stage : stages_) {
        compute(stage, batch, stage.recurrent ? next++ : nullptr, tokens, in, out);
        stage.residual.add(in, out, tokens, hidden_);
        auto now = Clock::now();
        if (end) *end++ = std::chrono::nanoseconds(now - began).count();
        if (now - heeded > kDeaf) {
            heed_signals();
            heeded = now;
        }
    }
}

}  // namespace tpi
