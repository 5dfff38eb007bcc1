// The header of every collective frame: 32 bytes, little-endian. A receiver knows all fields of the frame it waits for.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

namespace tpi {

static_assert(std::endian::native == std::endian::little, "headers are little-endian");

struct Header {
    uint32_t magic;    // "TPIa"
    uint8_t version;   // of this layout
    uint8_t wire;      // format of the payload (`tpi.net.wire.Wire.code`)
    uint16_t rank;     // of the sender
    uint64_t session;  // one per run of a master, random
    uint32_t epoch;    // one per plan
    uint32_t step;     // one per forward pass
    uint32_t tag;      // lane, number of the message in the step, segment of the message
    uint32_t values;   // number of values in the payload
};
static_assert(sizeof(Header) == 32);

constexpr uint32_t kMagic = 0x61495054;  // "TPIa"
constexpr uint8_t kVersion = 2;
constexpr int kLaneBits = 6, kNumberBits = 17, kSegmentBits = 9;  // the parts of a tag, from its highest bit down
static_assert(kLaneBits + kNumberBits + kSegmentBits == 32);
constexpr uint32_t kLanes = 1u << kLaneBits;

}  // namespace tpi
