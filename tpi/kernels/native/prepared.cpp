#include "prepared.hpp"

#include <cstring>

#include "plans.hpp"

namespace tpi {

const Prepared& PreparedInput::take(size_t tokens, size_t hidden, const Forms& forms) {
    memory_.begin();
    prepared_ = {};
    hidden_ = 0;  // no tokens until there is memory for all buffers
    Prepared all{};
    all.tokens = tokens;
    all.stride = round_up(hidden, kGroup);
    size_t values = tokens * all.stride, groups = values / kGroup;
    all.x = memory_.take<float>(values);
    // always in the same order, so that every use finds the memory of the one before
    auto* codes = memory_.take<int8_t>(forms.rounded ? values : 0);
    auto* scale = memory_.take<float>(forms.rounded ? groups : 0);
    auto* sum = memory_.take<float>(forms.rounded ? groups : 0);
    auto* half = memory_.take<float>(forms.rounded ? groups : 0);
    bool many = tokens > kStreamTokens;
    auto* whole = memory_.take<CodeSums>(forms.rounded && many ? groups : 0);
    auto* fine = memory_.take<int8_t>(forms.fine ? values : 0);
    auto* kept = memory_.take<float>(forms.kept ? values : 0);
    if (forms.rounded)
        all.rounded = {codes, forms.fine ? fine : nullptr, many ? whole : nullptr, scale, sum, half, all.stride};
    if (forms.kept) all.kept = kept;
    hidden_ = hidden;
    return prepared_ = all;
}

const Prepared& PreparedInput::view(size_t hidden, const Forms& forms) const {
    if (hidden != hidden_)
        throw KernelError("the prepared input has the hidden size " + std::to_string(hidden_) + "; this block has " +
                          std::to_string(hidden));
    const Rounded& rounded = prepared_.rounded;
    if ((forms.rounded && !rounded.codes) || (forms.fine && !rounded.fine) || (forms.kept && !prepared_.kept))
        throw KernelError("the input was prepared for weights of another format");
    return prepared_;
}

void PreparedInput::copy(nb::handle out) const {
    Array result(out, "out", "f", {static_cast<Py_ssize_t>(tokens()), static_cast<Py_ssize_t>(hidden_)}, true);
    for (size_t t = 0; t < tokens(); ++t)
        std::memcpy(result.as<float>() + t * hidden_, prepared_.x + t * prepared_.stride, hidden_ * sizeof(float));
}

BlockInput::BlockInput(nb::handle x, size_t hidden, const RowForms& forms) {
    if (!nb::isinstance<PreparedInput>(x)) {
        array_.emplace(x, "x", "f", std::initializer_list<Py_ssize_t>{kAny, static_cast<Py_ssize_t>(hidden)});
        return;
    }
    const auto& given = *nb::inst_ptr<PreparedInput>(x);
    prepared_ = &given.view(hidden, forms.of(given.tokens()));
}

void run_prepare(const Norm& norm, nb::handle x, size_t hidden, const RowForms& forms, PreparedInput& into) {
    Array input(x, "x", "f", {kAny, static_cast<Py_ssize_t>(hidden)});
    const Prepared& out = into.take(input.size(0), hidden, forms.of(input.size(0)));
    launch(kernels().prepare, PrepareCall{norm, hidden, input.as<float>(), out});
}

}  // namespace tpi
