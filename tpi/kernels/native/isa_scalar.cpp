#include "simd_scalar.hpp"

#include "kernels.hpp"

namespace tpi {

const Kernels kScalarKernels = kTable;

}  // namespace tpi
