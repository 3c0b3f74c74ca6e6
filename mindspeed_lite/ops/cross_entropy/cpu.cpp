// cross_entropy on CPU: one read of the logits per pass. Results do not depend on the thread count.
#include "export.h"
#include "numbers.h"

// The fp32 block stays in L1 for its second read.
static constexpr int64_t BLOCK = 2048;

template <typename T>
static void statistics(Guard&, const T* logits, const int64_t* target, float* out, int64_t rows, int64_t width,
                       int64_t start, int threads) {
#pragma omp parallel for num_threads(threads)
    for (int64_t row = 0; row < rows; row++) {
        const T* x = logits + row * width;
        const float lowest = -std::numeric_limits<float>::infinity();
        float top = lowest, sum = 0.0f;
        float block[BLOCK];
        for (int64_t first = 0; first < width; first += BLOCK) {
            const int64_t size = std::min(BLOCK, width - first);
            float highest = lowest;
#pragma omp simd reduction(max : highest)
            for (int64_t i = 0; i < size; i++) {
                const float value = load(x + first + i);
                block[i] = value;
                highest = value > highest ? value : highest;
            }
            const float now = std::max(top, highest);
            const float base = now == lowest ? 0.0f : now;
            float part = 0.0f;
#pragma omp simd reduction(+ : part)
            for (int64_t i = 0; i < size; i++) part += exp_(block[i] - base);
            sum = sum * exp_(top - base) + part;
            top = now;
        }
        const int64_t column = target[row] - start;
        out[row] = top;
        out[rows + row] = sum;
        const bool here = column >= 0 && column < width;
        out[2 * rows + row] = here ? load(x + column) : 0.0f;
    }
}

template <typename T>
static void gradient(Guard&, const T* logits, const int64_t* target, const float* top, const float* sums,
                     const float* dloss, T* out, int64_t rows, int64_t width, int64_t start, int threads) {
#pragma omp parallel for num_threads(threads)
    for (int64_t row = 0; row < rows; row++) {
        const T* x = logits + row * width;
        T* dx = out + row * width;
        const float base = top[row], scale = 1.0f / sums[row], outer = dloss[row];
        const int64_t column = target[row] - start;
        const bool here = column >= 0 && column < width;
        // Read before the row is overwritten.
        const float hit = here ? (exp_(load(x + column) - base) * scale - 1.0f) * outer : 0.0f;
#pragma omp simd
        for (int64_t i = 0; i < width; i++) store(dx + i, exp_(load(x + i) - base) * scale * outer);
        if (here) store(dx + column, hit);
    }
}

EXPORT_DTYPES(statistics, statistics);
EXPORT_DTYPES(gradient, gradient);
