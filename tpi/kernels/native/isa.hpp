// The instruction sets that this build and this machine support.
#pragma once

#include <string>
#include <vector>

#include "pool.hpp"
#include "types.hpp"

namespace tpi {

// The functions of one instruction set. The caller holds the pool's turn and has begun its arena.
struct Kernels {
    const char* name;
    void (*prepare)(const PrepareCall&, Pool&);
    void (*attention)(const AttentionCall&, Pool&);
    void (*project)(const AttentionCall&, Pool&);
    void (*attend)(const AttentionCall&, Pool&);
    void (*output)(const AttentionCall&, Pool&);
    void (*conv)(const ConvCall&, Pool&);
    void (*delta)(const DeltaCall&, Pool&);
    void (*mamba)(const MambaCall&, Pool&);
    void (*ffn)(const FfnCall&, Pool&);
    void (*experts)(const ExpertsCall&, Pool&);
    void (*rows)(const RowsCall&, Pool&);
    void (*decode_rows)(const DecodeCall&, Pool&);
    void (*decode_columns)(const DecodeCall&, Pool&);
    void (*norm)(const NormCall&, Pool&);
    void (*read)(const ReadCall&, Pool&);
};

extern const Kernels kScalarKernels;
#if defined(TPI_X86)
extern const Kernels kAvx2Kernels;
extern const Kernels kAvxVnniKernels;
extern const Kernels kAvx512Kernels;
#endif
#if defined(TPI_ARM)
extern const Kernels kNeonKernels;
extern const Kernels kNeonDotprodKernels;
extern const Kernels kNeonI8mmKernels;
#endif

// The supported instruction sets, the best first.
std::vector<const Kernels*> available_kernels();
// The functions of the instruction set called `name`, or null if it is unknown or not supported.
const Kernels* find_kernels(const std::string& name);

}  // namespace tpi
