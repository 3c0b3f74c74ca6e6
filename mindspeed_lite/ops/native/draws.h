// Random numbers by position, so that a backward pass draws what the forward pass drew and nothing is kept.
#pragma once

#include <cstdint>

// The same for a seed, a row and a column wherever it is asked: a counter-based generator, the finaliser of MurmurHash3
// over a Weyl sequence. What is below `dropped`, of 2^32, is dropped.
static inline uint32_t draw(uint64_t seed, uint32_t row, uint32_t key) {
    uint32_t h = static_cast<uint32_t>(seed) ^ (row * 0x9e3779b9u);
    h = (h ^ (h >> 16)) * 0x85ebca6bu;
    h ^= key * 0xc2b2ae35u + static_cast<uint32_t>(seed >> 32);
    h = (h ^ (h >> 16)) * 0x85ebca6bu;
    h = (h ^ (h >> 13)) * 0xc2b2ae35u;
    return h ^ (h >> 16);
}
