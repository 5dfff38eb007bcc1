// float32 to bfloat16 and back, for messages between nodes, as Python calls it. Byte buffers need not be aligned.
// The arithmetic is in bfloat16_values.hpp.
#pragma once

#include "arrays.hpp"

namespace tpi {

// raw = values, rounded to nearest, ties to even; what is not a number stays so
void to_bf16(nb::handle values, nb::handle raw);
// out = the values of raw from byte `offset` on
void from_bf16(nb::handle raw, size_t offset, nb::handle out);
// total += the values of raw from byte `offset` on
void add_bf16(nb::handle raw, size_t offset, nb::handle total);

}  // namespace tpi
