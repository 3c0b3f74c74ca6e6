// Every function of numbers.h over an array, for tests/ops/test_native.py.
#include "numbers.h"

#define OVER(name, expression)                                                                  \
    extern "C" void name(const float* x, float* y, int64_t n, int threads) {                    \
        _Pragma("omp parallel for simd num_threads(threads)") for (int64_t i = 0; i < n; ++i) { \
            y[i] = expression;                                                                  \
        }                                                                                       \
    }

OVER(exponential, exp_(x[i]))
OVER(sigmoid, sigmoid_(x[i]))
OVER(hyperbolic_tangent, tanh_(x[i]))

extern "C" void narrow(const float* x, bf16* y, int64_t n) {
    for (int64_t i = 0; i < n; ++i) store(y + i, load(x + i));
}

extern "C" void widen(const bf16* x, float* y, int64_t n) {
    for (int64_t i = 0; i < n; ++i) store(y + i, load(x + i));
}
