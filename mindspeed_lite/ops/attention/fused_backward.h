// The backward pass of `fused_forward.h`: of 4 keys by 32 queries at a time scores, probabilities and their derivative are
// computed in registers; what the other three products read is rounded into tiles, whose parts that no query sees they
// leave out.
#pragma once

#include "fused_forward.h"

#ifdef MULTIPLIES_PAIRS

namespace {

// Queries of a tile, and of one round of scores and derivatives.
constexpr int64_t BACKWARD_QUERIES = 128, HALF_PANEL = 32;

struct FusedBackwardSpace {
    Buffer<bf16> lines;
    // Rows of probabilities and of the scores' gradient, [keys][queries / 2]; the latter by pairs of keys,
    // [queries / 64][keys / 2][64].
    Buffer<Pair> weights, slope_rows, slope_pairs;
    // Queries and dout: transposed, [queries / 32][d / 2][32], and by pairs of queries, [d / 64][queries / 2][64].
    Buffer<Pair> q_columns, dout_columns, q_pairs, dout_pairs;
    Buffer<float> sums, scratch;
    explicit FusedBackwardSpace(const Call<bf16>& call)
        : lines(std::max(call.d, call.dv) * BACKWARD_QUERIES),
          weights(FUSED_KEYS * BACKWARD_QUERIES / 2),
          slope_rows(FUSED_KEYS * BACKWARD_QUERIES / 2),
          slope_pairs(FUSED_KEYS * BACKWARD_QUERIES / 2),
          q_columns(call.d / 2 * BACKWARD_QUERIES),
          dout_columns(call.dv / 2 * BACKWARD_QUERIES),
          q_pairs(up(call.d, PANEL_LANES) * BACKWARD_QUERIES / 2),
          dout_pairs(up(call.dv, PANEL_LANES) * BACKWARD_QUERIES / 2),
          sums(up(call.d, ROWS) * BACKWARD_QUERIES),
          scratch(call.d * BACKWARD_QUERIES) {
        // Columns beyond the last one are multiplied, too.
        std::fill(q_pairs + 0, q_pairs + up(call.d, PANEL_LANES) * BACKWARD_QUERIES / 2, Pair{});
        std::fill(dout_pairs + 0, dout_pairs + up(call.dv, PANEL_LANES) * BACKWARD_QUERIES / 2, Pair{});
    }
    static void done() {}
};

struct FusedBackward {
    const Call<bf16>& call;
    const bf16* out;
    const float* lse;
    const bf16* dout;
    const int64_t os, ob, on;
    const Result<bf16> dq, dk, dv;
    const Cut cut;
    const int64_t height, padded, depth, ld_k, ld_v;
    Buffer<bf16> keys, values;  // [pair][key][d] and [dv]
    Buffer<Pair> key_pairs;     // [pair][tile][depth / 4][height / 2][4]
    Buffer<float> to_k, to_v;   // [pair][key][ld]
    Turns turns;

    FusedBackward(const Call<bf16>& given, const bf16* out_, const float* lse_, const bf16* dout_, int64_t os_, int64_t ob_,
                  int64_t on_, const Result<bf16>& dq_, const Result<bf16>& dk_, const Result<bf16>& dv_, int threads)
        : call(given),
          out(out_),
          lse(lse_),
          dout(dout_),
          os(os_),
          ob(ob_),
          on(on_),
          dq(dq_),
          dk(dk_),
          dv(dv_),
          cut(given, threads, BACKWARD_QUERIES, std::min(FUSED_KEYS, up(given.sk, ROWS))),
          height(cut.height),
          padded(cut.key_tiles * height),
          depth(up(given.d, ROWS)),
          ld_k(up(given.d, LANES)),
          ld_v(up(given.dv, LANES)),
          keys(cut.together * padded * given.d),
          values(cut.together * padded * given.dv),
          key_pairs(cut.together * padded / 2 * depth),
          to_k(cut.together * padded * ld_k),
          to_v(cut.together * padded * ld_v),
          turns(call, cut) {}

