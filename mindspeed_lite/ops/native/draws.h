// Positional random numbers: backward redraws those of forward, nothing is stored.
#pragma once

#include <cstdint>

// Counter-based: MurmurHash3's finaliser over a Weyl sequence of seed, row and column. Values below `dropped` of 2^32
// are dropped.
static inline uint32_t draw(uint64_t seed, uint32_t row, uint32_t key) {
    uint32_t h = static_cast<uint32_t>(seed) ^ (row * 0x9e3779b9u);
    h = (h ^ (h >> 16)) * 0x85ebca6bu;
    h ^= key * 0xc2b2ae35u + static_cast<uint32_t>(seed >> 32);
    h = (h ^ (h >> 16)) * 0x85ebca6bu;
    h = (h ^ (h >> 13)) * 0xc2b2ae35u;
    return h ^ (h >> 16);
}
