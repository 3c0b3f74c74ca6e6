// masked_softmax on CPU: rows are read and written once, through an fp32 buffer per thread. Results do not depend on
// the thread count.
#include <vector>

#include "export.h"
#include "numbers.h"

// Megatron's value of hidden scores.
static constexpr float HIDDEN = -10000.0f;

struct Form {
    int64_t batch, heads, queries, keys;
    // Mask strides in elements; keys are contiguous.
    int64_t batch_stride, head_stride, query_stride;
    int causal;
    float scale;
    int threads;

    int64_t rows() const { return batch * heads * queries; }
    // Keys up to the diagonal; the rest is HIDDEN and is not read.
    int64_t width(int64_t row) const { return causal ? std::min(row % queries + 1, keys) : keys; }
    const uint8_t* hidden(const uint8_t* mask, int64_t row) const {
        if (mask == nullptr) return nullptr;
        const int64_t head = row / queries;
        return mask + head / heads * batch_stride + head % heads * head_stride + row % queries * query_stride;
    }
};

// The fields of `Form` as parameters.
#define FORM                                                                                                \
    int64_t batch, int64_t heads, int64_t queries, int64_t keys, int64_t batch_stride, int64_t head_stride, \
        int64_t query_stride, int causal, float scale, int threads
#define MADE {batch, heads, queries, keys, batch_stride, head_stride, query_stride, causal, scale, threads}

// Scaled fp32 scores; a separate loop prevents fusing with the following difference, so that both directions and
// PyTorch round alike.
template <typename T>
static inline void scaled(const T* x, const uint8_t* hidden, float scale, int64_t width, float* s) {
    if (hidden == nullptr) {
#pragma omp simd
        for (int64_t i = 0; i < width; i++) s[i] = load(x + i) * scale;
    } else {
#pragma omp simd
        for (int64_t i = 0; i < width; i++) {
            const float value = load(x + i) * scale;
            s[i] = hidden[i] ? HIDDEN : value;
        }
    }
}

template <typename T>
static void forward(Guard& guard, const T* scores, const uint8_t* mask, T* probs, float* statistics, FORM) {
    const Form form MADE;
    const int64_t rows = form.rows();
    const auto run = [&](int64_t row, std::vector<float>& buffer) {
        float* s = buffer.data();
        const int64_t width = form.width(row);
        T* p = probs + row * form.keys;
        scaled(scores + row * form.keys, form.hidden(mask, row), form.scale, width, s);
        float top = width < form.keys ? HIDDEN : -std::numeric_limits<float>::infinity();
#pragma omp simd reduction(max : top)
        for (int64_t i = 0; i < width; i++) top = s[i] > top ? s[i] : top;
        float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < width; i++) {
            s[i] = exp_(s[i] - top);
            sum += s[i];
        }
        // Zero unless all visible scores are about as low.
        const float beyond = width < form.keys ? exp_(HIDDEN - top) : 0.0f;
        sum += beyond * static_cast<float>(form.keys - width);
        const float factor = 1.0f / sum;
#pragma omp simd
        for (int64_t i = 0; i < width; i++) store(p + i, s[i] * factor);
        T last;
        store(&last, beyond * factor);  // NaN in a row of NaNs
        std::fill(p + width, p + form.keys, last);
        statistics[row] = top;
        statistics[rows + row] = sum;
    };
    each_row(guard, rows, form.threads, [&] { return std::vector<float>(form.keys); }, run);
}

template <typename T>
static void backward(Guard& guard, const T* dprobs, const T* scores, const uint8_t* mask, T* dscores,
                     const float* statistics, FORM) {
    const Form form MADE;
    const int64_t rows = form.rows();
    const auto run = [&](int64_t row, std::vector<float>& buffer) {
        float* s = buffer.data();
        const int64_t width = form.width(row);
        const T* dp = dprobs + row * form.keys;
        T* dx = dscores + row * form.keys;
        const uint8_t* hidden = form.hidden(mask, row);
        const float top = statistics[row], factor = 1.0f / statistics[rows + row], scale = form.scale;
        scaled(scores + row * form.keys, hidden, scale, width, s);
        float dot = 0.0f;
#pragma omp simd reduction(+ : dot)
        for (int64_t i = 0; i < width; i++) {
            s[i] = exp_(s[i] - top) * factor;
            dot += s[i] * load(dp + i);
        }
        const float beyond = width < form.keys ? exp_(HIDDEN - top) * factor : 0.0f;
        if (beyond != 0.0f) {
            float part = 0.0f;
#pragma omp simd reduction(+ : part)
            for (int64_t i = width; i < form.keys; i++) part += load(dp + i);
            dot += beyond * part;
        }
        if (hidden == nullptr) {
#pragma omp simd
            for (int64_t i = 0; i < width; i++) store(dx + i, s[i] * (load(dp + i) - dot) * scale);
        } else {
#pragma omp simd
            for (int64_t i = 0; i < width; i++) {
                const float value = s[i] * (load(dp + i) - dot) * scale;
                store(dx + i, hidden[i] ? 0.0f : value);
            }
        }
        std::fill(dx + width, dx + form.keys, T{});
    };
    each_row(guard, rows, form.threads, [&] { return std::vector<float>(form.keys); }, run);
}

EXPORT_DTYPES(forward, forward);
EXPORT_DTYPES(backward, backward);
