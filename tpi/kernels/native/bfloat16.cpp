#include "bfloat16.hpp"

#include <bit>
#include <cstring>

namespace tpi {

namespace {

float widened(const uint8_t* from) {
    uint16_t upper;
    std::memcpy(&upper, from, sizeof upper);
    return std::bit_cast<float>(static_cast<uint32_t>(upper) << 16);
}

uint16_t rounded(float value) {
    auto bits = std::bit_cast<uint32_t>(value);
    auto nearest = static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    return value == value ? nearest : 0x7fc0;  // rounding could carry a NaN into infinity or zero
}

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
    const auto* value = from.as<float>();
    for (size_t i = 0; i < from.total(); ++i) {
        uint16_t upper = rounded(value[i]);
        std::memcpy(to.as<uint8_t>() + 2 * i, &upper, sizeof upper);
    }
}

void from_bf16(nb::handle raw, size_t offset, nb::handle out) {
    Array from(raw, "raw", "B", {kAny}), to(out, "out", "f", {kAny}, true);
    const uint8_t* upper = payload(from, offset, to.total());
    for (size_t i = 0; i < to.total(); ++i) to.as<float>()[i] = widened(upper + 2 * i);
}

void add_bf16(nb::handle raw, size_t offset, nb::handle total) {
    Array from(raw, "raw", "B", {kAny}), to(total, "total", "f", {kAny}, true);
    const uint8_t* upper = payload(from, offset, to.total());
    for (size_t i = 0; i < to.total(); ++i) to.as<float>()[i] += widened(upper + 2 * i);
}

}  // namespace tpi
