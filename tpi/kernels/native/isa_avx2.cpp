#include "simd_avx2.hpp"

#include "kernels.hpp"

namespace tpi {

const Kernels kAvx2Kernels = kTable;

}  // namespace tpi
