// layer_norm (`centred`) and rms_norm (mean, bias, db null) over rows. A row stays in cache between passes: memory is
// read and written once.
//
// R rows of H values, any row stride, contiguous within a row. Sums: short runs in fp32, runs in double. The variance
// is of x - mean, never a difference of large sums.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <type_traits>

#include "export.h"
#include "numbers.h"

namespace {

constexpr int64_t kRun = 512;  // terms of a row's sum added in fp32
constexpr int64_t kElements = 4096;  // forward batches short rows to overlap the latency of square roots:
constexpr int64_t kMostRows = 16;  // up to this many elements, and this many rows
constexpr int64_t kGroup = 4;  // rows that share one read and write of the parameter gradients
constexpr int64_t kChunk = 32;  // rows whose parameter gradients are added in fp32

template <typename T>
float run_of_values(const T* x, int64_t length) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t h = 0; h < length; ++h) sum += load(x + h);
    return sum;
}

template <bool centred, typename T>
float run_of_squares(const T* x, float mean, int64_t length) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t h = 0; h < length; ++h) {
        const float v = centred ? load(x + h) - mean : load(x + h);
        sum += v * v;
    }
    return sum;
}

template <bool centred, typename T>
void run_of_gradients(const T* dy, const T* x, float mean, const float* scale, int64_t length, float* plain,
                      float* product) {
    float a = 0, b = 0;
#pragma omp simd reduction(+ : a, b)
    for (int64_t h = 0; h < length; ++h) {
        const float g = load(dy + h) * scale[h];
        if (centred) a += g;
        b += g * (centred ? load(x + h) - mean : load(x + h));
    }
    *plain = a;
    *product = b;
}

// Sum of run(start, length) over a row.
template <typename Run>
double sum_of(int64_t width, const Run& run) {
    double sum = 0;
    for (int64_t h = 0; h < width; h += kRun) sum += run(h, std::min(kRun, width - h));
    return sum;
}

template <bool centred, typename T>
void scaled(const T* x, float mean, float inverse, const float* scale, const float* shift, T* y, int64_t width) {
#pragma omp simd
    for (int64_t h = 0; h < width; ++h)
        store(y + h, centred ? (load(x + h) - mean) * inverse * scale[h] + shift[h] : load(x + h) * inverse * scale[h]);
}

template <typename W>
std::unique_ptr<float[]> widened(const W* parameter, int64_t width, float plus) {
    std::unique_ptr<float[]> wide(new float[width]);
    for (int64_t h = 0; h < width; ++h) wide[h] = load(parameter + h) + plus;
    return wide;
}

template <bool centred, typename T, typename W>
void forward(Guard&, const T* x, const W* weight, const W* bias, T* y, float* mean, float* rstd, int64_t rows, int64_t width,
             int64_t x_stride, float eps, int zero_centered, int threads) {
    const auto scales = widened(weight, width, zero_centered ? 1.0f : 0.0f);
    const auto shifts = centred ? widened(bias, width, 0.0f) : nullptr;
    const float *scale = scales.get(), *shift = shifts.get();
    const int64_t together = std::clamp(kElements / width, int64_t{1}, kMostRows);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t first = 0; first < rows; first += together) {
        const int64_t count = std::min(together, rows - first);
        double squares[kMostRows] = {};
        float middle[kMostRows] = {}, inverse[kMostRows];
        for (int64_t k = 0; k < count; ++k) {
            const T* row = x + (first + k) * x_stride;
            const auto values = [&](int64_t h, int64_t n) { return run_of_values(row + h, n); };
            if (centred) middle[k] = static_cast<float>(sum_of(width, values) / width);
            const auto deviations = [&](int64_t h, int64_t n) { return run_of_squares<centred>(row + h, middle[k], n); };
            squares[k] = sum_of(width, deviations);
        }
        for (int64_t k = 0; k < kMostRows; ++k)
            inverse[k] = static_cast<float>(1.0 / std::sqrt(squares[k] / width + eps));
        for (int64_t k = 0; k < count; ++k) {
            const int64_t r = first + k;
            scaled<centred>(x + r * x_stride, middle[k], inverse[k], scale, shift, y + r * width, width);
            if (centred) mean[r] = middle[k];
            rstd[r] = inverse[k];
        }
    }
}

