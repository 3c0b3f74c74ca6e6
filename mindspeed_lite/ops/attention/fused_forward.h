// Attention forward and backward in bf16 on processors that multiply pairs of bf16 numbers (`pairs.h`): scores, softmax
// and its derivative stay in registers between the products.
//
// The passes are those of `cpu.cpp`, and tiles lie transposed as there: a row is a key, and queries lie along the vector.
// Four keys go by a panel of queries at a time, from the product of the scores to rounded probabilities. K is read as its
// rows lie, V by pairs of keys, four columns together; nothing of them is transposed.
#pragma once

#include "pairs.h"

#ifdef MULTIPLIES_PAIRS

namespace {

// Keys of a tile.
constexpr int64_t FUSED_KEYS = 128;

struct FusedForwardSpace {
    Buffer<bf16> lines;
    Buffer<Pair> query, weights;
    Buffer<float> sums, scratch;
    explicit FusedForwardSpace(const Call<bf16>& call)
        : lines(std::max(call.d, call.dv) * FUSED_KEYS),
          query(call.d / 2 * PANEL_LANES),
          weights(FUSED_KEYS / 2 * PANEL_LANES),
          sums(up(call.dv, ROWS) * PANEL_LANES),
          scratch(call.dv * PANEL_LANES) {}
    static void done() {}
};

struct FusedForward {
    const Call<bf16>& call;
    const Result<bf16> out;
    float* lse;
    const Cut cut;
    const int64_t height, padded, d, size;  // d in pairs; size of a value, in whole rows of A
    Buffer<bf16> keys;                      // [pair][key][d]
    Buffer<Pair> values;                    // [pair][tile][size / 4][height / 2][4]

    FusedForward(const Call<bf16>& given, const Result<bf16>& out_, float* lse_, int threads)
        : call(given),
          out(out_),
          lse(lse_),
          cut(given, threads, PANEL_LANES, std::min(FUSED_KEYS, up(given.sk, ROWS))),
          height(cut.height),
          padded(cut.key_tiles * height),
          d(given.d / 2),
          size(up(given.dv, ROWS)),
          keys(cut.together * padded * given.d),
          values(cut.together * padded / 2 * size) {}

    void prepare(FusedForwardSpace& space, int64_t pair, int64_t slot, int64_t tile) const {
        const int64_t k0 = tile * height, place = slot * padded + k0, count = std::min(height, call.sk - k0);
        const int64_t batch = pair / call.g, group = pair % call.g;
        rows(call.k + k0 * call.ks + batch * call.kb + group * call.kn, call.ks, count, call.d, height,
             keys + place * call.d);
        rows(call.v + k0 * call.vs + batch * call.vb + group * call.vn, call.vs, count, call.dv, height,
             static_cast<bf16*>(space.lines));
        pack_left(space.lines, height, call.dv, values + place / 2 * size);
    }

    // The softmax of a panel of queries, as far as their keys have been seen: the sum of e^(scale (score - base)).
    template <int C>
    struct Softmax {
        alignas(64) float base[C * LANES], less[C * LANES], limit[C * LANES], total[C * LANES], most[C * LANES];
    };

    // sums [size][width] += V^T P over the keys [from, to) of a tile.
    template <int C>
    void add_values(FusedForwardSpace& space, int64_t slot, int64_t from, int64_t to) const {
        constexpr int64_t width = C * LANES;
        if (from == to) return;
        const int64_t k0 = from / height * height;
        const Pair* value = values + (slot * padded + k0) / 2 * size + (from - k0) / 2 * ROWS;
        for (int64_t j = 0; j < size; j += ROWS, value += height / 2 * ROWS) {
            add_product<C>(space.sums + j * width, width, (to - from) / 2, value, 1, ROWS, space.weights, width);
        }
    }

    // Lets the base of those queries follow whose score in `most` is above their limit.
    template <int C>
    [[gnu::noinline, gnu::cold]] void follow(FusedForwardSpace& space, Softmax<C>& softmax, float scale) const {
        constexpr int64_t width = C * LANES;
        const float step = std::min(LARGEST_POWER / scale, std::numeric_limits<float>::max());
        const float* const most = softmax.most;
        const PowerBounds bounds;
        alignas(64) float factor[width];
        for (int64_t q = 0; q < width; ++q) {
            const bool follows = most[q] > softmax.limit[q];
            factor[q] = follows ? exp2_((softmax.base[q] - most[q]) * scale, bounds) : 1.0f;
            softmax.base[q] = follows ? most[q] : softmax.base[q];
            softmax.less[q] = follows ? most[q] : softmax.less[q];
            softmax.limit[q] = follows ? most[q] + step : softmax.limit[q];
            softmax.total[q] *= factor[q];
        }
        for (int64_t j = 0; j < size; ++j) {
            float* row = space.sums + j * width;
#pragma omp simd
            for (int64_t q = 0; q < width; ++q) row[q] *= factor[q];
        }
    }

