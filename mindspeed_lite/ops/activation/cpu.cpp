// Biased GELU (tanh approximation) on the CPU: one pass over memory per direction.
//
// Rows are processed in fp32 in pieces that fit the L1 cache.
#include "export.h"
#include "numbers.h"

namespace {

constexpr int64_t PIECE = 64, AHEAD = 4 * PIECE;

struct Point {
    float value, slope;
};

// x sigmoid(t) and its derivative, t = 2 sqrt(2 / pi) (x + 0.044715 x^3), since (1 + tanh(u)) / 2 = sigmoid(2u). The
// smaller of s and 1 - s is computed, not subtracted: t' amplifies its error.
inline Point gelu(float x) {
    const float c = 1.59576912160573071f, k = 0.044715f, square = x * x;
    const float t = c * x * (1.0f + k * square), dt = c * (1.0f + 3.0f * k * square);
    const float e = exp_(-std::fabs(t)), larger = 1.0f / (1.0f + e), smaller = e * larger;
    const float s = t < 0.0f ? smaller : larger;
    return {x * s, s + x * (larger * smaller) * dt};
}

template <class T>
inline void read(const T* x, const float* bias, float* out, int64_t n) {
    for (int64_t i = 0; i < n; i += 64 / static_cast<int64_t>(sizeof(T))) __builtin_prefetch(x + AHEAD + i);
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) out[i] = load(x + i) + bias[i];
}

template <class T>
void forward(Guard&, const T* x, const float* bias, T* y, int64_t rows, int64_t width, int64_t stride, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t row = 0; row < rows; ++row) {
        float a[PIECE];
        for (int64_t start = 0; start < width; start += PIECE) {
            const int64_t n = std::min(PIECE, width - start);
            read(x + row * stride + start, bias + start, a, n);
            T* out = y + row * width + start;
#pragma omp simd
            for (int64_t i = 0; i < n; ++i) store(out + i, gelu(a[i]).value);
        }
    }
}

// dbias [blocks][width], zeroed, or null: one row of sums per block. The block count does not depend on threads.
template <class T>
void backward(Guard&, const T* dy, const T* x, const float* bias, T* dx, float* dbias, int64_t rows, int64_t blocks,
              int64_t width, int64_t stride, int threads) {
    const int64_t step = (rows + blocks - 1) / blocks;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t block = 0; block < blocks; ++block) {
        float* sums = dbias == nullptr ? nullptr : dbias + block * width;
        for (int64_t row = block * step; row < std::min(rows, (block + 1) * step); ++row) {
            float a[PIECE];
            for (int64_t start = 0; start < width; start += PIECE) {
                const int64_t n = std::min(PIECE, width - start);
                read(x + row * stride + start, bias + start, a, n);
                const T* grad = dy + row * width + start;
                T* out = dx + row * width + start;
#pragma omp simd
                for (int64_t i = 0; i < n; ++i) {
                    a[i] = load(grad + i) * gelu(a[i]).slope;
                    store(out + i, a[i]);
                }
                if (sums == nullptr) continue;
#pragma omp simd
                for (int64_t i = 0; i < n; ++i) sums[start + i] += a[i];
            }
        }
    }
}

}  // namespace

EXPORT_DTYPES(forward, forward);
EXPORT_DTYPES(backward, backward);