    void prepare(FusedBackwardSpace&, int64_t pair, int64_t slot, int64_t tile) {
        const int64_t k0 = tile * height, count = std::min(height, call.sk - k0), place = slot * padded + k0;
        const int64_t batch = pair / call.g, group = pair % call.g;
        bf16* const key = keys + place * call.d;
        rows(call.k + k0 * call.ks + batch * call.kb + group * call.kn, call.ks, count, call.d, height, key);
        rows(call.v + k0 * call.vs + batch * call.vb + group * call.vn, call.vs, count, call.dv, height,
             values + place * call.dv);
        pack_left(key, height, call.d, key_pairs + place / 2 * depth);
        std::fill(to_k + place * ld_k, to_k + (place + height) * ld_k, 0.0f);
        std::fill(to_v + place * ld_v, to_v + (place + height) * ld_v, 0.0f);
        turns.reset(slot, tile);
    }

    void finish(int64_t pair, int64_t slot, int64_t tile) const {
        const int64_t k0 = tile * height, count = std::min(height, call.sk - k0), place = slot * padded + k0;
        float* const from = to_k + place * ld_k;
        for (int64_t row = 0; row < count; ++row) {
            for (int64_t x = 0; x < ld_k; ++x) from[row * ld_k + x] *= call.scale;
            const int64_t at = (k0 + row) * cut.pairs + pair;
            dk.put(from + row * ld_k, call.d, at * call.d);
            dv.put(to_v + (place + row) * ld_v, call.dv, at * call.dv);
        }
    }

    // One tile of queries of one head.
    struct Queries {
        int64_t place, q0, count, width;  // place: of its first query among those of all heads
        const uint8_t* mask;
        alignas(64) float logs[BACKWARD_QUERIES], dots[BACKWARD_QUERIES];
    };

    // What four keys and half a panel of queries are computed from.
    struct Block {
        int64_t d, size;  // in pairs
        const Pair *key, *value, *query, *grad;
        const float *logs, *dots;
        float scale, kept_factor;
        const uint64_t *visible, *keeps;  // bits of `seen` and `kept`, or null for all
        Pair *weights, *slope_rows, *slope_pairs;
    };

    // Probabilities and the gradient of the scores, rounded. A function of its own has all registers for the products.
    [[gnu::noinline]] static void weigh_block(const Block& at) {
        __m512 s[ROWS][2], g[ROWS][2];
        clear(s);
        multiply_add(s, at.d, at.key, at.d, 1, at.query, HALF_PANEL);
        clear(g);
        multiply_add(g, at.size, at.value, at.size, 1, at.grad, HALF_PANEL);
        const __m512 scale = _mm512_set1_ps(at.scale), log2e = _mm512_set1_ps(LOG2E);
#pragma GCC unroll 2
        for (int c = 0; c < 2; ++c) {
            const __m512 log = _mm512_load_ps(at.logs + c * LANES), dot = _mm512_load_ps(at.dots + c * LANES);
#pragma GCC unroll 4
            for (int r = 0; r < ROWS; ++r) {
                // Rounded as the maximum was: as part of the difference it would not be, and for large scores that
                // difference would be noise.
                const __m512 scaled = _mm512_fmadd_ps(s[r][c], scale, _mm512_setzero_ps());
                s[r][c] = power<true>(_mm512_mul_ps(_mm512_sub_ps(scaled, log), log2e));
                // The derivative of the softmax has the probability itself, dropped or not; the product with v and its
                // derivative have what is left of it.
                if (at.keeps) {
                    const auto lanes = static_cast<__mmask16>(at.keeps[r] >> (c * LANES));
                    const __m512 more = _mm512_set1_ps(at.kept_factor);
                    g[r][c] = _mm512_mul_ps(s[r][c], _mm512_sub_ps(_mm512_maskz_mul_ps(lanes, g[r][c], more), dot));
                    s[r][c] = _mm512_maskz_mul_ps(lanes, s[r][c], more);
                } else {
                    g[r][c] = _mm512_mul_ps(s[r][c], _mm512_sub_ps(g[r][c], dot));
                }
                if (at.visible) {
                    const auto lanes = static_cast<__mmask16>(at.visible[r] >> (c * LANES));
                    s[r][c] = _mm512_maskz_mov_ps(lanes, s[r][c]);
                    g[r][c] = _mm512_maskz_mov_ps(lanes, g[r][c]);
                }
            }
        }
        __m512i slopes[ROWS];
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; ++r) {
            slopes[r] = rounded_row(g[r][0], g[r][1]);
            _mm512_store_si512(at.slope_rows + r * (BACKWARD_QUERIES / 2), slopes[r]);
            _mm512_store_si512(at.weights + r * (BACKWARD_QUERIES / 2), rounded_row(s[r][0], s[r][1]));
        }
#pragma GCC unroll 2
        for (int r = 0; r < 2; ++r) {
            Pair* const to = at.slope_pairs + r * PANEL_LANES;
            _mm512_store_si512(to, pairs_of<0>(slopes[2 * r], slopes[2 * r + 1]));
            _mm512_store_si512(to + LANES, pairs_of<1>(slopes[2 * r], slopes[2 * r + 1]));
        }
    }

