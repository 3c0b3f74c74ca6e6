// Every function of numbers.h over an array, for tests/ops/test_native.py, and halves.h over every number.
#include "halves.h"
#include "numbers.h"

#define OVER(name, expression)                                                                  \
    extern "C" void name(const float* x, float* y, int64_t n, int threads) {                    \
        _Pragma("omp parallel for simd num_threads(threads)") for (int64_t i = 0; i < n; ++i) { \
            y[i] = expression;                                                                  \
        }                                                                                       \
    }

OVER(exponential, exp_(x[i]))

extern "C" void power(const float* x, float* y, int64_t n, int) {
    const PowerBounds bounds;
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) y[i] = exp2_(x[i], bounds);
}

extern "C" void narrow(const float* x, bf16* y, int64_t n) {
    for (int64_t i = 0; i < n; ++i) store(y + i, load(x + i));
}

extern "C" void narrow_row(const float* x, bf16* y, int64_t n) { round_row(x, n, y); }

// y holds 2 n numbers.
extern "C" void narrow_pairs(const float* first, const float* second, bf16* y, int64_t n) {
    round_pairs(first, second, n, y);
}

extern "C" void widen(const bf16* x, float* y, int64_t n) {
    for (int64_t i = 0; i < n; ++i) store(y + i, load(x + i));
}

// How many of all numbers do not come back from their halves, and how many that are no NaN are rounded otherwise.
extern "C" void halves(int64_t* wrong, int threads) {
    int64_t lost = 0, otherwise = 0;
#pragma omp parallel for reduction(+ : lost, otherwise) num_threads(threads)
    for (int64_t bits = 0; bits < int64_t(1) << 32; ++bits) {
        const float value = as_float(static_cast<uint32_t>(bits));
        const Halves halves = split(value);
        lost += as_bits(join(halves)) != static_cast<uint32_t>(bits);
        otherwise += value == value && halves.high != rounded(value);
    }
    wrong[0] = lost;
    wrong[1] = otherwise;
}
