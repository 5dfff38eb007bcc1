#include "simd_avx2.hpp"

#include "kernels.hpp"

namespace tpi {

const Kernels kAvxVnniKernels = kTable;

}  // namespace tpi
