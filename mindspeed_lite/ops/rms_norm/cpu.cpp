// rms_norm over rows: a row stays in the nearest cache between its passes, so memory is read and written once.
//
// R rows of H numbers, each row at its own distance from the next, the numbers of a row side by side. Sums are
// pairwise in effect: short runs are added in fp32, runs in double.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <type_traits>

#include "guard.h"
#include "numbers.h"

namespace {

constexpr int64_t kRun = 512;        // terms of a row's sum that are added in fp32
constexpr int64_t kElements = 4096;  // in forward, short rows share the latency of their square roots:
constexpr int64_t kMostRows = 16;    // as many rows together as make so many elements, and at most so many
constexpr int64_t kGroup = 4;        // rows that share one read and one write of the weight's gradient
constexpr int64_t kChunk = 32;       // rows whose share of the weight's gradient is added in fp32

template <typename T>
float run_of_squares(const T* x, int64_t length) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t h = 0; h < length; ++h) sum += load(x + h) * load(x + h);
    return sum;
}

template <typename T>
float run_of_products(const T* dy, const T* x, const float* scale, int64_t length) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t h = 0; h < length; ++h) sum += load(dy + h) * load(x + h) * scale[h];
    return sum;
}

template <typename T>
double sum_of_squares(const T* x, int64_t width) {
    double sum = 0;
    for (int64_t h = 0; h < width; h += kRun) sum += run_of_squares(x + h, std::min(kRun, width - h));
    return sum;
}

template <typename T>
double sum_of_products(const T* dy, const T* x, const float* scale, int64_t width) {
    double sum = 0;
    for (int64_t h = 0; h < width; h += kRun)
        sum += run_of_products(dy + h, x + h, scale + h, std::min(kRun, width - h));
    return sum;
}

template <typename T>
void scaled(const T* x, float inverse, const float* scale, T* y, int64_t width) {
#pragma omp simd
    for (int64_t h = 0; h < width; ++h) store(y + h, load(x + h) * inverse * scale[h]);
}

// The weight in fp32, or 1 + the weight.
template <typename W>
std::unique_ptr<float[]> widened(const W* weight, int64_t width, int zero_centered) {
    std::unique_ptr<float[]> scale(new float[width]);
    for (int64_t h = 0; h < width; ++h) scale[h] = load(weight + h) + (zero_centered ? 1.0f : 0.0f);
    return scale;
}

template <typename T, typename W>
void forward(const T* x, const W* weight, T* y, float* rstd, int64_t rows, int64_t width, int64_t x_stride, float eps,
             int zero_centered, int threads) {
    const auto widened_weight = widened(weight, width, zero_centered);
    const float* scale = widened_weight.get();
    const int64_t together = std::clamp(kElements / width, int64_t{1}, kMostRows);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t first = 0; first < rows; first += together) {
        const int64_t count = std::min(together, rows - first);
        double squares[kMostRows] = {};
        float inverse[kMostRows];
        for (int64_t k = 0; k < count; ++k) squares[k] = sum_of_squares(x + (first + k) * x_stride, width);
        for (int64_t k = 0; k < kMostRows; ++k)
            inverse[k] = static_cast<float>(1.0 / std::sqrt(squares[k] / width + eps));
        for (int64_t k = 0; k < count; ++k) {
            scaled(x + (first + k) * x_stride, inverse[k], scale, y + (first + k) * width, width);
            rstd[first + k] = inverse[k];
        }
    }
}

// dx of `count` rows, and their share of the weight's gradient, added to dw.
template <typename T, int64_t count>
void backward_rows(const T* dy, const T* x, T* dx, const float* rstd, const float* scale, float* dw, int64_t width,
                   int64_t dy_stride, int64_t x_stride) {
    float inverse[count], slope[count];
    for (int64_t k = 0; k < count; ++k) {
        const double c = sum_of_products(dy + k * dy_stride, x + k * x_stride, scale, width);
        inverse[k] = rstd[k];
        slope[k] = static_cast<float>(c * rstd[k] * rstd[k] * rstd[k] / width);
    }
#pragma omp simd
    for (int64_t h = 0; h < width; ++h) {
        float share = 0;
        for (int64_t k = 0; k < count; ++k) {
            const float g = load(dy + k * dy_stride + h) * inverse[k], v = load(x + k * x_stride + h);
            share += g * v;
            store(dx + k * width + h, g * scale[h] - v * slope[k]);
        }
        dw[h] += share;
    }
}

template <typename T, typename W>
void backward(const T* dy, const T* x, const W* weight, const float* rstd, T* dx, W* dw, int64_t rows, int64_t width,
              int64_t dy_stride, int64_t x_stride, int zero_centered, int threads) {
    const auto widened_weight = widened(weight, width, zero_centered);
    const float* scale = widened_weight.get();
    // Two sums for each thread: of the rows of a chunk, and of its chunks.
    std::unique_ptr<float[]> of_chunk(new float[threads * width]());
    std::unique_ptr<double[]> of_thread(new double[threads * width]());
    const int64_t chunks = (rows + kChunk - 1) / kChunk;
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int64_t t = 0; t < threads; ++t) {
        float* part = of_chunk.get() + t * width;
        double* total = of_thread.get() + t * width;
        for (int64_t chunk = chunks * t / threads; chunk < chunks * (t + 1) / threads; ++chunk) {
            const int64_t end = std::min((chunk + 1) * kChunk, rows);
            int64_t r = chunk * kChunk;
            const auto each = [&](auto count) {
                backward_rows<T, count()>(dy + r * dy_stride, x + r * x_stride, dx + r * width, rstd + r, scale, part,
                                          width, dy_stride, x_stride);
                r += count();
            };
            while (r + kGroup <= end) each(std::integral_constant<int64_t, kGroup>());
            while (r < end) each(std::integral_constant<int64_t, 1>());
#pragma omp simd
            for (int64_t h = 0; h < width; ++h) {
                total[h] += part[h];
                part[h] = 0;
            }
        }
    }
    for (int64_t h = 0; h < width; ++h) {
        double sum = 0;
        for (int64_t t = 0; t < threads; ++t) sum += of_thread[t * width + h];
        store(dw + h, static_cast<float>(sum));
    }
}

}  // namespace

#define EXPORT(suffix, T, W)                                                                                           \
    extern "C" int32_t rms_norm_forward_##suffix(const T* x, const W* weight, T* y, float* rstd, int64_t rows,         \
                                                 int64_t width, int64_t x_stride, float eps, int zero_centered,        \
                                                 int threads) {                                                        \
        return guarded([&](Guard&) {                                                                                   \
            forward(x, weight, y, rstd, rows, width, x_stride, eps, zero_centered, threads);                           \
        });                                                                                                            \
    }                                                                                                                  \
    extern "C" int32_t rms_norm_backward_##suffix(const T* dy, const T* x, const W* weight, const float* rstd, T* dx,  \
                                                  W* dw, int64_t rows, int64_t width, int64_t dy_stride,               \
                                                  int64_t x_stride, int zero_centered, int threads) {                  \
        return guarded([&](Guard&) {                                                                                   \
            backward(dy, x, weight, rstd, dx, dw, rows, width, dy_stride, x_stride, zero_centered, threads);           \
        });                                                                                                            \
    }

EXPORT(bf16_bf16, bf16, bf16)
EXPORT(bf16_fp32, bf16, float)
EXPORT(fp32_bf16, float, bf16)
EXPORT(fp32_fp32, float, float)
