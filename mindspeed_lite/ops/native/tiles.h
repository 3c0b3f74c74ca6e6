// Operands of small products (`brgemm.h`) in the forms that they are read in, and the memory that they lie in.
//
// A form of T numbers: `rows` has them one row behind the other and serves as A; B is `paired_rows`, in pairs of rows
// where T is bf16. What lies behind the last row is zero.
#pragma once

#include <cstdlib>
#include <memory>

#include "brgemm.h"

#ifdef __AVX512F__
#include <immintrin.h>
#endif

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

#ifdef __AVX512F__
// to[16][16] = from[16][16] transposed, of words and by their leading dimensions.
static inline void transpose_words(const void* from, int64_t ld_from, void* to, int64_t ld_to) {
    __m512i a[16], b[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_si512(static_cast<const char*>(from) + i * ld_from * 4);
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
    // a[i + m]: in each quarter j the column 4 j + m of the rows i to i + 3.
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
        a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
        a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
        a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
        a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
    const auto put = [&](int row, __m512i line) {
        _mm512_storeu_si512(static_cast<char*>(to) + row * ld_to * 4, line);
    };
#pragma GCC unroll 4
    for (int m = 0; m < 4; ++m) {
        const __m512i even_above = _mm512_shuffle_i32x4(a[m], a[4 + m], 0x88);
        const __m512i even_below = _mm512_shuffle_i32x4(a[8 + m], a[12 + m], 0x88);
        const __m512i odd_above = _mm512_shuffle_i32x4(a[m], a[4 + m], 0xdd);
        const __m512i odd_below = _mm512_shuffle_i32x4(a[8 + m], a[12 + m], 0xdd);
        put(m, _mm512_shuffle_i32x4(even_above, even_below, 0x88));
        put(4 + m, _mm512_shuffle_i32x4(odd_above, odd_below, 0x88));
        put(8 + m, _mm512_shuffle_i32x4(even_above, even_below, 0xdd));
        put(12 + m, _mm512_shuffle_i32x4(odd_above, odd_below, 0xdd));
    }
}
#endif

// to[columns][height] = from[height][columns] transposed.
template <typename T>
static inline void transpose(const T* from, int64_t height, int64_t columns, T* to) {
    constexpr int64_t B = 8;
    int64_t row = 0;
#ifdef __AVX512F__
    if constexpr (sizeof(T) == 4) {
        for (; row + 16 <= height; row += 16) {
            const T* lines = from + row * columns;
            int64_t i = 0;
            for (; i + 16 <= columns; i += 16) transpose_words(lines + i, columns, to + i * height + row, height);
            for (; i < columns; ++i) {
                for (int64_t r = 0; r < 16; ++r) to[i * height + row + r] = lines[r * columns + i];
            }
        }
    }
#endif
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
