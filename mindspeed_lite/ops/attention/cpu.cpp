// Attention forward and backward on the CPU, tile by tile, with every matrix product in oneDNN's micro-kernels.
//
// A tile is KEYS keys by QUERIES queries and is kept transposed, S^T[k][q] = k . q: maximum, sum and everything that
// belongs to a query then lies along the vector, nothing is reduced across lanes, and the probabilities come out as
// the operand that the next product wants. The algorithm is that of FlashAttention-2 (Dao, 2023): the forward pass
// keeps a running maximum and sum for each query, the backward pass recomputes the probabilities from their logarithm.
//
// PyTorch exports the micro-kernels (brgemm: C += A B, bf16 or fp32 in, fp32 out, AMX or AVX-512 as the machine has
// it). They take a bf16 B in pairs of rows, [K / 2][N][2]; `pairs` below is 2 for bf16 and 1 for fp32.
//
// Shapes: q [sq, b, n, d], k [sk, b, g, d], v [sk, b, g, dv], any strides with the last one 1; out [sq, b, n, dv]
// contiguous; lse [b, n, sq], the logarithm of the softmax's denominator, -inf for a query without keys.
#include <cstdlib>
#include <memory>
#include <optional>

#include "brgemm.h"
#include "draws.h"

namespace {

constexpr int64_t QUERIES = 128, KEYS = 128;
constexpr float INF = std::numeric_limits<float>::infinity();

template <typename T>
constexpr int64_t pairs = sizeof(T) == 2 ? 2 : 1;

int64_t up(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

// Memory of one thread, aligned to a cache line.
template <typename T>
struct Buffer {
    struct Free {
        void operator()(T* p) const { std::free(p); }
    };
    std::unique_ptr<T, Free> memory;
    explicit Buffer(int64_t count)
        : memory(static_cast<T*>(std::aligned_alloc(64, up(std::max<int64_t>(count, 1) * sizeof(T), 64)))) {
        if (!memory) throw std::bad_alloc();
    }
    operator T*() const { return memory.get(); }
};

// What a call is about. Strides in elements, of the first three dimensions.
template <typename T>
struct Call {
    const T *q, *k, *v;
    int64_t sq, sk, b, n, g, d, dv;
    int64_t qs, qb, qn, ks, kb, kn, vs, vb, vn;
    // Key j is visible to query i if lowest <= j - i - (sk - sq) <= highest.
    int64_t lowest, highest;
    const uint8_t* mask;  // true hides; null or [b, n, sq, sk], with stride 0 where it is the same for all
    int64_t mask_b, mask_n, mask_q, mask_k;
    float scale;
    uint32_t dropped;  // probabilities dropped, of 2^32
    uint64_t seed;

    int64_t offset() const { return sk - sq; }
    // The keys that some query of [from, to) sees.
    int64_t first_key(int64_t from) const {
        return lowest == INT64_MIN ? 0 : std::max<int64_t>(0, from + offset() + lowest);
    }
    int64_t end_key(int64_t to) const {
        return highest == INT64_MAX ? sk : std::min(sk, std::max<int64_t>(0, to - 1 + offset() + highest + 1));
    }
    bool all_visible(int64_t q0, int64_t queries, int64_t k0, int64_t keys) const {
        const int64_t o = offset();
        return mask == nullptr && (lowest == INT64_MIN || k0 - (q0 + queries - 1) - o >= lowest) &&
               (highest == INT64_MAX || k0 + keys - 1 - q0 - o <= highest);
    }
};

// t[k][q] = -inf where key k0 + k is hidden from query q0 + q.
template <typename T>
void hide(const Call<T>& call, int64_t batch, int64_t head, int64_t q0, int64_t queries, int64_t k0, int64_t keys,
          float* t) {
    const int64_t offset = call.offset();
    for (int64_t i = 0; i < keys; ++i) {
        const int64_t j = k0 + i - offset - q0;  // minus the query's index: the distance
        int64_t from = 0, to = queries;          // visible queries
        if (call.highest != INT64_MAX) from = std::min(queries, std::max<int64_t>(0, j - call.highest));
        if (call.lowest != INT64_MIN) to = std::max<int64_t>(from, std::min(queries, j - call.lowest + 1));
        std::fill(t + i * queries, t + i * queries + from, -INF);
        std::fill(t + i * queries + to, t + (i + 1) * queries, -INF);
    }
    if (call.mask == nullptr) return;
    const uint8_t* from =
        call.mask + batch * call.mask_b + head * call.mask_n + q0 * call.mask_q + k0 * call.mask_k;
    for (int64_t q = 0; q < queries; ++q) {
        for (int64_t i = 0; i < keys; ++i) {
            if (from[q * call.mask_q + i * call.mask_k]) t[i * queries + q] = -INF;
        }
    }
}

// Drops some of the probabilities of one key for the queries [place, place + count) of all heads, and scales the rest.
template <typename T>
void drop(const Call<T>& call, int64_t place, int64_t count, int64_t key, float* row) {
    const float kept = static_cast<float>(0x1p32 / (0x1p32 - call.dropped));
#pragma omp simd
    for (int64_t q = 0; q < count; ++q) {
        const uint32_t drawn = draw(call.seed, static_cast<uint32_t>(place + q), static_cast<uint32_t>(key));
        row[q] = drawn < call.dropped ? 0.0f : row[q] * kept;
    }
}

// The rows [count][size] as a product's right-hand side with `size` summed over: to[size / pairs][width][pairs].
template <typename T>
void pack_transposed(const T* from, int64_t stride, int64_t count, int64_t size, int64_t width, T* to) {
    constexpr int64_t P = pairs<T>;
    for (int64_t row = 0; row < count; ++row) {
        for (int64_t i = 0; i < size; i += P) {
            for (int64_t p = 0; p < P; ++p) to[(i / P * width + row) * P + p] = from[row * stride + i + p];
        }
    }
}

// The same rows as a right-hand side with `count` summed over: to[count / pairs][size][pairs], zeros behind the end.
template <typename T>
void pack_rows(const T* from, int64_t stride, int64_t count, int64_t size, T* to) {
    constexpr int64_t P = pairs<T>;
    for (int64_t row = 0; row < up(count, P); ++row) {
        T* line = to + row / P * size * P + row % P;
        for (int64_t i = 0; i < size; ++i) line[i * P] = row < count ? from[row * stride + i] : T{};
    }
}

// Rows [count][size] one behind the other: rows a power of two apart would share a few lines of the cache.
template <typename T>
void gather(const T* from, int64_t stride, int64_t count, int64_t size, T* to) {
    for (int64_t row = 0; row < count; ++row) std::memcpy(to + row * size, from + row * stride, size * sizeof(T));
}

// to[size][width] = from[count][size] transposed, zeros behind the end up to width.
template <typename T>
void transpose(const T* from, int64_t stride, int64_t count, int64_t size, int64_t width, T* to) {
    constexpr int64_t B = 32;
    for (int64_t r0 = 0; r0 < width; r0 += B) {
        for (int64_t i = 0; i < size; ++i) {
            for (int64_t row = r0; row < std::min(width, r0 + B); ++row) {
                to[i * width + row] = row < count ? from[row * stride + i] : T{};
            }
        }
    }
}

// Two rows of numbers as one line of a right-hand side in pairs (`second` null: zeros).
void pair_up(const float* first, const float* second, int64_t count, bf16* to) {
    uint32_t* both = reinterpret_cast<uint32_t*>(to);
    if (second == nullptr) {
#pragma omp simd
        for (int64_t x = 0; x < count; ++x) both[x] = rounded(first[x]);
    } else {
#pragma omp simd
        for (int64_t x = 0; x < count; ++x) both[x] = rounded(first[x]) | rounded(second[x]) << 16;
    }
}

void pair_up(const float* first, const float*, int64_t count, float* to) { std::copy(first, first + count, to); }

// What a thread of the forward pass works with.
template <typename T>
struct ForwardSpace {
    Buffer<float> scores, sums;
    Buffer<T> query, weights, rows;
    explicit ForwardSpace(const Call<T>& call)
        : scores(KEYS * QUERIES),
          sums(call.dv * QUERIES),
          query(call.d * QUERIES),
          weights(KEYS * QUERIES),
          rows(call.dv * KEYS) {}
};

template <typename T>
void forward(const Call<T>& call, T* out, float* lse, int threads, Guard& guard) {
    constexpr int64_t P = pairs<T>;
    const int64_t heads = call.b * call.n, per_group = call.n / call.g;
    const int64_t tiles = (call.sq + QUERIES - 1) / QUERIES;
    const int64_t key_tiles = (call.sk + KEYS - 1) / KEYS, padded = key_tiles * KEYS;
    // K and V^T of every key head, tile by tile: [b * g][tile][KEYS][d] and [b * g][tile][dv][KEYS].
    Buffer<T> all_keys(call.b * call.g * padded * call.d), all_values(call.b * call.g * padded * call.dv);
#pragma omp parallel num_threads(threads)
    {
        std::optional<ForwardSpace<T>> space;
        guard([&] { space.emplace(call); });
#pragma omp for collapse(2)
        for (int64_t i = 0; i < call.b * call.g; ++i) {
            for (int64_t tile = 0; tile < key_tiles; ++tile) {
                if (guard.status()) continue;
                T* rows = space->rows;
                const int64_t k0 = tile * KEYS, keys = std::min(KEYS, call.sk - k0);
                gather(call.k + k0 * call.ks + i / call.g * call.kb + i % call.g * call.kn, call.ks, keys, call.d,
                       all_keys + (i * padded + k0) * call.d);
                gather(call.v + k0 * call.vs + i / call.g * call.vb + i % call.g * call.vn, call.vs, keys, call.dv, rows);
                transpose(static_cast<const T*>(rows), call.dv, keys, call.dv, KEYS,
                          all_values + (i * padded + k0) * call.dv);
            }
        }
        const auto run = [&](int64_t last, int64_t i) {
            float *const scores = space->scores, *const sums = space->sums;
            T *const query = space->query, *const weights = space->weights;
            float highest[QUERIES], total[QUERIES], factor[QUERIES], before[QUERIES];
            const int64_t batch = i / call.n, head = i % call.n, group = head / per_group;
            const int64_t q0 = (tiles - 1 - last) * QUERIES, queries = std::min(QUERIES, call.sq - q0);
            pack_transposed(call.q + q0 * call.qs + batch * call.qb + head * call.qn, call.qs, queries, call.d,
                            queries, query);
            std::fill(highest, highest + queries, -INF);
            std::fill(total, total + queries, 0.0f);
            std::fill(sums, sums + call.dv * queries, 0.0f);
            const int64_t end = call.end_key(q0 + queries);
            for (int64_t k0 = call.first_key(q0) / KEYS * KEYS; k0 < end; k0 += KEYS) {
                const int64_t keys = std::min(KEYS, call.sk - k0), even = up(keys, P);
                const int64_t place = (batch * call.g + group) * padded + k0;
                multiply(keys, queries, call.d, all_keys + place * call.d, call.d, query, scores, queries, false);
                if (!call.all_visible(q0, queries, k0, keys)) {
                    hide(call, batch, head, q0, queries, k0, keys, scores);
                }
                std::copy(highest, highest + queries, before);
                for (int64_t k = 0; k < keys; ++k) {
                    // Scaled in a loop of its own: fused with the subtraction below, the product would not be
                    // rounded as the maximum was, and the difference of large scores would be noise.
                    float* row = scores + k * queries;
#pragma omp simd
                    for (int64_t q = 0; q < queries; ++q) {
                        const float s = row[q] * call.scale;
                        row[q] = s;
                        highest[q] = s > highest[q] ? s : highest[q];
                    }
                }
                float base[QUERIES];
#pragma omp simd
                for (int64_t q = 0; q < queries; ++q) {
                    // A query that has seen no key yet: any number will do in place of -inf.
                    base[q] = highest[q] == -INF ? 0.0f : highest[q];
                    factor[q] = exp_(before[q] - base[q]);
                    total[q] *= factor[q];
                }
                for (int64_t k = 0; k < keys; ++k) {
                    float* row = scores + k * queries;
#pragma omp simd
                    for (int64_t q = 0; q < queries; ++q) {
                        const float p = exp_(row[q] - base[q]);
                        total[q] += p;
                        row[q] = p;
                    }
                    if (call.dropped) drop(call, i * call.sq + q0, queries, k0 + k, row);
                    if (k % P == P - 1 || k == keys - 1) {
                        const float* first = scores + k / P * P * queries;
                        pair_up(first, k % P == P - 1 ? row : nullptr, queries, weights + k / P * queries * P);
                    }
                }
                for (int64_t j = 0; j < call.dv; ++j) {
                    float* row = sums + j * queries;
#pragma omp simd
                    for (int64_t q = 0; q < queries; ++q) row[q] *= factor[q];
                }
                multiply(call.dv, queries, even, all_values + place * call.dv, KEYS, weights, sums, queries, true);
            }
            for (int64_t q = 0; q < queries; ++q) {
                // 0 without a key; NaN stays NaN.
                const float inverse = total[q] == 0.0f ? 0.0f : 1.0f / total[q];
                T* to = out + ((q0 + q) * call.b * call.n + i) * call.dv;
                for (int64_t j = 0; j < call.dv; ++j) store(to + j, sums[j * queries + q] * inverse);
                lse[i * call.sq + q0 + q] = total[q] == 0.0f ? -INF : highest[q] + std::log(total[q]);
            }
        };
        // The last tiles have the most keys under a causal mask: they go first.
#pragma omp for collapse(2) schedule(dynamic)
        for (int64_t last = 0; last < tiles; ++last)
            for (int64_t i = 0; i < heads; ++i) guard([&] { run(last, i); });
        guard.always([] { done_multiplying<T>(); });
    }
}

// What a thread of the backward pass works with.
template <typename T>
struct BackwardSpace {
    Buffer<float> scores, slopes;
    Buffer<T> weights, rows, columns, keys_t, key_rows, value_rows;
    // The queries and dout of one head, in both forms of a right-hand side.
    Buffer<T> q_t, q_r, dout_t, dout_r;
    Buffer<float> logs, sums;
    // dq^T of one head, [tile][d][QUERIES]; dk and dv of one key head.
    Buffer<float> to_q, to_k, to_v;
    BackwardSpace(const Call<T>& call, int64_t width)
        : scores(KEYS * QUERIES),
          slopes(KEYS * QUERIES),
          weights(KEYS * QUERIES),
          rows(KEYS * QUERIES),
          columns(KEYS * QUERIES),
          keys_t(call.d * KEYS),
          key_rows(call.d * KEYS),
          value_rows(call.dv * KEYS),
          q_t(width * call.d),
          q_r(width * call.d),
          dout_t(width * call.dv),
          dout_r(width * call.dv),
          logs(width),
          sums(width),
          to_q(width * call.d),
          to_k(call.sk * call.d),
          to_v(call.sk * call.dv) {}
};

// dq [sq, b, n, d], dk [sk, b, g, d], dv [sk, b, g, dv] contiguous; dout [sq, b, n, dv] by its strides.
template <typename T>
void backward(const Call<T>& call, const T* out, const float* lse, const T* dout, int64_t os, int64_t ob, int64_t on,
              T* dq, T* dk, T* dv, int threads, Guard& guard) {
    constexpr int64_t P = pairs<T>;
    const int64_t per_group = call.n / call.g;
    const int64_t tiles = (call.sq + QUERIES - 1) / QUERIES;
    const int64_t width = up(call.sq, QUERIES);
#pragma omp parallel num_threads(threads)
    {
        std::optional<BackwardSpace<T>> space;
        guard([&] { space.emplace(call, width); });
        const auto run = [&](int64_t pair) {
            float *const scores = space->scores, *const slopes = space->slopes;
            T *const weights = space->weights, *const rows = space->rows, *const columns = space->columns;
            T *const keys_t = space->keys_t, *const key_rows = space->key_rows, *const value_rows = space->value_rows;
            T *const q_t = space->q_t, *const q_r = space->q_r, *const dout_t = space->dout_t;
            T *const dout_r = space->dout_r;
            float *const logs = space->logs, *const sums = space->sums;
            float *const to_q = space->to_q, *const to_k = space->to_k, *const to_v = space->to_v;
            const int64_t batch = pair / call.g, group = pair % call.g;
            std::fill(to_k, to_k + call.sk * call.d, 0.0f);
            std::fill(to_v, to_v + call.sk * call.dv, 0.0f);
            for (int64_t head = group * per_group; head < (group + 1) * per_group; ++head) {
                const int64_t i = batch * call.n + head;
                std::fill(to_q, to_q + width * call.d, 0.0f);
                const T* q = call.q + batch * call.qb + head * call.qn;
                const T* grad = dout + batch * ob + head * on;
                for (int64_t tile = 0; tile < tiles; ++tile) {
                    const int64_t q0 = tile * QUERIES, queries = std::min(QUERIES, call.sq - q0);
                    pack_transposed(q + q0 * call.qs, call.qs, queries, call.d, queries, q_t + q0 * call.d);
                    pack_rows(q + q0 * call.qs, call.qs, queries, call.d, q_r + q0 * call.d);
                    pack_transposed(grad + q0 * os, os, queries, call.dv, queries, dout_t + q0 * call.dv);
                    pack_rows(grad + q0 * os, os, queries, call.dv, dout_r + q0 * call.dv);
                    for (int64_t row = q0; row < q0 + queries; ++row) {
                        const T* o = out + (row * call.b * call.n + i) * call.dv;
                        float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
                        for (int64_t j = 0; j < call.dv; ++j) sum += load(o + j) * load(grad + row * os + j);
                        sums[row] = sum;
                        // Without a key every probability is zero.
                        const float log = lse[i * call.sq + row];
                        logs[row] = log == -INF ? INF : log;
                    }
                }
                for (int64_t k0 = 0; k0 < call.sk; k0 += KEYS) {
                    const int64_t keys = std::min(KEYS, call.sk - k0), even = up(keys, P);
                    const T* k = call.k + k0 * call.ks + batch * call.kb + group * call.kn;
                    const T* v = call.v + k0 * call.vs + batch * call.vb + group * call.vn;
                    transpose(k, call.ks, keys, call.d, even, keys_t);
                    gather(k, call.ks, keys, call.d, key_rows);
                    gather(v, call.vs, keys, call.dv, value_rows);
                    for (int64_t q0 = 0; q0 < call.sq; q0 += QUERIES) {
                        const int64_t queries = std::min(QUERIES, call.sq - q0), filled = up(queries, P);
                        if (call.end_key(q0 + queries) <= k0 || call.first_key(q0) >= k0 + keys) continue;
                        multiply(keys, queries, call.d, key_rows, call.d, q_t + q0 * call.d, scores, queries, false);
                        if (!call.all_visible(q0, queries, k0, keys)) {
                            hide(call, batch, head, q0, queries, k0, keys, scores);
                        }
                        multiply(keys, queries, call.dv, value_rows, call.dv, dout_t + q0 * call.dv, slopes, queries, false);
                        for (int64_t row = 0; row < keys; ++row) {
                            float* s = scores + row * queries;
                            float* ds = slopes + row * queries;
                            const float *log = logs + q0, *sum = sums + q0;
                            // The derivative of the softmax has the probability itself, dropped or not; the product
                            // with v and its derivative have what is left of it.
                            if (call.dropped) drop(call, i * call.sq + q0, queries, k0 + row, ds);
#pragma omp simd
                            for (int64_t x = 0; x < queries; ++x) s[x] *= call.scale;
#pragma omp simd
                            for (int64_t x = 0; x < queries; ++x) {
                                s[x] = exp_(s[x] - log[x]);
                                ds[x] = s[x] * (ds[x] - sum[x]);
                            }
                            if (call.dropped) drop(call, i * call.sq + q0, queries, k0 + row, s);
                            T* weight = weights + row * filled;
                            T* line = rows + row * filled;
#pragma omp simd
                            for (int64_t x = 0; x < queries; ++x) {
                                store(weight + x, s[x]);
                                store(line + x, ds[x]);
                            }
                            for (int64_t x = queries; x < filled; ++x) weight[x] = line[x] = T{};
                            if (row % P == P - 1 || row == keys - 1) {
                                const float* first = slopes + row / P * P * queries;
                                pair_up(first, row % P == P - 1 ? ds : nullptr, queries, columns + row / P * queries * P);
                            }
                        }
                        multiply(keys, call.dv, filled, weights, filled, dout_r + q0 * call.dv, to_v + k0 * call.dv,
                                 call.dv, true);
                        multiply(keys, call.d, filled, rows, filled, q_r + q0 * call.d, to_k + k0 * call.d, call.d,
                                 true);
                        multiply(call.d, queries, even, keys_t, even, columns, to_q + q0 * call.d, queries, true);
                    }
                }
                for (int64_t q0 = 0; q0 < call.sq; q0 += QUERIES) {
                    const int64_t queries = std::min(QUERIES, call.sq - q0);
                    for (int64_t x = 0; x < queries; ++x) {
                        T* to = dq + ((q0 + x) * call.b * call.n + i) * call.d;
                        const float* from = to_q + q0 * call.d + x;
                        for (int64_t j = 0; j < call.d; ++j) store(to + j, from[j * queries] * call.scale);
                    }
                }
            }
            for (int64_t row = 0; row < call.sk; ++row) {
                T* to = dk + (row * call.b * call.g + pair) * call.d;
                for (int64_t j = 0; j < call.d; ++j) store(to + j, to_k[row * call.d + j] * call.scale);
                T* other = dv + (row * call.b * call.g + pair) * call.dv;
                for (int64_t j = 0; j < call.dv; ++j) store(other + j, to_v[row * call.dv + j]);
            }
        };
#pragma omp for schedule(dynamic)
        for (int64_t pair = 0; pair < call.b * call.g; ++pair) guard([&] { run(pair); });
        guard.always([] { done_multiplying<T>(); });
    }
}

// The numbers of a call in the order of Call, from `sq` on.
template <typename T>
Call<T> describe(const T* q, const T* k, const T* v, const int64_t* n, const uint8_t* mask, float scale) {
    return {q,     k,     v,     n[0],  n[1],  n[2],  n[3],  n[4],  n[5],  n[6],  n[7],
            n[8],  n[9],  n[10], n[11], n[12], n[13], n[14], n[15], n[16], n[17], mask,
            n[18], n[19], n[20], n[21], scale, static_cast<uint32_t>(n[22]), static_cast<uint64_t>(n[23])};
}

}  // namespace

#define EXPORT(T)                                                                                                      \
    extern "C" int32_t forward_##T(const T* q, const T* k, const T* v, const int64_t* numbers, const uint8_t* mask,    \
                                   float scale, T* out, float* lse, int32_t threads) {                                 \
        return guarded([&](Guard& guard) {                                                                             \
            forward(describe(q, k, v, numbers, mask, scale), out, lse, threads, guard);                                \
        });                                                                                                            \
    }                                                                                                                  \
    extern "C" int32_t backward_##T(const T* q, const T* k, const T* v, const int64_t* numbers, const uint8_t* mask,   \
                                    float scale, const T* out, const float* lse, const T* dout, T* dq, T* dk, T* dv,   \
                                    int32_t threads) {                                                                 \
        return guarded([&](Guard& guard) {                                                                             \
            backward(describe(q, k, v, numbers, mask, scale), out, lse, dout, numbers[24], numbers[25], numbers[26],   \
                     dq, dk, dv, threads, guard);                                                                      \
        });                                                                                                            \
    }

EXPORT(bf16)
EXPORT(float)