    // Four keys times a panel of queries: their probabilities into `weights`, rounded, and into the totals. Instead, false
    // and the largest scores where one is above its limit.
    //
    // A function of its own has all registers for the product. visible, keeps: bits of `seen` and `kept`, or null for all.
    template <int C>
    [[gnu::noinline]] static bool weigh(Softmax<C>& softmax, int64_t d, const Pair* key, const Pair* query, float scale,
                                        const uint64_t* visible, const uint64_t* keeps, float kept_factor, Pair* weights) {
        __m512 s[ROWS][C];
        clear(s);
        multiply_add(s, d, key, d, 1, query, C * LANES);
        if (visible) {
#pragma GCC unroll 4
            for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
                for (int c = 0; c < C; ++c) {
                    const auto lanes = static_cast<__mmask16>(visible[r] >> (c * LANES));
                    s[r][c] = _mm512_mask_mov_ps(_mm512_set1_ps(-INF), lanes, s[r][c]);
                }
        }
        // Any base will do that keeps the sums within fp32, so it follows the maximum in large steps only.
        __mmask16 above = 0;
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) {
            const __m512 limit = _mm512_load_ps(softmax.limit + c * LANES);
            __m512 most = limit;
            // The second operand where the first is NaN.
#pragma GCC unroll 4
            for (int r = 0; r < ROWS; ++r) most = _mm512_max_ps(s[r][c], most);
            above |= _mm512_cmp_ps_mask(most, limit, _CMP_GT_OQ);
            _mm512_store_ps(softmax.most + c * LANES, most);
        }
        if (__builtin_expect(above != 0, 0)) return false;
        const __m512 factor = _mm512_set1_ps(scale);
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) {
            const __m512 less = _mm512_load_ps(softmax.less + c * LANES);
            __m512 total = _mm512_load_ps(softmax.total + c * LANES);
#pragma GCC unroll 4
            for (int r = 0; r < ROWS; ++r) {
                // The difference is taken first and scaled then: for large scores the rounded product would be noise.
                s[r][c] = power<false>(_mm512_mul_ps(_mm512_sub_ps(s[r][c], less), factor));
                total = _mm512_add_ps(total, s[r][c]);
            }
            _mm512_store_ps(softmax.total + c * LANES, total);
            if (keeps) {
#pragma GCC unroll 4
                for (int r = 0; r < ROWS; ++r) {
                    const auto lanes = static_cast<__mmask16>(keeps[r] >> (c * LANES));
                    s[r][c] = _mm512_maskz_mul_ps(lanes, s[r][c], _mm512_set1_ps(kept_factor));
                }
            }
            _mm512_store_si512(weights + c * LANES, rounded_pairs(s[0][c], s[1][c]));
            _mm512_store_si512(weights + (C + c) * LANES, rounded_pairs(s[2][c], s[3][c]));
        }
        return true;
    }

    template <int C>
    void tile(FusedForwardSpace& space, int64_t pair, int64_t slot, int64_t member, int64_t q0) const {
        constexpr int64_t width = C * LANES;
        const int64_t batch = pair / call.g, head = pair % call.g * cut.per_group + member, i = batch * call.n + head;
        const int64_t queries = std::min(width, call.sq - q0);
        const uint8_t* const mask = call.mask ? call.mask + batch * call.mask_b + head * call.mask_n : nullptr;
        const float scale = std::min(call.scale * LOG2E, std::numeric_limits<float>::max()), more = kept_factor(call);
        rows(call.q + q0 * call.qs + batch * call.qb + head * call.qn, call.qs, queries, call.d, width,
             static_cast<bf16*>(space.lines));
        transpose(as_pairs(space.lines), width, d, static_cast<Pair*>(space.query));
        Softmax<C> softmax;
        std::fill(softmax.base, softmax.base + width, -INF);
        std::fill(softmax.less, softmax.less + width, 0.0f);
        std::fill(softmax.limit, softmax.limit + width, -INF);
        std::fill(softmax.total, softmax.total + width, 0.0f);
        std::fill(space.sums + 0, space.sums + size * width, 0.0f);

        const Pair* const key = as_pairs(keys + slot * padded * call.d);
        // By position all queries see the keys [all_from, all_to).
        const int64_t end = call.end_key(q0 + queries), all_from = call.first_key(q0 + queries - 1);
        const int64_t all_to = mask ? 0 : std::min(call.sk, call.end_key(q0 + 1));
        // The weights of the keys [pending, k) are not in the sums yet.
        int64_t k = call.first_key(q0) / ROWS * ROWS, pending = k;
        for (int64_t next = (k / height + 1) * height; k < end; k += ROWS) {
            if (k == next) {
                add_values<C>(space, slot, pending, k);
                pending = k, next += height;
            }
            const bool partial = k < all_from || k + ROWS > all_to;
            uint64_t visible[ROWS], keeps[ROWS];
            for (int r = 0; partial && r < ROWS; ++r) visible[r] = seen(call, mask, k + r, q0);
            for (int r = 0; call.dropped && r < ROWS; ++r) keeps[r] = kept<width>(call, i * call.sq + q0, k + r);
            const auto weigh_keys = [&] {
                return weigh<C>(softmax, d, key + k * d, space.query, scale, partial ? visible : nullptr,
                                call.dropped ? keeps : nullptr, more, space.weights + (k - pending) / 2 * width);
            };
            if (__builtin_expect(!weigh_keys(), 0)) {
                add_values<C>(space, slot, pending, k);
                pending = k;
                follow<C>(space, softmax, scale);
                weigh_keys();
            }
        }
        add_values<C>(space, slot, pending, k);
        alignas(64) float factor[width];
        for (int64_t q = 0; q < width; ++q) {
            // 0 without a key; NaN stays NaN.
            const float total = softmax.total[q];
            factor[q] = total == 0.0f ? 0.0f : 1.0f / total;
            if (q >= queries) continue;
            lse[i * call.sq + q0 + q] = total == 0.0f ? -INF : softmax.base[q] * call.scale + std::log(total);
        }
        write_rows(space.sums, factor, queries, width, call.dv, space.scratch, out, (q0 * call.b * call.n + i) * call.dv,
                   call.b * call.n * call.dv);
    }

    void run(FusedForwardSpace& space, int64_t pair, int64_t slot, int64_t member, int64_t number) const {
        const int64_t q0 = number * PANEL_LANES;
        call.sq - q0 <= LANES ? tile<1>(space, pair, slot, member, q0) : tile<4>(space, pair, slot, member, q0);
    }
};

}  // namespace
#endif
