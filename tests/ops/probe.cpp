// A function over an array, for tests/ops/test_native.py, and halves.h over every number.
#include "export.h"
#include "halves.h"
#include "numbers.h"

void exponential(Guard&, const float* x, float* y, int64_t n, int threads) {
#pragma omp parallel for simd num_threads(threads)
    for (int64_t i = 0; i < n; ++i) y[i] = exp_(x[i]);
}

// How many of all numbers do not come back from their halves, and how many that are no NaN are rounded otherwise.
void halves(Guard&, int64_t* wrong, int threads) {
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

EXPORT(exponential, exponential);
EXPORT(halves, halves);
