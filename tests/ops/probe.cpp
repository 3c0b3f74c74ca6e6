// Every function of numbers.h over an array, for tests/ops/test_native.py, and halves.h over every number.
#include "export.h"
#include "halves.h"
#include "numbers.h"

void exponential(Guard&, const float* x, float* y, int64_t n, int threads) {
#pragma omp parallel for simd num_threads(threads)
    for (int64_t i = 0; i < n; ++i) y[i] = exp_(x[i]);
}

void power(Guard&, const float* x, float* y, int64_t n, int) {
    const PowerBounds bounds;
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) y[i] = exp2_(x[i], bounds);
}

void narrow(Guard&, const float* x, bf16* y, int64_t n) {
    for (int64_t i = 0; i < n; ++i) store(y + i, load(x + i));
}

void narrow_row(Guard&, const float* x, bf16* y, int64_t n) { round_row(x, n, y); }

// y holds 2 n numbers.
void narrow_pairs(Guard&, const float* first, const float* second, bf16* y, int64_t n) {
    round_pairs(first, second, n, y);
}

void widen(Guard&, const bf16* x, float* y, int64_t n) {
    for (int64_t i = 0; i < n; ++i) store(y + i, load(x + i));
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
EXPORT(power, power);
EXPORT(narrow, narrow);
EXPORT(narrow_row, narrow_row);
EXPORT(narrow_pairs, narrow_pairs);
EXPORT(widen, widen);
EXPORT(halves, halves);