    // Probabilities and the gradient of the scores, of the keys [ka, kb) of a tile from k0 on, rounded.
    void weigh(FusedBackwardSpace& space, const Queries& at, int64_t slot, int64_t k0, int64_t ka, int64_t kb) const {
        const int64_t d = call.d / 2, size = call.dv / 2;
        const float more = kept_factor(call);
        const Pair* const key = as_pairs(keys + (slot * padded + k0) * call.d);
        const Pair* const value = as_pairs(values + (slot * padded + k0) * call.dv);
        for (int64_t column = 0; column < at.width; column += HALF_PANEL) {
            const int64_t q0 = at.q0 + column, end = std::min(q0 + HALF_PANEL, at.q0 + at.count);
            // By position some of these queries see the keys [some_from, some_to), and all of them [all_from, all_to).
            const int64_t some_from = call.first_key(q0), some_to = q0 < end ? call.end_key(end) : 0;
            const int64_t all_from = call.first_key(std::max(q0, end - 1));
            const int64_t all_to = at.mask ? 0 : std::min(call.sk, call.end_key(q0 + 1));
            const Pair *const q = space.q_columns + column * d, *const grad = space.dout_columns + column * size;
            Pair* pairs = space.slope_pairs + column / PANEL_LANES * (height / 2 * PANEL_LANES) + column % PANEL_LANES +
                          (ka - k0) / 2 * PANEL_LANES;
            for (int64_t k = ka; k < kb; k += ROWS, pairs += ROWS / 2 * PANEL_LANES) {
                if (k + ROWS <= some_from || k >= some_to) {
                    for (int r = 0; r < ROWS; ++r) {
                        _mm512_store_si512(pairs + r / 2 * PANEL_LANES + r % 2 * LANES, _mm512_setzero_si512());
                    }
                    continue;
                }
                const bool partial = k < all_from || k + ROWS > all_to;
                uint64_t visible[ROWS], keeps[ROWS];
                for (int r = 0; partial && r < ROWS; ++r) visible[r] = seen(call, at.mask, k + r, q0);
                for (int r = 0; call.dropped && r < ROWS; ++r) {
                    keeps[r] = kept<HALF_PANEL>(call, at.place + column, k + r);
                }
                const int64_t row = (k - k0) * (BACKWARD_QUERIES / 2) + column / 2;
                weigh_block({d, size, key + (k - k0) * d, value + (k - k0) * size, q, grad, at.logs + column,
                             at.dots + column, call.scale, more, partial ? visible : nullptr,
                             call.dropped ? keeps : nullptr, space.weights + row, space.slope_rows + row, pairs});
            }
        }
    }

    // to [key][ld] += the rows `left` of the keys [ka, kb) times `right`, over the queries that see them.
    template <int C>
    void add_columns(const Queries& at, int64_t k0, int64_t ka, int64_t kb, const Pair* left, const Pair* right, float* to,
                     int64_t ld) const {
        for (int64_t k = ka; k < kb; k += ROWS) {
            const int64_t from = std::max<int64_t>(0, call.first_query(k) - at.q0) / 2;
            const int64_t end = (std::min(at.count, call.end_query(k + ROWS) - at.q0) + 1) / 2;
            add_product<C>(to + (k - k0) * ld, ld, end - from, left + (k - k0) * (BACKWARD_QUERIES / 2) + from,
                           BACKWARD_QUERIES / 2, 1, right + from * PANEL_LANES, PANEL_LANES);
        }
    }

    void add_rows(const Queries& at, int64_t k0, int64_t ka, int64_t kb, const Pair* left, const Pair* right, float* to,
                  int64_t ld) const {
        for (int64_t j = 0; j < ld; j += PANEL_LANES, right += at.width / 2 * PANEL_LANES) {
            switch (std::min(ld - j, PANEL_LANES) / LANES) {
                case 1: add_columns<1>(at, k0, ka, kb, left, right, to + j, ld); break;
                case 2: add_columns<2>(at, k0, ka, kb, left, right, to + j, ld); break;
                case 3: add_columns<3>(at, k0, ka, kb, left, right, to + j, ld); break;
                default: add_columns<4>(at, k0, ka, kb, left, right, to + j, ld);
            }
        }
    }

