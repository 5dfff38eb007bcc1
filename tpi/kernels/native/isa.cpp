#include "isa.hpp"

#if defined(TPI_X86)
#include <cpuid.h>
#elif defined(TPI_ARM) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#elif defined(TPI_ARM) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace tpi {

namespace {

#if defined(TPI_X86)
// __builtin_cpu_supports does not know the names of F16C and AVX-VNNI in Clang 14.
bool has_f16c() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid(1, &a, &b, &c, &d) && (c >> 29 & 1);
}

bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c(); }

// True if the processor has VNNI for 256 bits, which does not need AVX-512.
bool has_avx_vnni() {
#if defined(TPI_EMULATE_VNNI)
    return has_avx2();  // a build for tests: the same code without the dot product instruction
#else
    unsigned a = 0, b = 0, c = 0, d = 0;
    return has_avx2() && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
#endif
}

bool has_avx512() {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vnni");
}
#endif

#if defined(TPI_ARM)
#if defined(__APPLE__)
bool has_feature(const char* name) {
    int has = 0;
    size_t size = sizeof(has);
    return sysctlbyname(name, &has, &size, nullptr, 0) == 0 && has;
}
bool has_dot_product() { return has_feature("hw.optional.arm.FEAT_DotProd"); }
bool has_matrix_product() { return has_feature("hw.optional.arm.FEAT_I8MM"); }
#elif defined(__linux__)
bool has_dot_product() { return getauxval(AT_HWCAP) & HWCAP_ASIMDDP; }
bool has_matrix_product() { return has_dot_product() && (getauxval(AT_HWCAP2) & HWCAP2_I8MM); }
#else
bool has_dot_product() { return false; }
bool has_matrix_product() { return false; }
#endif
#endif

}  // namespace

std::vector<const Kernels*> available_kernels() {
    std::vector<const Kernels*> found;
#if defined(TPI_X86)
    if (has_avx512()) found.push_back(&kAvx512Kernels);
    if (has_avx_vnni()) found.push_back(&kAvxVnniKernels);
    if (has_avx2()) found.push_back(&kAvx2Kernels);
#endif
#if defined(TPI_ARM)
    if (has_matrix_product()) found.push_back(&kNeonI8mmKernels);
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
