// The pause of a thread between two reads of memory that another thread will change.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace tpi {

inline void pause() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

}  // namespace tpi