    // sums [depth][width] += K^T dS^T over the keys [ka, kb) of a tile.
    void add_keys(FusedBackwardSpace& space, const Queries& at, int64_t slot, int64_t k0, int64_t ka, int64_t kb) const {
        for (int64_t column = 0; column < at.count; column += PANEL_LANES) {
            const int64_t q0 = at.q0 + column;
            const int64_t from = std::max(ka, call.first_key(q0) / ROWS * ROWS);
            const int64_t to = std::min(kb, up(call.end_key(std::min(q0 + PANEL_LANES, at.q0 + at.count)), ROWS));
            if (from >= to) continue;
            const Pair* key = key_pairs + (slot * padded + k0) / 2 * depth + (from - k0) / 2 * ROWS;
            const Pair* const slopes = space.slope_pairs + column / PANEL_LANES * (height / 2 * PANEL_LANES) +
                                       (from - k0) / 2 * PANEL_LANES;
            for (int64_t j = 0; j < depth; j += ROWS, key += height / 2 * ROWS) {
                add_product<4>(space.sums + j * at.width + column, at.width, (to - from) / 2, key, 1, ROWS, slopes,
                               PANEL_LANES);
            }
        }
    }

    void run(FusedBackwardSpace& space, int64_t pair, int64_t slot, int64_t member, int64_t number, const Guard& guard) {
        const int64_t batch = pair / call.g, head = pair % call.g * cut.per_group + member, i = batch * call.n + head;
        const int64_t q0 = number * BACKWARD_QUERIES, count = std::min(BACKWARD_QUERIES, call.sq - q0);
        const int64_t width = up(count, PANEL_LANES);
        const uint8_t* const mask = call.mask ? call.mask + batch * call.mask_b + head * call.mask_n : nullptr;
        Queries at{i * call.sq + q0, q0, count, width, mask, {}, {}};
        const auto pack = [&](const bf16* from, int64_t stride, int64_t size, Pair* columns, Pair* pairs) {
            rows(from, stride, count, size, width, static_cast<bf16*>(space.lines));
            for (int64_t q = 0; q < width; q += HALF_PANEL) {
                transpose(as_pairs(space.lines + q * size), HALF_PANEL, size / 2, columns + q * (size / 2));
            }
            pack_right(space.lines, width, size, pairs);
        };
        const bf16* const grad = dout + q0 * os + batch * ob + head * on;
        pack(call.q + q0 * call.qs + batch * call.qb + head * call.qn, call.qs, call.d, space.q_columns, space.q_pairs);
        pack(grad, os, call.dv, space.dout_columns, space.dout_pairs);
        const bf16* const result = out + (q0 * call.b * call.n + i) * call.dv;
        read_softmax(call, result, lse + at.place, grad, os, count, at.logs, at.dots);
        std::fill(space.sums + 0, space.sums + depth * width, 0.0f);
        const int64_t end = call.end_key(q0 + count), start = call.first_key(q0) / ROWS * ROWS;
        for (int64_t k0 = start / height * height; k0 < end; k0 += height) {
            const int64_t ka = std::max(k0, start), kb = std::min(k0 + height, up(end, ROWS)), place = slot * padded + k0;
            weigh(space, at, slot, k0, ka, kb);
            add_keys(space, at, slot, k0, ka, kb);
            const int64_t turn = turns.wait(slot, k0 / height, number, member, guard);
            add_rows(at, k0, ka, kb, space.weights, space.dout_pairs, to_v + place * ld_v, ld_v);
            add_rows(at, k0, ka, kb, space.slope_rows, space.q_pairs, to_k + place * ld_k, ld_k);
            turns.end(slot, k0 / height, turn);
        }
        alignas(64) float factor[BACKWARD_QUERIES];
        std::fill(factor, factor + width, call.scale);
        write_rows(space.sums + 0, factor, count, width, call.d, space.scratch + 0, dq,
                   (q0 * call.b * call.n + i) * call.d, call.b * call.n * call.d);
    }
};

}  // namespace
#endif
