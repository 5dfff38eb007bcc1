#define TPI_DOTPROD
#include "simd_neon.hpp"

#include "kernels.hpp"

namespace tpi {

const Kernels kNeonDotprodKernels = kTable;

}  // namespace tpi
