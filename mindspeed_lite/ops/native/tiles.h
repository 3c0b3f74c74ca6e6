// oneDNN's micro-kernels, which PyTorch exports, and their operands: C (+)= A B for small row-major A [n, m] and fp32
// C [n, k] of any leading dimension, and B [m, k], in bf16 with pairs of rows interleaved (`paired_rows`), as the
// processor's instructions read them. A library that includes this links PyTorch (`uses_torch`).
//
// They throw where the processor has none and while oneDNN is switched off, inside a loop of threads too: `guard.h`.
#pragma once

#include <cstdlib>
#include <memory>

#include "guard.h"
#include "numbers.h"

namespace c10 {
struct BFloat16;
}
namespace at::native::cpublas {
void brgemm(int64_t rows, int64_t columns, int64_t depth, int64_t ld_a, int64_t ld_b, int64_t ld_c, bool add,
            const c10::BFloat16* a, const c10::BFloat16* b, float* c, bool is_vnni);
void brgemm(int64_t rows, int64_t columns, int64_t depth, int64_t ld_a, int64_t ld_b, int64_t ld_c, bool add,
            const float* a, const float* b, float* c, bool is_vnni);
void brgemm_release(bool is_vnni);
}  // namespace at::native::cpublas

static inline void multiply(int64_t rows, int64_t columns, int64_t depth, const bf16* a, int64_t ld_a, const bf16* b,
                            int64_t ld_b, float* c, int64_t ld_c, bool add) {
    at::native::cpublas::brgemm(rows, columns, depth, ld_a, ld_b, ld_c, add, reinterpret_cast<const c10::BFloat16*>(a),
                                reinterpret_cast<const c10::BFloat16*>(b), c, true);
}

static inline void multiply(int64_t rows, int64_t columns, int64_t depth, const float* a, int64_t ld_a, const float* b,
                            int64_t ld_b, float* c, int64_t ld_c, bool add) {
    at::native::cpublas::brgemm(rows, columns, depth, ld_a, ld_b, ld_c, add, a, b, c, false);
}

// The same for a contiguous B.
template <typename T>
static inline void multiply(int64_t rows, int64_t columns, int64_t depth, const T* a, int64_t ld_a, const T* b,
                            float* c, int64_t ld_c, bool add) {
    multiply(rows, columns, depth, a, ld_a, b, columns, c, ld_c, add);
}

// Called by every thread after its last product.
template <typename T>
static inline void done_multiplying() {
    at::native::cpublas::brgemm_release(sizeof(T) == 2);
}

// Two rows of B, interleaved.
static inline void pack_rows(const bf16* first, const bf16* second, int64_t width, bf16* to) {
#pragma omp simd
    for (int64_t i = 0; i < width; ++i) {
        to[2 * i].bits = first[i].bits;
        to[2 * i + 1].bits = second[i].bits;
    }
}

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

template <typename T>
static bool multiplies() {
    constexpr int64_t TILE = 32;
    T a[TILE * TILE], b[TILE * TILE];
    float c[TILE * TILE];
    for (int64_t i = 0; i < TILE * TILE; ++i) {
        store(a + i, 1.0f);
        store(b + i, 0.5f);
        c[i] = 2.0f;
    }
    const int32_t status = guarded([&](Guard&) {
        multiply(TILE, TILE, TILE, a, TILE, b, c, TILE, true);
        done_multiplying<T>();
    });
    return status == 0 && std::all_of(c, c + TILE * TILE, [](float value) { return value == 2.0f + TILE * 0.5f; });
}

// Whether the micro-kernel for numbers of `size` bytes works here.
extern "C" int32_t probe(int32_t size, int32_t* right) {
    *right = size == 2 ? multiplies<bf16>() : multiplies<float>();
    return 0;
}
