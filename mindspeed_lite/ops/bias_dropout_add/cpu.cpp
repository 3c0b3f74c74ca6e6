// bias_dropout_add on CPU. Random values depend on the position, not on the thread count.
#include "draws.h"
#include "export.h"
#include "numbers.h"

template <bool drops>
static inline float kept(float value, int64_t seed, int64_t row, int64_t column, int64_t dropped, float scale) {
    if (!drops) return value;
    const uint32_t drawn = draw(static_cast<uint64_t>(seed), static_cast<uint32_t>(row), static_cast<uint32_t>(column));
    return drawn < static_cast<uint32_t>(dropped) ? 0.0f : value * scale;
}

template <typename T, bool drops>
static void forward(Guard&, const T* x, const float* bias, const T* residual, T* y, int64_t rows, int64_t width,
                    int64_t dropped, int64_t seed, float scale, int threads) {
#pragma omp parallel for num_threads(threads)
    for (int64_t row = 0; row < rows; ++row) {
        const T* from = x + row * width;
        const T* other = residual + row * width;
        T* to = y + row * width;
#pragma omp simd
        for (int64_t i = 0; i < width; ++i)
            store(to + i, load(other + i) + kept<drops>(load(from + i) + bias[i], seed, row, i, dropped, scale));
    }
}

// dx: null if equal to dy. sums: zeros [blocks][width], null without a bias gradient.
template <typename T, bool drops>
static void backward(Guard&, const T* dy, T* dx, float* sums, int64_t rows, int64_t blocks, int64_t width,
                     int64_t dropped, int64_t seed, float scale, int threads) {
    const int64_t step = (rows + blocks - 1) / blocks;
#pragma omp parallel for num_threads(threads)
    for (int64_t block = 0; block < blocks; ++block) {
        float* sum = sums == nullptr ? nullptr : sums + block * width;
        for (int64_t row = block * step; row < std::min(rows, (block + 1) * step); ++row) {
            const T* from = dy + row * width;
            T* to = dx == nullptr ? nullptr : dx + row * width;
            if (to != nullptr) {
#pragma omp simd
                for (int64_t i = 0; i < width; ++i)
                    store(to + i, kept<drops>(load(from + i), seed, row, i, dropped, scale));
            }
            if (sum != nullptr) {
#pragma omp simd
                for (int64_t i = 0; i < width; ++i)
                    sum[i] += kept<drops>(load(from + i), seed, row, i, dropped, scale);
            }
        }
    }
}

EXPORT(forward_bf16, forward<bf16, false>);
EXPORT(forward_fp32, forward<float, false>);
EXPORT(forward_dropout_bf16, forward<bf16, true>);
EXPORT(forward_dropout_fp32, forward<float, true>);
EXPORT(backward_bf16, backward<bf16, false>);
EXPORT(backward_fp32, backward<float, false>);
EXPORT(backward_dropout_bf16, backward<bf16, true>);
EXPORT(backward_dropout_fp32, backward<float, true>);
