// oneDNN micro-kernels exported by PyTorch: C (+)= A B for small row-major A [n, m], fp32 C [n, k] of any leading
// dimension, and B [m, k], in bf16 with row pairs interleaved (`paired_rows`). Needs `uses_torch`.
//
// They throw if the processor has none or oneDNN is switched off, also inside parallel loops: `guard.h`.
#pragma once

#include <cstdlib>
#include <memory>

#include "export.h"
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

// B is contiguous.
static inline void multiply(int64_t rows, int64_t columns, int64_t depth, const bf16* a, int64_t ld_a, const bf16* b,
                            float* c, int64_t ld_c, bool add) {
    at::native::cpublas::brgemm(rows, columns, depth, ld_a, columns, ld_c, add,
                                reinterpret_cast<const c10::BFloat16*>(a),
                                reinterpret_cast<const c10::BFloat16*>(b), c, true);
}

static inline void multiply(int64_t rows, int64_t columns, int64_t depth, const float* a, int64_t ld_a, const float* b,
                            float* c, int64_t ld_c, bool add) {
    at::native::cpublas::brgemm(rows, columns, depth, ld_a, columns, ld_c, add, a, b, c, false);
}

// Every thread calls this after its last GEMM.
template <typename T>
static inline void done_multiplying() {
    at::native::cpublas::brgemm_release(sizeof(T) == 2);
}

// Interleaves two rows of B.
static inline void pack_rows(const bf16* first, const bf16* second, int64_t width, bf16* to) {
#pragma omp simd
    for (int64_t i = 0; i < width; ++i) {
        to[2 * i].bits = first[i].bits;
        to[2 * i + 1].bits = second[i].bits;
    }
}

// Number of interleaved rows of B.
template <typename T>
constexpr int64_t PAIRS = sizeof(T) == 2 ? 2 : 1;

static inline int64_t up(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

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

// Rows prefetched ahead.
constexpr int64_t AHEAD = 8;

// Rows [count][size] of `from` as [height][size] in the GEMM's dtype.
template <typename In, typename T>
static inline void rows(const In* from, int64_t stride, int64_t count, int64_t size, int64_t height, T* to) {
    for (int64_t row = 0; row < count; ++row) {
        const In* line = from + row * stride;
        // Strides are too large for the hardware prefetcher.
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

// Transposes: to[columns][height] = from[height][columns].
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

// Rows [height][size] as B, summed over `height`.
static inline void paired_rows(const float* from, int64_t height, int64_t size, float* to) {
    std::copy(from, from + height * size, to);
}

static inline void paired_rows(const bf16* from, int64_t height, int64_t size, bf16* to) {
    for (int64_t row = 0; row < height; row += 2) {
        pack_rows(from + row * size, from + (row + 1) * size, size, to + row * size);
    }
}

// Rows [height][size] as B, summed over `size`.
static inline void paired_columns(const float* from, int64_t height, int64_t size, float* to) {
    transpose(from, height, size, to);
}

static inline void paired_columns(const bf16* from, int64_t height, int64_t size, bf16* to) {
    // A bf16 pair as one word.
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
    Guard guard;
    guard([&] {
        multiply(TILE, TILE, TILE, a, TILE, b, c, TILE, true);
        done_multiplying<T>();
    });
    return guard.status() == 0 && std::all_of(c, c + TILE * TILE, [](float value) { return value == 2.0f + TILE * 0.5f; });
}

// Whether the micro-kernel for `size`-byte values works here.
static void probe(Guard&, int32_t size, int32_t* right) {
    *right = size == 2 ? multiplies<bf16>() : multiplies<float>();
}
EXPORT(probe, probe);
