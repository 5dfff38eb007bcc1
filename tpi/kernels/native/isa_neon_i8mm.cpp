#define TPI_I8MM
#include "simd_neon.hpp"

#include "kernels.hpp"

namespace tpi {

const Kernels kNeonI8mmKernels = kTable;

}  // namespace tpi
