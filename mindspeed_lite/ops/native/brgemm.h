// oneDNN's micro-kernels, which PyTorch carries and exports: C (+)= A B for small row-major A [n, m] and fp32 C [n, k] in
// memory of any leading dimension, and B [m, k], of bf16 with pairs of rows interleaved, as the processor's bf16
// instructions read them. A library that includes this links PyTorch (`uses_torch`).
//
// They throw where the processor has none and while oneDNN is switched off, from inside a loop of threads too: `guard.h`.
#pragma once

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

// Depths are multiples of this many.
constexpr int64_t TILE = 32;
// Columns of a packed B.
constexpr int64_t PANEL = 64;

static inline void multiply(int64_t rows, int64_t columns, int64_t depth, const bf16* a, int64_t ld_a, const bf16* b,
                            int64_t ld_b, float* c, int64_t ld_c, bool add) {
    at::native::cpublas::brgemm(rows, columns, depth, ld_a, ld_b, ld_c, add, reinterpret_cast<const c10::BFloat16*>(a),
                                reinterpret_cast<const c10::BFloat16*>(b), c, true);
}

static inline void multiply(int64_t rows, int64_t columns, int64_t depth, const float* a, int64_t ld_a, const float* b,
                            int64_t ld_b, float* c, int64_t ld_c, bool add) {
    at::native::cpublas::brgemm(rows, columns, depth, ld_a, ld_b, ld_c, add, a, b, c, false);
}

// The same for a B whose rows lie one behind the other.
template <typename T>
static inline void multiply(int64_t rows, int64_t columns, int64_t depth, const T* a, int64_t ld_a, const T* b,
                            float* c, int64_t ld_c, bool add) {
    multiply(rows, columns, depth, a, ld_a, b, columns, c, ld_c, add);
}

// Every thread that has multiplied says so before it goes.
template <typename T>
static inline void done_multiplying() {
    at::native::cpublas::brgemm_release(sizeof(T) == 2);
}

// Interleaves the halves of a run. In an element's index the first bit becomes the last.
template <int64_t size, typename T>
static inline void interleave(const T* __restrict from, T* __restrict to) {
#pragma omp simd
    for (int64_t i = 0; i < size / 2; ++i) {
        to[2 * i] = from[i];
        to[2 * i + 1] = from[i + size / 2];
    }
}

// Two rows of B into a panel, interleaved; a row that is not there is zero.
static inline void pack_rows(const bf16* first, const bf16* second, int64_t width, bf16* to) {
    if (first && second) {
#pragma omp simd
        for (int64_t i = 0; i < width; ++i) {
            to[2 * i].bits = first[i].bits;
            to[2 * i + 1].bits = second[i].bits;
        }
    } else {
        for (int64_t i = 0; i < width; ++i) {
            to[2 * i].bits = first ? first[i].bits : 0;
            to[2 * i + 1].bits = 0;
        }
    }
}

template <typename T>
static bool multiplies() {
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
