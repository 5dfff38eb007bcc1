#include "simd_avx2.hpp"

#include "kernels.hpp"

namespace tpi {

const Kernels kAvx512Kernels = kTable;

}  // namespace tpi
