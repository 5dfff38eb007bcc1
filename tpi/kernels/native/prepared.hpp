// A block's input from Python: x itself, or an input that one call prepared for all of the block's segments.
#pragma once

#include <initializer_list>
#include <optional>
#include <utility>

#include "arrays.hpp"
#include "pool.hpp"
#include "types.hpp"

namespace tpi {

// The normed and rounded input of a block. Its memory is reused.
class PreparedInput {
public:
    PreparedInput() = default;
    PreparedInput(const PreparedInput&) = delete;
    // Take memory for `tokens` tokens in `forms`; the caller fills it.
    const Prepared& take(size_t tokens, size_t hidden, const Forms& forms);
    // Throws unless it has the forms that a block of this hidden size needs.
    const Prepared& view(size_t hidden, const Forms& forms) const;
    size_t tokens() const { return prepared_.tokens; }
    size_t hidden() const { return hidden_; }
    // The normed floats, [tokens, hidden].
    void copy(nb::handle out) const;

private:
    Arena memory_;
    Prepared prepared_{};
    size_t hidden_ = 0;
};

// The forms that a block's row parts need of a short step's input, and of a long one's.
struct RowForms {
    Forms few, many;

    RowForms(std::initializer_list<const Matrix*> rows)
        : few(forms_of(rows.begin(), rows.size(), 1)), many(forms_of(rows.begin(), rows.size(), kStreamTokens + 1)) {}
    const Forms& of(size_t tokens) const { return tokens > kStreamTokens ? many : few; }
    // The forms that either of the two needs.
    RowForms operator|(const RowForms& other) const {
        RowForms both = *this;
        for (auto [mine, its] : {std::pair{&both.few, &other.few}, std::pair{&both.many, &other.many}}) {
            mine->rounded |= its->rounded;
            mine->fine |= its->fine;
            mine->kept |= its->kept;
        }
        return both;
    }
};

// An array or a prepared input, checked.
class BlockInput {
public:
    BlockInput(nb::handle x, size_t hidden, const RowForms& forms);
    size_t tokens() const { return prepared_ ? prepared_->tokens : array_->size(0); }
    const float* x() const { return array_ ? array_->as<float>() : nullptr; }
    const Prepared* prepared() const { return prepared_; }

private:
    std::optional<Array> array_;
    const Prepared* prepared_ = nullptr;
};

// Fill `into` with x in the needed forms, after the norm (if the norm has no weight, without one).
void run_prepare(const Norm& norm, nb::handle x, size_t hidden, const RowForms& forms, PreparedInput& into);

}  // namespace tpi
