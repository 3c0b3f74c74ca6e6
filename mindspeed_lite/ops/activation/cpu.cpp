// activation forward and backward on the CPU: one pass over memory in each direction.
//
// Rows are worked on in pieces that stay in the first-level cache: widened to fp32 with the bias added, turned into
// results there, and written once. The loop with the function in it does what every call needs; what few calls need
// (limits, sums over rows and columns) are loops of their own over the piece.
#include "numbers.h"

namespace {

// Short, so that reading the next piece overlaps with working on this one; and read some pieces ahead, since the
// hardware's own prefetching stops where a piece does.
constexpr int64_t PIECE = 64, AHEAD = 4 * PIECE;

// ---- f and its derivative, both out of one exponential ----

struct Point {
    float value, slope;
};

// e^-|x| within 2 units in the last place, NaN for NaN. As exp_ in numbers.h, without what a bounded argument does
// not need: |x| is bounded from one side, and adding 1.5 * 2^23 rounds and leaves the exponent in the low bits.
static inline float decay(float x) {
    const float t = -std::fabs(x), bounded = t < -87.0f ? -87.0f : t, magic = 12582912.0f;
    const float z = bounded * 1.44269504088896341f + magic, n = z - magic;
    const float r = (bounded - n * 0.693145751953125f) - n * 1.42860682030941723e-6f;
    float p = 1.0f / 5040.0f;
    p = p * r + 1.0f / 720.0f;
    p = p * r + 1.0f / 120.0f;
    p = p * r + 1.0f / 24.0f;
    p = p * r + 1.0f / 6.0f;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    return t < -87.0f ? 0.0f : as_float(as_bits(p) + (as_bits(z) << 23));
}

// x * s with s = sigmoid(t(x)), and its derivative s + x s (1 - s) t'. Of s and 1 - s the smaller is computed and
// not subtracted: where t' is large the error of that difference would show.
static inline Point swish(float x, float t, float dt) {
    const float e = decay(t), larger = 1.0f / (1.0f + e), smaller = e * larger;
    const float s = t < 0.0f ? smaller : larger;
    return {x * s, s + x * (larger * smaller) * dt};
}

struct Silu {
    static inline Point at(float x) { return swish(x, x, 1.0f); }
};

// (1 + tanh(u)) / 2 is sigmoid(2u), which does not cancel where x is large and negative.
struct Gelu {
    static inline Point at(float x) {
        const float c = 1.59576912160573071f, k = 0.044715f, s = x * x;  // c = 2 sqrt(2 / pi)
        return swish(x, c * x * (1.0f + k * s), c * (1.0f + 3.0f * k * s));
    }
};

struct QuickGelu {
    static inline Point at(float x) { return swish(x, 1.702f * x, 1.702f); }
};

struct SquaredRelu {
    static inline Point at(float x) {
        const float positive = x < 0.0f ? 0.0f : x;  // NaN stays NaN
        return {positive * positive, 2.0f * positive};
    }
};

// ---- a piece ----

struct Form {
    int64_t width, stride;  // of x's rows
    float offset, clamp;    // of the halves; clamp is infinite if there is none

    bool bent() const { return offset != 0.0f || clamp < std::numeric_limits<float>::infinity(); }
};

template <class T>
inline void read(const T* x, const float* bias, float* out, int64_t n) {
    for (int64_t i = 0; i < n; i += 64 / static_cast<int64_t>(sizeof(T))) __builtin_prefetch(x + AHEAD + i);
    if (bias == nullptr) {
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) out[i] = load(x + i);
    } else {
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) out[i] = load(x + i) + bias[i];
    }
}

template <class T>
inline void write(T* out, const float* x, float weight, int64_t n) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) store(out + i, x[i] * weight);
}

inline void add(float* sums, const float* x, float weight, int64_t n) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) sums[i] += x[i] * weight;
}

inline void add_product(float* sums, const float* x, const float* y, int64_t n) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) sums[i] += x[i] * y[i];
}

inline float total(const float* x, int64_t n) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; ++i) sum += x[i];
    return sum;
}

inline void bend(float* gate, float* up, const Form& form, int64_t n) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
        gate[i] = gate[i] > form.clamp ? form.clamp : gate[i];
        up[i] = (up[i] > form.clamp ? form.clamp : (up[i] < -form.clamp ? -form.clamp : up[i])) + form.offset;
    }
}

inline const float* from(const float* p, int64_t i) { return p == nullptr ? nullptr : p + i; }

// ---- all rows ----

template <class F, bool gated, class T>
void forward(const T* x, const float* bias, const float* weights, T* y, int64_t rows, Form form, int threads) {
    const int64_t half = gated ? form.width / 2 : form.width;
    const bool bent = form.bent();
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t row = 0; row < rows; ++row) {
        float a[PIECE], b[PIECE];
        const T* in = x + row * form.stride;
        const float weight = weights == nullptr ? 1.0f : weights[row];
        for (int64_t start = 0; start < half; start += PIECE) {
            const int64_t n = std::min(PIECE, half - start);
            read(in + start, from(bias, start), a, n);
            if (gated) {
                read(in + half + start, from(bias, half + start), b, n);
                if (bent) bend(a, b, form, n);
#pragma omp simd
                for (int64_t i = 0; i < n; ++i) a[i] = F::at(a[i]).value * b[i];
            } else {
#pragma omp simd
                for (int64_t i = 0; i < n; ++i) a[i] = F::at(a[i]).value;
            }
            write(y + row * half + start, a, weight, n);
        }
    }
}

