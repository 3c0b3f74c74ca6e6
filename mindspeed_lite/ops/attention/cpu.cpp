// Tiled attention forward and backward on the CPU, GEMMs in oneDNN micro-kernels.
//
// Tiles are transposed, S^T[k][q] = k . q: per-query values lie along the vector and the probabilities are the next
// GEMM's operand. FlashAttention-2 (Dao, 2023): forward keeps a running maximum and sum, backward recomputes
// probabilities from lse.
//
// A work item is a tile of queries, looping over keys. K and V are packed once per key head, for as many key heads as
// threads. dK and dV accumulate in a fixed order (`Turns`): results do not depend on the number of threads.
//
// `M` is the GEMMs' dtype: the inputs' where oneDNN has the micro-kernel, else fp32. Each size needs a micro-kernel, so
// tiles have few sizes (`rounded_up`).
//
// q [sq, b, n, d], k [sk, b, g, d], v [sk, b, g, dv], any strides, last one 1; out [sq, b, n, dv] contiguous; lse [b,
// n, sq], -inf for a query without keys.
#include "pieces.h"

namespace {

// Online softmax of a tile of queries: e^(scale (score - base)) and their sum.
struct Running {
    alignas(64) float base[QUERIES], total[QUERIES], factor[QUERIES];
};

// Turns scores into e^(scale (score - base)); returns whether earlier sums must be multiplied by `factor`.
//
// Subtracts before scaling: for large scores the rounded product would be noise.
template <typename In>
bool weigh(const Call<In>& call, const Tile& tile, Running& running, float* scores) {
    float *const base = running.base, *const total = running.total, *const factor = running.factor;
    const float scale = std::min(call.scale * LOG2E, std::numeric_limits<float>::max());
    const PowerBounds bounds;
    alignas(64) float most[QUERIES], less[QUERIES];
    std::fill(most, most + tile.columns, -INF);
    // Four rows at a time hide memory latency. (Tiles have a multiple of eight.)
    for (int64_t k = 0; k < tile.rows; k += 4) {
        const float *a = scores + k * tile.columns, *b = a + tile.columns, *c = b + tile.columns, *d = c + tile.columns;
#pragma omp simd
        for (int64_t q = 0; q < tile.columns; ++q) {
            const float x = a[q] > most[q] ? a[q] : most[q], y = b[q] > x ? b[q] : x, z = c[q] > y ? c[q] : y;
            most[q] = d[q] > z ? d[q] : z;
        }
    }
    int32_t grown = 0;
#pragma omp simd reduction(| : grown)
    for (int64_t q = 0; q < tile.columns; ++q) {
        // Any base that keeps the sums within fp32 works, so it changes in large steps only.
        const bool follows = !((most[q] - base[q]) * scale <= LARGEST_POWER);
        // Without a key yet the base stays -inf; avoids -inf - -inf.
        const float after = follows ? most[q] : base[q];
        factor[q] = follows ? exp2_((base[q] - after) * scale, bounds) : 1.0f;
        factor[q] = after == -INF ? 1.0f : factor[q];
        base[q] = after;
        less[q] = after == -INF ? 0.0f : after;
        total[q] *= factor[q];
        grown |= follows;
    }
    for (int64_t k = 0; k < tile.rows; ++k) {
        float* row = scores + k * tile.columns;
#pragma omp simd
        for (int64_t q = 0; q < tile.columns; ++q) {
            const float p = exp2_((row[q] - less[q]) * scale, bounds);
            total[q] += p;
            row[q] = p;
        }
    }
    return grown;
}

template <typename M>
struct ForwardSpace {
    Buffer<float> scores, sums, scratch;
    Buffer<M> lines, query, weights;
    template <typename In>
    explicit ForwardSpace(const Call<In>& call)
        : scores(KEYS<M> * QUERIES),
          sums(call.dv * QUERIES),
          scratch(call.dv * QUERIES),
          lines(std::max(call.d, call.dv) * std::max(QUERIES, KEYS<M>)),
          query(call.d * QUERIES),
          weights(PAIRS<M> == 2 ? KEYS<M> * QUERIES : 0) {}
    static void done() { done_multiplying<M>(); }
};

// wide: out is fp32 instead of In.
template <typename M, typename In>
void forward(Guard& guard, const In* q, const In* k, const In* v, const Sizes* sizes, const uint8_t* mask, float scale,
             void* to, float* lse, int wide, int threads) {
    const Call<In> call{*sizes, q, k, v, mask, scale};
    const Result<In> out(to, wide);
    const Cut cut(call, threads, QUERIES, rounded_up(call.sk, KEYS<M>));
    const int64_t height = cut.height, padded = cut.key_tiles * height;
    // K and V^T, tile by tile: [pair][tile][height][d] and [pair][tile][dv][height].
    Buffer<M> all_keys(cut.together * padded * call.d), all_values(cut.together * padded * call.dv);
    const auto prepare = [&](ForwardSpace<M>& space, int64_t pair, int64_t slot, int64_t tile) {
        const int64_t k0 = tile * height;
        const int64_t keys = std::min(height, call.sk - k0), batch = pair / call.g, group = pair % call.g;
        const int64_t place = slot * padded + k0;
        rows(call.k + k0 * call.ks + batch * call.kb + group * call.kn, call.ks, keys, call.d, height,
             all_keys + place * call.d);
        M* const lines = space.lines;
        rows(call.v + k0 * call.vs + batch * call.vb + group * call.vn, call.vs, keys, call.dv, height, lines);
        transpose(lines, height, call.dv, all_values + place * call.dv);
    };
    const auto run = [&](ForwardSpace<M>& space, int64_t pair, int64_t slot, int64_t member, int64_t number) {
        float *const scores = space.scores, *const sums = space.sums;
        M *const lines = space.lines, *const query = space.query, *const weights = space.weights;
        const int64_t q0 = number * QUERIES;
        const int64_t batch = pair / call.g, head = pair % call.g * cut.per_group + member, i = batch * call.n + head;
        const int64_t queries = std::min(QUERIES, call.sq - q0), width = rounded_up(queries, QUERIES);
        rows(call.q + q0 * call.qs + batch * call.qb + head * call.qn, call.qs, queries, call.d, width, lines);
        paired_columns(lines, width, call.d, query);
        Running running;
        std::fill(running.base, running.base + width, -INF);
        std::fill(running.total, running.total + width, 0.0f);
        std::fill(sums, sums + call.dv * width, 0.0f);
        const int64_t end = call.end_key(q0 + queries);
        for (int64_t k0 = call.first_key(q0) / height * height; k0 < end; k0 += height) {
            const Tile tile{k0, std::min(height, call.sk - k0), height, q0, queries, width};
            const int64_t place = slot * padded + k0;
            multiply(height, width, call.d, all_keys + place * call.d, call.d, query, scores, width, false);
            if (!all_visible(call, tile)) hide(call, batch, head, tile, scores);
            const bool grown = weigh(call, tile, running, scores);
            for (int64_t k = 0; call.dropped && k < tile.keys; ++k) {
                drop(call, i * call.sq + q0, width, k0 + k, scores + k * width);
            }
            for (int64_t j = 0; grown && j < call.dv; ++j) {
                float* row = sums + j * width;
#pragma omp simd
                for (int64_t q = 0; q < width; ++q) row[q] *= running.factor[q];
            }
            const M* to_sum;
            if constexpr (PAIRS<M> == 2) {
                for (int64_t k = 0; k < height; k += 2) {
                    round_pairs(scores + k * width, scores + (k + 1) * width, width, weights + k * width);
                }
                to_sum = weights;
            } else {
                to_sum = scores;
            }
            multiply(call.dv, width, height, all_values + place * call.dv, height, to_sum, sums, width, true);
        }
        for (int64_t q = 0; q < width; ++q) {
            // 0 without a key; NaN stays NaN.
            const float total = running.total[q];
            running.factor[q] = total == 0.0f ? 0.0f : 1.0f / total;
            if (q >= queries) continue;
            lse[i * call.sq + q0 + q] = total == 0.0f ? -INF : running.base[q] * call.scale + std::log(total);
        }
        write_rows(sums, running.factor, queries, width, call.dv, space.scratch, out, (q0 * call.b * call.n + i) * call.dv,
                   call.b * call.n * call.dv);
    };
    in_pieces<ForwardSpace<M>>(call, cut, guard, prepare, run, [](int64_t, int64_t, int64_t) {});
}

template <typename M>
struct BackwardSpace {
    Buffer<float> scores, slopes, sums, scratch;
    Buffer<M> lines, weights, slope_rows, slope_pairs;
    Buffer<M> q_columns, q_rows, dout_columns, dout_rows;
    template <typename In>
    explicit BackwardSpace(const Call<In>& call)
        : scores(KEYS<M> * QUERIES),
          slopes(KEYS<M> * QUERIES),
          sums(call.d * QUERIES),
          scratch(call.d * QUERIES),
          lines(std::max(call.d, call.dv) * std::max(QUERIES, KEYS<M>)),
          weights(PAIRS<M> == 2 ? KEYS<M> * QUERIES : 0),
          slope_rows(PAIRS<M> == 2 ? KEYS<M> * QUERIES : 0),
          slope_pairs(PAIRS<M> == 2 ? KEYS<M> * QUERIES : 0),
          q_columns(call.d * QUERIES),
          q_rows(call.d * QUERIES),
          dout_columns(call.dv * QUERIES),
          dout_rows(call.dv * QUERIES) {}
    static void done() { done_multiplying<M>(); }
};

// dq [sq, b, n, d], dk [sk, b, g, d], dv [sk, b, g, dv] contiguous, fp32 if `wide`; dout [sq, b, n, dv] by its strides.
template <typename M, typename In>
void backward(Guard& guard, const In* q, const In* k, const In* v, const Sizes* sizes, const uint8_t* mask, float scale,
              const In* out, const float* lse, const In* dout, void* to_dq, void* to_dk, void* to_dv, int wide,
              int threads) {
    const Call<In> call{*sizes, q, k, v, mask, scale};
    const Result<In> dq(to_dq, wide), dk(to_dk, wide), dv(to_dv, wide);
    const int64_t os = call.os;
    const Cut cut(call, threads, QUERIES, rounded_up(call.sk, KEYS<M>));
    const int64_t height = cut.height, padded = cut.key_tiles * height, d = call.d, size = call.dv;
    Buffer<M> all_keys(cut.together * padded * d), all_values(cut.together * padded * size);
    Buffer<M> all_columns(cut.together * padded * d);  // K^T
    Buffer<float> to_k(cut.together * padded * d), to_v(cut.together * padded * size);
    Turns turns(call, cut);
    const auto prepare = [&](BackwardSpace<M>&, int64_t pair, int64_t slot, int64_t tile) {
        const int64_t k0 = tile * height, keys = std::min(height, call.sk - k0), place = slot * padded + k0;
        const int64_t batch = pair / call.g, group = pair % call.g;
        M* const to = all_keys + place * d;
        rows(call.k + k0 * call.ks + batch * call.kb + group * call.kn, call.ks, keys, d, height, to);
        rows(call.v + k0 * call.vs + batch * call.vb + group * call.vn, call.vs, keys, size, height,
             all_values + place * size);
        transpose(to, height, d, all_columns + place * d);
        std::fill(to_k + place * d, to_k + (place + height) * d, 0.0f);
        std::fill(to_v + place * size, to_v + (place + height) * size, 0.0f);
        turns.reset(slot, tile);
    };
    const auto finish = [&](int64_t pair, int64_t slot, int64_t tile) {
        const int64_t k0 = tile * height, keys = std::min(height, call.sk - k0), place = slot * padded + k0;
        float* const from = to_k + place * d;
        for (int64_t x = 0; x < keys * d; ++x) from[x] *= call.scale;
        for (int64_t row = 0; row < keys; ++row) {
            const int64_t at = (k0 + row) * cut.pairs + pair;
            dk.put(from + row * d, d, at * d);
            dv.put(to_v + (place + row) * size, size, at * size);
        }
    };
    const auto run = [&](BackwardSpace<M>& space, int64_t pair, int64_t slot, int64_t member, int64_t number) {
        float *const scores = space.scores, *const slopes = space.slopes, *const sums = space.sums;
        M* const lines = space.lines;
        const int64_t batch = pair / call.g, head = pair % call.g * cut.per_group + member, i = batch * call.n + head;
        const int64_t q0 = number * QUERIES, queries = std::min(QUERIES, call.sq - q0);
        const int64_t width = rounded_up(queries, QUERIES);
        const In* grad = dout + q0 * os + batch * call.ob + head * call.on;
        rows(call.q + q0 * call.qs + batch * call.qb + head * call.qn, call.qs, queries, d, width, lines);
        paired_columns(lines, width, d, space.q_columns);
        paired_rows(lines, width, d, space.q_rows);
        rows(grad, os, queries, size, width, lines);
        paired_columns(lines, width, size, space.dout_columns);
        paired_rows(lines, width, size, space.dout_rows);
        alignas(64) float logs[QUERIES] = {}, dots[QUERIES] = {};
        read_softmax(call, out + (q0 * call.b * call.n + i) * size, lse + i * call.sq + q0, grad, os, queries, logs, dots);
        std::fill(sums, sums + d * width, 0.0f);
        const int64_t end = call.end_key(q0 + queries);
        for (int64_t k0 = call.first_key(q0) / height * height; k0 < end; k0 += height) {
            const Tile tile{k0, std::min(height, call.sk - k0), height, q0, queries, width};
            const int64_t place = slot * padded + k0;
            const M *const q_columns = space.q_columns, *const dout_columns = space.dout_columns;
            multiply(height, width, d, all_keys + place * d, d, q_columns, scores, width, false);
            if (!all_visible(call, tile)) hide(call, batch, head, tile, scores);
            multiply(height, width, size, all_values + place * size, size, dout_columns, slopes, width, false);
            const PowerBounds bounds;
            for (int64_t row = 0; row < height; ++row) {
                float *const s = scores + row * width, *const ds = slopes + row * width;
                // The softmax derivative uses p before dropout; the GEMM with v and its derivative use p after dropout.
                if (call.dropped) drop(call, i * call.sq + q0, width, k0 + row, ds);
#pragma omp simd
                for (int64_t q = 0; q < width; ++q) {
                    // Rounded like the maximum: fused into the difference, large scores would give noise.
                    const float scaled = std::fma(s[q], call.scale, 0.0f);
                    const float p = exp2_((scaled - logs[q]) * LOG2E, bounds);
                    s[q] = p;
                    ds[q] = p * (ds[q] - dots[q]);
                }
                if (call.dropped) drop(call, i * call.sq + q0, width, k0 + row, s);
            }
            const M *weights, *slope_rows, *slope_pairs;
            if constexpr (PAIRS<M> == 2) {
                for (int64_t row = 0; row < height; row += 2) {
                    float *const s = scores + row * width, *const ds = slopes + row * width;
                    round_row(s, 2 * width, space.weights + row * width);
                    round_row(ds, 2 * width, space.slope_rows + row * width);
                    round_pairs(ds, ds + width, width, space.slope_pairs + row * width);
                }
                weights = space.weights, slope_rows = space.slope_rows, slope_pairs = space.slope_pairs;
            } else {
                weights = scores, slope_rows = slope_pairs = slopes;
            }
            multiply(d, width, height, all_columns + place * d, height, slope_pairs, sums, width, true);
            const M *const q_rows = space.q_rows, *const dout_rows = space.dout_rows;
            const int64_t key_tile = k0 / height, turn = turns.wait(slot, key_tile, number, member, guard);
            multiply(height, size, width, weights, width, dout_rows, to_v + place * size, size, true);
            multiply(height, d, width, slope_rows, width, q_rows, to_k + place * d, d, true);
            turns.end(slot, key_tile, turn);
        }
        std::fill(logs, logs + width, call.scale);
        write_rows(sums, logs, queries, width, d, space.scratch, dq, (q0 * call.b * call.n + i) * d, call.b * call.n * d);
    };
    in_pieces<BackwardSpace<M>>(call, cut, guard, prepare, run, finish);
}

}  // namespace

EXPORT(forward_bf16, forward<bf16, bf16>);
EXPORT(forward_bf16_as_float, forward<float, bf16>);
EXPORT(forward_float, forward<float, float>);
EXPORT(backward_bf16, backward<bf16, bf16>);
EXPORT(backward_bf16_as_float, backward<float, bf16>);
EXPORT(backward_float, backward<float, float>);
