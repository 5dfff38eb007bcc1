#include "experts_plan.hpp"

#include <algorithm>
#include <numeric>

namespace tpi {

namespace {

RouterSettings settings_of(const nb::tuple& fields) {
    return {field<size_t>(fields, 0), field<size_t>(fields, 1), field<bool>(fields, 2),   field<bool>(fields, 3),
            field<float>(fields, 4),  field<size_t>(fields, 5), field<size_t>(fields, 6), field<size_t>(fields, 7)};
}

void check(const RouterSettings& s) {
    bool grouped = s.groups && s.experts % s.groups == 0 && s.groups_used >= 1 && s.groups_used <= s.groups &&
                   s.group_best >= 1 && s.group_best <= s.experts / s.groups;
    if (!grouped || s.used < 1 || s.used > s.experts / s.groups * s.groups_used)
        throw KernelError("so many experts cannot be chosen by their groups");
}

// Space for the experts that a token chose, in Python's arrays.
struct RoutingArrays {
    Array experts, weights;
    std::optional<Array> shared;

    RoutingArrays(nb::handle e, nb::handle w, nb::object s, size_t tokens, size_t used, bool writable)
        : experts(e, "the experts", "i", {length(tokens), length(used)}, writable),
          weights(w, "their weights", "f", {length(tokens), length(used)}, writable) {
        if (!s.is_none()) shared.emplace(s, "shared weights", "f", Dims{length(tokens)}, writable);
    }
};

}  // namespace

// ---- the router ----

RouterPlan::RouterPlan(nb::tuple settings, nb::tuple norm, nb::handle weight, nb::object bias, nb::object choice,
                       nb::object shared, nb::object factors)
    : settings_(settings_of(settings)),
      weight_(keep_array(weight, "the router", "f", {length(settings_.experts), kAny})),
      hidden_(weight_->size(1)),
      norm_(norm, hidden_),
      bias_(keep_vector(bias, "the router's bias", settings_.experts)),
      choice_(keep_vector(choice, "the bias of choice", settings_.experts)),
      shared_(keep_vector(shared, "the gate of shared experts", hidden_)),
      factors_(keep_vector(factors, "the factors of experts", settings_.experts)) {
    check(settings_);
    Matrix rows = matrix();
    forms_ = RowForms{&rows};
}

Matrix RouterPlan::matrix() const {
    size_t bytes = vector_bytes(Format::f32, hidden_);
    return {weight_->as<uint8_t>(), Format::f32, false, settings_.experts, 1, hidden_, bytes, bytes};
}

void RouterPlan::fit(size_t tokens, Routed& chosen) const {
    chosen.experts.resize(tokens * settings_.used);
    chosen.weights.resize(tokens * settings_.used);
    chosen.shared.resize(shared_.empty() ? 0 : tokens);
    chosen.logits.resize(tokens * settings_.experts);
    chosen.memory.fit(settings_);
}

void RouterPlan::choose(const Prepared& in, Routed& chosen) const {
    size_t used = settings_.used, count = settings_.experts;
    for (size_t t = 0; t < in.tokens; ++t)
        choose_experts(settings_, or_null(bias_), or_null(choice_), chosen.logits.data() + t * count, chosen.memory,
                       chosen.experts.data() + t * used, chosen.weights.data() + t * used);
    for (size_t i = 0; i < chosen.weights.size() && !factors_.empty(); ++i)
        chosen.weights[i] *= factors_[static_cast<size_t>(chosen.experts[i])];
    for (size_t t = 0; t < chosen.shared.size(); ++t)
        chosen.shared[t] = sigmoid(std::inner_product(shared_.begin(), shared_.end(), in.x + t * in.stride, 0.0f));
}

void RouterPlan::route(const Prepared& in, Routed& chosen) const {
    fit(in.tokens, chosen);
    run_alone(kernels().rows, RowsCall{matrix(), in.tokens, in.x, chosen.logits.data(), &in});
    choose(in, chosen);
}

void RouterPlan::route(nb::handle x, nb::handle experts, nb::handle weights, nb::object shared) const {
    BlockInput input(x, hidden_, forms_);
    PreparedInput own;
    if (!input.prepared()) run_prepare(norm_.view(), x, hidden_, forms_, own);
    const Prepared& in = input.prepared() ? *input.prepared() : own.view(hidden_, forms_.of(input.tokens()));
    RoutingArrays out(experts, weights, shared, in.tokens, settings_.used, true);
    if (shared_.empty() == out.shared.has_value())
        throw KernelError("shared weights need a router with a gate for shared experts, and such a router needs them");
    nb::gil_scoped_release unlocked;
    Routed chosen;
    route(in, chosen);
    std::copy(chosen.experts.begin(), chosen.experts.end(), out.experts.as<int32_t>());
    std::copy(chosen.weights.begin(), chosen.weights.end(), out.weights.as<float>());
    if (out.shared) std::copy(chosen.shared.begin(), chosen.shared.end(), out.shared->as<float>());
}

// ---- the experts ----

ExpertsPlan::ExpertsPlan(nb::object router, nb::object routed, nb::object shared,
                         std::vector<std::pair<size_t, size_t>> pieces, nb::object down_bias, std::vector<bool> begins)
    : kept_{router, routed, shared},
      router_(nb::cast<const RouterPlan*>(router)),
      routed_(nb::cast<const FfnPlan*>(routed)),
      shared_(shared.is_none() ? nullptr : nb::cast<const FfnPlan*>(shared)),
      pieces_(std::move(pieces)),
      begins_(std::move(begins)) {
    if (begins_.size() != pieces_.size())
        throw KernelError("the list of pieces that begin their expert must be as long as the list of pieces");
    if (!down_bias.is_none())
        down_bias_ = keep_array(down_bias, "the bias of down", "f", {length(router_->settings().experts), length(hidden())});
    size_t units = 0;
    for (auto [expert, count] : pieces_) {
        if (expert >= router_->settings().experts)
            throw KernelError("a piece belongs to an expert that does not exist");
        units += count;
    }
    if (units != routed_->run_layout().units()) throw KernelError("the pieces and their run differ in units");
    if (routed_->hidden() != hidden() || (shared_ && shared_->hidden() != hidden()))
        throw KernelError("experts differ from their router in hidden size");
    forms_ = shared_ ? routed_->forms() | shared_->forms() : routed_->forms();
}

size_t ExpertsPlan::bytes() const { return shared_bytes() + routed_->run_layout().bytes(); }

std::unique_ptr<Array> ExpertsPlan::weights(nb::handle data) const {
    return keep_array(data, "the weights", "B", {length(bytes())});
}

void ExpertsPlan::prepare(nb::handle x, bool normed, PreparedInput& into) const {
    run_prepare(normed ? Norm{} : router_->norm(), x, hidden(), forms_, into);
}

void ExpertsPlan::run(nb::handle data, nb::handle x, nb::handle experts, nb::handle weights, nb::object shared,
                      nb::handle out) const {
    auto held = this->weights(data);
    BlockInput input(x, hidden(), forms_);
    PreparedInput own;
    if (!input.prepared()) prepare(x, false, own);
    const Prepared& in = input.prepared() ? *input.prepared() : own.view(hidden(), forms_.of(input.tokens()));
    RoutingArrays chosen(experts, weights, shared, in.tokens, router_->settings().used, false);
    check_indices(chosen.experts, "an expert", router_->settings().experts);
    Array result(out, "out", "f", {length(in.tokens), length(hidden())}, true);
    PartList list;
    nb::gil_scoped_release unlocked;
    compute(together(held->as<uint8_t>()), in, chosen.experts.as<int32_t>(), chosen.weights.as<float>(),
            chosen.shared ? chosen.shared->as<float>() : nullptr, result.as<float>(), list);
}

void ExpertsPlan::run_pieces(std::vector<std::pair<size_t, nb::object>> data, nb::object beside, nb::handle x,
                             nb::handle experts, nb::handle weights, nb::object shared, nb::handle out) const {
    std::vector<std::unique_ptr<Array>> held;
    Weights places{nullptr, std::vector<const uint8_t*>(pieces_.size(), nullptr)};
    for (const auto& [piece, bytes] : data) {
        if (piece >= pieces_.size()) throw KernelError("weights were given for a piece that does not exist");
        size_t size = pieces_[piece].second * routed_->run_layout().unit_bytes();
        held.push_back(keep_array(bytes, "the weights of a piece", "B", {length(size)}));
        places.pieces[piece] = held.back()->as<uint8_t>();
    }
    if (!beside.is_none()) {
        if (!shared_) throw KernelError("weights were given for shared experts, but this block has none");
        held.push_back(keep_array(beside, "the weights of the shared experts", "B", {length(shared_bytes())}));
        places.shared = held.back()->as<uint8_t>();
    }
    BlockInput input(x, hidden(), forms_);
    PreparedInput own;
    if (!input.prepared()) prepare(x, false, own);
    const Prepared& in = input.prepared() ? *input.prepared() : own.view(hidden(), forms_.of(input.tokens()));
    RoutingArrays chosen(experts, weights, shared, in.tokens, router_->settings().used, false);
    check_indices(chosen.experts, "an expert", router_->settings().experts);
    Array result(out, "out", "f", {length(in.tokens), length(hidden())}, true);
    PartList list;
    nb::gil_scoped_release unlocked;
    compute(places, in, chosen.experts.as<int32_t>(), chosen.weights.as<float>(),
            chosen.shared ? chosen.shared->as<float>() : nullptr, result.as<float>(), list);
}

ExpertsPlan::Weights ExpertsPlan::together(const uint8_t* data) const {
    Weights found{shared_ ? data : nullptr, {}};
    data += shared_bytes();
    for (auto [expert, units] : pieces_) {
        found.pieces.push_back(data);
        data += units * routed_->run_layout().unit_bytes();
    }
    return found;
}

void ExpertsPlan::whole(const Weights& data, size_t tokens, const float* x, float* out, ExpertsMemory& memory) const {
    if (tokens <= kStreamTokens) return whole_in_one_job(data, tokens, x, out, memory);
    const Prepared& in = memory.prepared.take(tokens, hidden(), forms_.of(tokens));
    run_alone(kernels().prepare, PrepareCall{router_->norm(), hidden(), x, in});
    Routed& chosen = memory.routed;
    router_->route(in, chosen);
    compute(data, in, chosen.experts.data(), chosen.weights.data(), or_null(chosen.shared), out, memory.list);
}

void ExpertsPlan::whole_in_one_job(const Weights& data, size_t tokens, const float* x, float* out,
                                   ExpertsMemory& memory) const {
    struct Context {
        const ExpertsPlan& plan;
        const Weights& data;
        ExpertsMemory& memory;
    } context{*this, data, memory};
    router_->fit(tokens, memory.routed);
    fit(tokens, data, memory.list);
    auto choose = [](void* any, const Prepared& in) {
        auto& [plan, places, own] = *static_cast<Context*>(any);
        Routed& chosen = own.routed;
        plan.router_->choose(in, chosen);
        plan.list_parts(places, in.tokens, chosen.experts.data(), chosen.weights.data(), or_null(chosen.shared), own.list);
        own.chosen = own.list.view();
    };
    RoutingCall routing{router_->norm(), x, forms_.of(tokens), router_->matrix(), memory.routed.logits.data(),
                        choose, &context};
    ExpertsCall call = this->call(data, tokens, memory.chosen, out);
    call.routing = &routing;
    run_alone(kernels().experts, call);
    if (down_bias_)
        add_biases(data, tokens, memory.routed.experts.data(), memory.routed.weights.data(), out);
}

// Allocate what `list_parts` needs for so many tokens.
void ExpertsPlan::fit(size_t tokens, const Weights& data, PartList& list) const {
    size_t experts = router_->settings().experts, count = pairs(tokens, data);
    list.parts.reserve(pieces_.size() + 1);
    list.token.resize(count);
    list.weight.resize(count);
    list.first.reserve(experts + 1);
    list.next.reserve(experts + 1);
}

void ExpertsPlan::list_parts(const Weights& data, size_t tokens, const int32_t* experts, const float* weights,
                             const float* shared, PartList& list) const {
    size_t used = router_->settings().used, routed = tokens * used;
    std::vector<size_t>&first = list.first, &next = list.next;
    first.assign(router_->settings().experts + 1, 0);
    for (size_t i = 0; i < routed; ++i) ++first[static_cast<size_t>(experts[i]) + 1];
    std::partial_sum(first.begin(), first.end(), first.begin());
    next = first;
    for (size_t i = 0; i < routed; ++i) {
        size_t at = next[static_cast<size_t>(experts[i])]++;
        list.token[at] = static_cast<int32_t>(i / used);
        list.weight[at] = weights[i];
    }
    list.parts.clear();
    auto add = [&](FfnCall call, size_t at, size_t count, size_t turn) {
        call.weights = list.weight.data() + at;
        call.tokens = count;
        list.parts.push_back({call, at, turn});
    };
    if (data.shared) {
        for (size_t t = 0; t < tokens; ++t) {
            list.token[routed + t] = static_cast<int32_t>(t);
            list.weight[routed + t] = shared ? shared[t] : 1.0f;
        }
        size_t units = shared_->run_layout().units();
        if (units) add(shared_->call(data.shared, 0, units), routed, tokens, 0);
    }
    size_t unit = 0;
    for (size_t piece = 0; piece < pieces_.size(); ++piece) {
        auto [expert, units] = pieces_[piece];
        size_t count = first[expert + 1] - first[expert];
        if (count && units && data.pieces[piece])
            add(routed_->call(data.pieces[piece], unit, units), first[expert], count, piece);
        unit += units;
    }
}

// The call for such weights, without its input.
ExpertsCall ExpertsPlan::call(const Weights& data, size_t tokens, const ExpertParts& chosen, float* out) const {
    ExpertsCall call{};
    call.chosen = &chosen;
    call.pairs = pairs(tokens, data);
    call.floats = !routed_->run_layout().tiled() || (data.shared && !shared_->run_layout().tiled());
    call.width = std::max(routed_->run_layout().width(), data.shared ? shared_->run_layout().width() : 0);
    call.tokens = tokens;
    call.hidden = hidden();
    call.out = out;
    return call;
}

void ExpertsPlan::compute(const Weights& data, const Prepared& in, const int32_t* experts, const float* weights,
                          const float* shared, float* out, PartList& list) const {
    if (!in.tokens) return;
    fit(in.tokens, data, list);
    list_parts(data, in.tokens, experts, weights, shared, list);
    if (list.parts.empty()) {
        std::memset(out, 0, in.tokens * hidden() * sizeof(float));
        return;
    }
    ExpertParts chosen = list.view();
    ExpertsCall call = this->call(data, in.tokens, chosen, out);
    call.prepared = &in;
    run_alone(kernels().experts, call);
    if (down_bias_) add_biases(data, in.tokens, experts, weights, out);
}

void ExpertsPlan::add_biases(const Weights& data, size_t tokens, const int32_t* experts, const float* weights,
                             float* out) const {
    size_t used = router_->settings().used, width = hidden();
    std::vector<const float*> biases(router_->settings().experts, nullptr);
    for (size_t piece = 0; piece < pieces_.size(); ++piece) {
        size_t expert = pieces_[piece].first;
        if (begins_[piece] && data.pieces[piece]) biases[expert] = down_bias_->as<float>() + expert * width;
    }
    for (size_t i = 0; i < tokens * used; ++i) {
        const float* bias = biases[static_cast<size_t>(experts[i])];
        float* to = out + i / used * width;
        for (size_t k = 0; bias && k < width; ++k) to[k] += weights[i] * bias[k];
    }
}

}  // namespace tpi
