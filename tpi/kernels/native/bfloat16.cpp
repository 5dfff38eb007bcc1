#include "bfloat16.hpp"

#include "bfloat16_values.hpp"

namespace tpi {

namespace {

// The bytes of `count` values in `raw` from `offset` on.
const uint8_t* payload(const Array& raw, size_t offset, size_t count) {
    if (offset > raw.total() || raw.total() - offset < 2 * count)
        throw KernelError("the bytes end before " + std::to_string(count) + " bfloat16 values do");
    return raw.as<uint8_t>() + offset;
}

}  // namespace

void to_bf16(nb::handle values, nb::handle raw) {
    Array from(values, "values", "f", {kAny}), to(raw, "raw", "B", {kAny}, true);
    payload(to, 0, from.total());
    narrow(from.as<float>(), from.total(), to.as<uint8_t>());
}

void from_bf16(nb::handle raw, size_t offset, nb::handle out) {
    Array from(raw, "raw", "B", {kAny}), to(out, "out", "f", {kAny}, true);
    widen(payload(from, offset, to.total()), to.total(), false, to.as<float>());
}

void add_bf16(nb::handle raw, size_t offset, nb::handle total) {
    Array from(raw, "raw", "B", {kAny}), to(total, "total", "f", {kAny}, true);
    widen(payload(from, offset, to.total()), to.total(), true, to.as<float>());
}

}  // namespace tpi
