// Operands of small products (`brgemm.h`) in the forms that they are read in, and the memory that they lie in.
//
// A form of T numbers: `rows` has them one row behind the other and serves as A; B is `paired_rows`, in pairs of rows
// where T is bf16. What lies behind the last row is zero.
#pragma once

#include <cstdlib>
#include <memory>

#include "brgemm.h"

// Rows of B that lie interleaved.
template <typename T>
constexpr int64_t PAIRS = sizeof(T) == 2 ? 2 : 1;

static inline int64_t up(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

// Memory aligned to a cache line.
template <typename T>
struct Buffer {
    struct Free {
        void operator()(T* p) const { std::free(p); }
    };
    std::unique_ptr<T, Free> memory;
    explicit Buffer(int64_t count)
        : memory(static_cast<T*>(std::aligned_alloc(64, up(std::max<int64_t>(count, 1) * sizeof(T), 64)))) {
        if (!memory) throw std::bad_alloc();
    }
    operator T*() const { return memory.get(); }
};

// Rows that are on their way while one is read.
constexpr int64_t AHEAD = 8;

// The rows [count][size] of `from` as [height][size] of the dtype that is multiplied.
template <typename In, typename T>
static inline void rows(const In* from, int64_t stride, int64_t count, int64_t size, int64_t height, T* to) {
    for (int64_t row = 0; row < count; ++row) {
        const In* line = from + row * stride;
        // Rows lie too far apart for the processor to see what comes next.
        for (int64_t i = 0; i < size; i += 64 / sizeof(In)) __builtin_prefetch(line + AHEAD * stride + i);
        if constexpr (std::is_same_v<In, T>) {
            std::memcpy(to + row * size, line, size * sizeof(T));
        } else {
            T* out = to + row * size;
#pragma omp simd
            for (int64_t i = 0; i < size; ++i) out[i] = load(line + i);
        }
    }
    std::fill(to + count * size, to + height * size, T{});
}

// to[columns][height] = from[height][columns] transposed.
template <typename T>
static inline void transpose(const T* from, int64_t height, int64_t columns, T* to) {
    constexpr int64_t B = 8;
    int64_t row = 0;
    for (; row + B <= height; row += B) {
        const T* lines = from + row * columns;
        for (int64_t i = 0; i < columns; ++i) {
            T* out = to + i * height + row;
#pragma GCC unroll 8
            for (int64_t r = 0; r < B; ++r) out[r] = lines[r * columns + i];
        }
    }
    for (; row < height; ++row) {
        for (int64_t i = 0; i < columns; ++i) to[i * height + row] = from[row * columns + i];
    }
}

// The rows [height][size] as B with `height` summed over.
static inline void paired_rows(const float* from, int64_t height, int64_t size, float* to) {
    std::copy(from, from + height * size, to);
}

static inline void paired_rows(const bf16* from, int64_t height, int64_t size, bf16* to) {
    for (int64_t row = 0; row < height; row += 2) {
        pack_rows(from + row * size, from + (row + 1) * size, size, to + row * size);
    }
}

// The rows [height][size] as B with `size` summed over.
static inline void paired_columns(const float* from, int64_t height, int64_t size, float* to) {
    transpose(from, height, size, to);
}

static inline void paired_columns(const bf16* from, int64_t height, int64_t size, bf16* to) {
    // A pair is a word already.
    struct Word {
        bf16 halves[2];
    };
    transpose(reinterpret_cast<const Word*>(from), height, size / 2, reinterpret_cast<Word*>(to));
}
