// cross_entropy on CPU: one read of the logits per pass. Results do not depend on the thread count.
#include "export.h"
#include "numbers.h"

// The fp32 block stays in L1 for its second read.
static constexpr int64_t BLOCK = 2048;

// x - top, and -1000 for what is lower: its exponential is 0, and 0 times it is no NaN.
static inline float shifted(float x, float top) {
    const float distance = x - top;
    return distance < -1000.0f ? -1000.0f : distance;
}

// ENTROPY: a fourth row, u = sum exp(x - m) (x - m).
template <typename T, bool ENTROPY>
static void statistics_of(const T* logits, const int64_t* target, float* out, int64_t rows, int64_t width,
                          int64_t start, int threads) {
#pragma omp parallel for num_threads(threads)
    for (int64_t row = 0; row < rows; row++) {
        const T* x = logits + row * width;
        const float lowest = -std::numeric_limits<float>::infinity();
        float top = lowest, sum = 0.0f, weighted = 0.0f;
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
            float part = 0.0f, product = 0.0f;
#pragma omp simd reduction(+ : part, product)
            for (int64_t i = 0; i < size; i++) {
                const float value = exp_(block[i] - base);
                part += value;
                if (ENTROPY) product += value * shifted(block[i], base);
            }
            const float factor = exp_(top - base);
            if (ENTROPY) weighted = factor * (weighted + sum * shifted(top, base)) + product;
            sum = sum * factor + part;
            top = now;
        }
        const int64_t column = target[row] - start;
        out[row] = top;
        out[rows + row] = sum;
        const bool here = column >= 0 && column < width;
        out[2 * rows + row] = here ? load(x + column) : 0.0f;
        if (ENTROPY) out[3 * rows + row] = weighted;
    }
}

template <typename T>
static void statistics(Guard&, const T* logits, const int64_t* target, float* out, int64_t rows, int64_t width,
                       int64_t start, int entropy, int threads) {
    (entropy ? statistics_of<T, true> : statistics_of<T, false>)(logits, target, out, rows, width, start, threads);
}

// dx = p (outer + slope (x - top)) - [column = target] dloss; without slopes outer is dloss.
template <typename T, bool SLOPES>
static void gradient_of(const T* logits, const int64_t* target, const float* top, const float* sums, const float* dloss,
                        const float* outers, const float* slopes, T* out, int64_t rows, int64_t width, int64_t start,
                        int threads) {
#pragma omp parallel for num_threads(threads)
    for (int64_t row = 0; row < rows; row++) {
        const T* x = logits + row * width;
        T* dx = out + row * width;
        const float base = top[row], scale = 1.0f / sums[row];
        const float outer = outers[row], slope = SLOPES ? slopes[row] : 0.0f;
        const int64_t column = target[row] - start;
        const bool here = column >= 0 && column < width;
        const auto at = [=](int64_t i, float one) {
            const float value = load(x + i), p = exp_(value - base) * scale;
            return SLOPES ? p * (outer + slope * shifted(value, base)) - one * dloss[row] : (p - one) * outer;
        };
        // Read before the row is overwritten.
        const float hit = here ? at(column, 1.0f) : 0.0f;
#pragma omp simd
        for (int64_t i = 0; i < width; i++) store(dx + i, at(i, 0.0f));
        if (here) store(dx + column, hit);
    }
}

template <typename T>
static void gradient(Guard&, const T* logits, const int64_t* target, const float* top, const float* sums,
                     const float* dloss, const float* outers, const float* slopes, T* out, int64_t rows, int64_t width,
                     int64_t start, int threads) {
    (slopes ? gradient_of<T, true> : gradient_of<T, false>)(logits, target, top, sums, dloss, outers, slopes, out, rows,
                                                            width, start, threads);
}

EXPORT_DTYPES(statistics, statistics);
EXPORT_DTYPES(gradient, gradient);