// Sums over rows go into one row of `dbias` for each block of rows, whose number does not depend on that of threads.
template <class F, bool gated, class T>
void backward(const T* dy, const T* x, const float* bias, const float* weights, T* dx, float* dbias, float* dweights,
              int64_t rows, int64_t blocks, Form form, int threads) {
    const int64_t width = form.width, half = gated ? width / 2 : width, step = (rows + blocks - 1) / blocks;
    const bool bent = form.bent();
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t block = 0; block < blocks; ++block) {
        float* sums = dbias == nullptr ? nullptr : dbias + block * width;
        if (sums != nullptr) std::fill(sums, sums + width, 0.0f);
        for (int64_t row = block * step; row < std::min(rows, (block + 1) * step); ++row) {
            float a[PIECE], b[PIECE], g[PIECE];
            const T* in = x + row * form.stride;
            T* out = dx + row * width;
            const float weight = weights == nullptr ? 1.0f : weights[row];
            float dots[PIECE] = {};  // of y and dy before the weight, by place in a piece
            for (int64_t start = 0; start < half; start += PIECE) {
                const int64_t n = std::min(PIECE, half - start);
                read(in + start, from(bias, start), a, n);
                read(dy + row * half + start, nullptr, g, n);
                if (gated) {
                    read(in + half + start, from(bias, half + start), b, n);
                    if (bent) bend(a, b, form, n);
                    // a becomes the gradient of the gate, g that of the linear half.
#pragma omp simd
                    for (int64_t i = 0; i < n; ++i) {
                        const Point f = F::at(a[i]);
                        a[i] = g[i] * f.slope * b[i];
                        g[i] *= f.value;
                    }
                    if (dweights != nullptr) add_product(dots, g, b, n);
                    if (bent) {
                        // No gradient where a limit holds.
                        for (int64_t i = 0; i < n; ++i) {
                            const float gate = load(in + start + i) + (bias == nullptr ? 0.0f : bias[start + i]);
                            const float up =
                                load(in + half + start + i) + (bias == nullptr ? 0.0f : bias[half + start + i]);
                            if (gate > form.clamp) a[i] = 0.0f;
                            if (std::fabs(up) > form.clamp) g[i] = 0.0f;
                        }
                    }
                    write(out + half + start, g, weight, n);
                    if (sums != nullptr) add(sums + half + start, g, weight, n);
                } else {
#pragma omp simd
                    for (int64_t i = 0; i < n; ++i) {
                        const Point f = F::at(a[i]);
                        a[i] = g[i] * f.slope;
                        b[i] = f.value;
                    }
                    if (dweights != nullptr) add_product(dots, g, b, n);
                }
                write(out + start, a, weight, n);
                if (sums != nullptr) add(sums + start, a, weight, n);
            }
            if (dweights != nullptr) dweights[row] = total(dots, PIECE);
        }
    }
}

// ---- by kind, in the order of cpu.py ----

template <class T, class... Rest>
void forward_of(int kind, const T* x, Rest... rest) {
    switch (kind) {
        case 0: return forward<Silu, true, T>(x, rest...);
        case 1: return forward<Gelu, true, T>(x, rest...);
        case 2: return forward<QuickGelu, true, T>(x, rest...);
        case 3: return forward<Gelu, false, T>(x, rest...);
        case 4: return forward<SquaredRelu, false, T>(x, rest...);
    }
}

template <class T, class... Rest>
void backward_of(int kind, const T* dy, Rest... rest) {
    switch (kind) {
        case 0: return backward<Silu, true, T>(dy, rest...);
        case 1: return backward<Gelu, true, T>(dy, rest...);
        case 2: return backward<QuickGelu, true, T>(dy, rest...);
        case 3: return backward<Gelu, false, T>(dy, rest...);
        case 4: return backward<SquaredRelu, false, T>(dy, rest...);
    }
}

}  // namespace

#define EXPORT(T, name)                                                                                              \
    extern "C" void activation_forward_##name(int kind, const T* x, const float* bias, const float* weights, T* y,   \
                                              int64_t rows, int64_t width, int64_t stride, float offset,             \
                                              float clamp, int threads) {                                            \
        forward_of<T>(kind, x, bias, weights, y, rows, Form{width, stride, offset, clamp}, threads);                 \
    }                                                                                                                \
    extern "C" void activation_backward_##name(int kind, const T* dy, const T* x, const float* bias,                 \
                                               const float* weights, T* dx, float* dbias, float* dweights,           \
                                               int64_t rows, int64_t blocks, int64_t width, int64_t stride,          \
                                               float offset, float clamp, int threads) {                             \
        backward_of<T>(kind, dy, x, bias, weights, dx, dbias, dweights, rows, blocks,                                \
                       Form{width, stride, offset, clamp}, threads);                                                 \
    }

EXPORT(bf16, bf16)
EXPORT(float, fp32)
