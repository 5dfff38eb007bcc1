// Emulates VPDPBUSD of AVX-VNNI (VEX.256.66.0F38.W0 50 /r) where the processor does not have it: Linux sends SIGILL, and
// the handler computes the instruction's definition on the registers of the thread.
#pragma once

#include <signal.h>
#include <ucontext.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace emulated {

// The registers of an interrupted thread. The kernel saves them in the standard form of XSAVE.
struct Registers {
    mcontext_t& context;

    uint8_t* saved() const { return reinterpret_cast<uint8_t*>(context.fpregs); }
    uint64_t whole(int number) const {
        static constexpr int kOrder[] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                         REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
        return static_cast<uint64_t>(context.gregs[kOrder[number]]);
    }
    // Sets the halves of all ymm registers that XSAVE left out, since they are zero.
    void complete() const {
        uint64_t present;
        std::memcpy(&present, saved() + 512, 8);
        if (!(present & 2)) std::memset(saved() + 160, 0, 256);
        if (!(present & 4)) std::memset(saved() + 576, 0, 256);
        present |= 6;
        std::memcpy(saved() + 512, &present, 8);
    }
    void read(int number, uint8_t* to) const {
        std::memcpy(to, saved() + 160 + 16 * number, 16);
        std::memcpy(to + 16, saved() + 576 + 16 * number, 16);
    }
    void write(int number, const uint8_t* from) const {
        std::memcpy(saved() + 160 + 16 * number, from, 16);
        std::memcpy(saved() + 576 + 16 * number, from + 16, 16);
    }
};

// The address of a memory operand, whose ModRM byte is at `at`; moves `at` behind the operand.
inline uint64_t address_of(const Registers& registers, const uint8_t*& at, int high_base, int high_index) {
    int modrm = *at++, mode = modrm >> 6, base = modrm & 7;
    uint64_t address = 0;
    bool no_base = mode == 0 && base == 5;
    if (base == 4) {
        int sib = *at++, index = (sib >> 3 & 7) | high_index;
        if (index != 4) address = registers.whole(index) << (sib >> 6);
        base = sib & 7;
        if (mode != 0 || base != 5) address += registers.whole(base | high_base);
    } else if (!no_base) {
        address = registers.whole(base | high_base);
    }
    int32_t offset = 0;
    if (mode == 1) {
        offset = static_cast<int8_t>(*at++);
    } else if (mode == 2 || (mode == 0 && base == 5)) {
        std::memcpy(&offset, at, 4);
        at += 4;
    }
    if (no_base) address = reinterpret_cast<uint64_t>(at);  // relative to the next instruction
    return address + static_cast<uint64_t>(static_cast<int64_t>(offset));
}

// True if `at` is VPDPBUSD of ymm registers: three bytes of prefix for the map 0F38, no W, 256 bits, 66.
inline bool is_product(const uint8_t* at) {
    return at[0] == 0xC4 && (at[1] & 0x1F) == 2 && (at[2] & 0x87) == 0x05 && at[3] == 0x50;
}

// Compute the instruction at `at`, and return the address of the next one.
inline const uint8_t* compute(const Registers& registers, const uint8_t* at) {
    int to = at[1] & 0x80 ? 0 : 8, high_index = at[1] & 0x40 ? 0 : 8, high_base = at[1] & 0x20 ? 0 : 8;
    int first = ~(at[2] >> 3) & 15;
    at += 4;
    to |= *at >> 3 & 7;
    uint8_t codes[32], values[32];
    int32_t sums[8];
    registers.read(first, codes);
    registers.read(to, reinterpret_cast<uint8_t*>(sums));
    if (*at >> 6 == 3) {
        registers.read((*at & 7) | high_base, values);
        ++at;
    } else {
        std::memcpy(values, reinterpret_cast<const void*>(address_of(registers, at, high_base, high_index)), 32);
    }
    for (int i = 0; i < 32; ++i) sums[i / 4] += codes[i] * static_cast<int8_t>(values[i]);
    registers.write(to, reinterpret_cast<const uint8_t*>(sums));
    return at;
}

inline void on_illegal(int, siginfo_t*, void* raw) {
    Registers registers{static_cast<ucontext_t*>(raw)->uc_mcontext};
    auto* at = reinterpret_cast<const uint8_t*>(registers.context.gregs[REG_RIP]);
    if (!is_product(at)) std::abort();
    registers.complete();
    while (is_product(at)) at = compute(registers, at);
    registers.context.gregs[REG_RIP] = reinterpret_cast<greg_t>(at);
}

inline void begin() {
    struct sigaction action {};
    action.sa_sigaction = on_illegal;
    action.sa_flags = SA_SIGINFO;
    sigaction(SIGILL, &action, nullptr);
}

}  // namespace emulated