// dx of `count` rows; adds their parameter gradients to dw and db.
template <bool centred, int64_t count, typename T>
void backward_rows(const T* dy, const T* x, T* dx, const float* mean, const float* rstd, const float* scale, float* dw,
                   float* db, int64_t width, int64_t dy_stride, int64_t x_stride) {
    float middle[count], inverse[count], offset[count], slope[count];
    for (int64_t k = 0; k < count; ++k) {
        const T *g = dy + k * dy_stride, *v = x + k * x_stride;
        double a = 0, b = 0;
        for (int64_t h = 0; h < width; h += kRun) {
            float plain, product;
            run_of_gradients<centred>(g + h, v + h, centred ? mean[k] : 0.0f, scale + h, std::min(kRun, width - h), &plain, &product);
            a += plain;
            b += product;
        }
        const double r = rstd[k];
        middle[k] = centred ? mean[k] : 0.0f;
        inverse[k] = rstd[k];
        offset[k] = static_cast<float>(a * r / width);
        slope[k] = static_cast<float>(b * r * r * r / width);
    }
#pragma omp simd
    for (int64_t h = 0; h < width; ++h) {
        float share = 0, plain = 0;
        for (int64_t k = 0; k < count; ++k) {
            const float g = load(dy + k * dy_stride + h), x_ = load(x + k * x_stride + h);
            const float v = centred ? x_ - middle[k] : x_, dv = g * inverse[k] * scale[h] - v * slope[k];
            if (centred) plain += g;
            share += g * inverse[k] * v;
            store(dx + k * width + h, centred ? dv - offset[k] : dv);
        }
        dw[h] += share;
        if (centred) db[h] += plain;
    }
}

template <typename W>
void total(const double* parts, W* sum, int64_t width, int threads) {
    for (int64_t h = 0; h < width; ++h) {
        double value = 0;
        for (int64_t t = 0; t < threads; ++t) value += parts[t * 2 * width + h];
        store(sum + h, static_cast<float>(value));
    }
}

template <bool centred, typename T, typename W>
void backward(Guard&, const T* dy, const T* x, const W* weight, const float* mean, const float* rstd, T* dx, W* dw, W* db,
              int64_t rows, int64_t width, int64_t dy_stride, int64_t x_stride, int zero_centered, int threads) {
    const auto scales = widened(weight, width, zero_centered ? 1.0f : 0.0f);
    const float* scale = scales.get();
    // Per thread two sums, of a chunk's rows and of chunks, each dw then db.
    std::unique_ptr<float[]> of_chunk(new float[threads * 2 * width]());
    std::unique_ptr<double[]> of_thread(new double[threads * 2 * width]());
    const int64_t chunks = (rows + kChunk - 1) / kChunk;
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int64_t t = 0; t < threads; ++t) {
        float* part = of_chunk.get() + t * 2 * width;
        double* sum = of_thread.get() + t * 2 * width;
        for (int64_t chunk = chunks * t / threads; chunk < chunks * (t + 1) / threads; ++chunk) {
            const int64_t end = std::min((chunk + 1) * kChunk, rows);
            int64_t r = chunk * kChunk;
            const auto each = [&](auto count) {
                backward_rows<centred, count()>(dy + r * dy_stride, x + r * x_stride, dx + r * width, mean + r, rstd + r,
                                          scale, part, part + width, width, dy_stride, x_stride);
                r += count();
            };
            while (r + kGroup <= end) each(std::integral_constant<int64_t, kGroup>());
            while (r < end) each(std::integral_constant<int64_t, 1>());
#pragma omp simd
            for (int64_t h = 0; h < 2 * width; ++h) {
                sum[h] += part[h];
                part[h] = 0;
            }
        }
    }
    total(of_thread.get(), dw, width, threads);
    if (centred) total(of_thread.get() + width, db, width, threads);
}

}  // namespace

#define EXPORT_PAIR(NAME, T, W)                               \
    EXPORT(rms_norm_forward_##NAME, forward<false, T, W>);    \
    EXPORT(layer_norm_forward_##NAME, forward<true, T, W>);   \
    EXPORT(rms_norm_backward_##NAME, backward<false, T, W>);  \
    EXPORT(layer_norm_backward_##NAME, backward<true, T, W>)

EXPORT_PAIR(bf16_bf16, bf16, bf16);
EXPORT_PAIR(bf16_fp32, bf16, float);
EXPORT_PAIR(fp32_bf16, float, bf16);
EXPORT_PAIR(fp32_fp32, float, float);
