// The 32 bytes in front of every collective frame; allreduce/header.py describes them.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

namespace tpi {

static_assert(std::endian::native == std::endian::little, "headers are little-endian");

struct Header {
    uint32_t magic;
    uint8_t version, wire;
    uint16_t rank;
    uint64_t session;
    uint32_t epoch, step, tag, values;
};
static_assert(sizeof(Header) == 32);

constexpr uint32_t kMagic = 0x61495054;  // "TPIa"
constexpr uint8_t kVersion = 1;
constexpr int kSegmentBits = 12;  // of a tag; those above number the message in its step

}  // namespace tpi
