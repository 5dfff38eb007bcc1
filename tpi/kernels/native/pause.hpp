// What a thread does between two looks at memory that another is about to change.
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
