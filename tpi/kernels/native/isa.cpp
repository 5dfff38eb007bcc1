#include "isa.hpp"

#if defined(TPI_ARM) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#elif defined(TPI_ARM) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace tpi {

namespace {

#if defined(TPI_X86)
bool has_avx2() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
#endif

#if defined(TPI_AVX512)
bool has_avx512() {
#if defined(TPI_EMULATE_VNNI)
    return has_avx2();  // a build for tests: the same code without the dot product instruction
#endif
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vnni");
}
#endif

#if defined(TPI_ARM)
bool has_dot_product() {
#if defined(__linux__)
    return getauxval(AT_HWCAP) & HWCAP_ASIMDDP;
#elif defined(__APPLE__)
    int has = 0;
    size_t size = sizeof(has);
    return sysctlbyname("hw.optional.arm.FEAT_DotProd", &has, &size, nullptr, 0) == 0 && has;
#else
    return false;
#endif
}
#endif

}  // namespace

std::vector<const Kernels*> available_kernels() {
    std::vector<const Kernels*> found;
#if defined(TPI_X86)
#if defined(TPI_AVX512)
    if (has_avx512()) found.push_back(&kAvx512Kernels);
#endif
    if (has_avx2()) found.push_back(&kAvx2Kernels);
#endif
#if defined(TPI_ARM)
    if (has_dot_product()) found.push_back(&kNeonDotprodKernels);
    found.push_back(&kNeonKernels);  // every aarch64 processor has NEON
#endif
    found.push_back(&kScalarKernels);
    return found;
}

const Kernels* find_kernels(const std::string& name) {
    for (const Kernels* kernels : available_kernels())
        if (name == kernels->name) return kernels;
    return nullptr;
}

}  // namespace tpi
