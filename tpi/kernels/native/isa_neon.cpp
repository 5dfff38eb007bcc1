#include "simd_neon.hpp"

#include "kernels.hpp"

namespace tpi {

const Kernels kNeonKernels = kTable;

}  // namespace tpi
