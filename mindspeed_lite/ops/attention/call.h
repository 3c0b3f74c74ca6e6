// Arguments of one CPU attention call, and its tiling.
#pragma once

#include "draws.h"
#include "tiles.h"

namespace {

constexpr int64_t QUERIES = 128;
// fp32 tiles fit a 32 KiB L1 cache or little more; AMX prefers smaller tiles.
template <typename M>
constexpr int64_t KEYS = PAIRS<M> == 2 ? 128 : 64;
// Fewer multiply-adds do not pay for another thread.
constexpr double SERIAL = 1 << 19;
// Unnormalised probabilities are at most 2 to this power.
constexpr float LARGEST_POWER = 8.0f;
constexpr float INF = std::numeric_limits<float>::infinity(), LOG2E = 1.44269504088896341f;

// Strides in elements, of the first three dimensions; those of dout last.
struct Sizes {
    int64_t sq, sk, b, n, g, d, dv;
    int64_t qs, qb, qn, ks, kb, kn, vs, vb, vn;
    // Key j is visible to query i if lowest <= j - i - (sk - sq) <= highest.
    int64_t lowest, highest;
    int64_t mask_b, mask_n, mask_q, mask_k;
    int64_t dropped;  // drop threshold of 2^32
    int64_t seed;
    int64_t os, ob, on;
};

template <typename In>
struct Call : Sizes {
    const In *q, *k, *v;
    const uint8_t* mask;  // true hides; null or [b, n, sq, sk], broadcast by stride 0
    float scale;

    int64_t offset() const { return sk - sq; }
    // Keys visible to some query of [from, to).
    int64_t first_key(int64_t from) const {
        return lowest == INT64_MIN ? 0 : std::max<int64_t>(0, from + offset() + lowest);
    }
    int64_t end_key(int64_t to) const {
        return highest == INT64_MAX ? sk : std::min(sk, std::max<int64_t>(0, to - 1 + offset() + highest + 1));
    }
    // Queries that see some key of [from, to) by position.
    int64_t first_query(int64_t from) const {
        return highest == INT64_MAX ? 0 : std::max<int64_t>(0, from - offset() - highest);
    }
    int64_t end_query(int64_t to) const {
        return lowest == INT64_MIN ? sq : std::min(sq, std::max<int64_t>(0, to - 1 - offset() - lowest + 1));
    }
};

// Rounds tile lengths: each length needs its own micro-kernels.
int64_t rounded_up(int64_t count, int64_t most) { return std::min(most, up(count, count <= 16 ? 8 : 32)); }

struct Cut {
    int64_t pairs, per_group;      // batch x key heads; query heads of each
    int64_t queries, tiles;  // queries per tile, number of tiles
    int64_t height, key_tiles;     // keys of a tile
    int64_t together;  // pairs whose packed K and V exist at a time
    int threads;

    template <typename In>
    Cut(const Call<In>& call, int most, int64_t queries, int64_t height)
        : pairs(call.b * call.g),
          per_group(call.n / call.g),
          queries(queries),
          tiles((call.sq + queries - 1) / queries),
          height(height),
          key_tiles((call.sk + height - 1) / height) {
        const double work = 1.0 * call.b * call.n * call.sq * call.sk * (call.d + call.dv);
        const double worth = std::min<double>(1.0 + work / SERIAL, pairs * per_group * tiles);
        threads = static_cast<int>(std::max(1.0, std::min<double>(worth, most)));
        together = std::min<int64_t>(pairs, threads);
    }
};

// Keys [k0, k0 + keys) by queries [q0, q0 + queries); its GEMMs are `rows` x `columns`.
struct Tile {
    int64_t k0, keys, rows, q0, queries, columns;
};

template <typename In>
bool all_visible(const Call<In>& call, const Tile& tile) {
    return call.mask == nullptr && tile.keys == tile.rows && tile.queries == tile.columns &&
           call.first_key(tile.q0 + tile.queries - 1) <= tile.k0 && call.end_key(tile.q0 + 1) >= tile.k0 + tile.keys;
}

// t[k][q] = -inf where key k0 + k is hidden from query q0 + q, and in padding.
template <typename In>
void hide(const Call<In>& call, int64_t batch, int64_t head, const Tile& tile, float* t) {
    const uint8_t* mask = call.mask;
    if (mask) mask += batch * call.mask_b + head * call.mask_n + tile.q0 * call.mask_q + tile.k0 * call.mask_k;
    for (int64_t i = 0; i < tile.rows; ++i, t += tile.columns) {
        int64_t from = 0, to = 0;  // visible queries
        if (i < tile.keys) {
            const int64_t key = tile.k0 + i;
            from = std::min(tile.queries, std::max<int64_t>(0, call.first_query(key) - tile.q0));
            to = std::max(from, std::min(tile.queries, call.end_query(key + 1) - tile.q0));
        }
        std::fill(t, t + from, -INF);
        std::fill(t + to, t + tile.columns, -INF);
        if (mask == nullptr) continue;
        const uint8_t* line = mask + i * call.mask_k;
        for (int64_t q = from; q < to; ++q) t[q] = line[q * call.mask_q] ? -INF : t[q];
    }
}

// Dropout of one key's probabilities for queries [place, place + count) of all heads, with scaling.
template <typename In>
void drop(const Call<In>& call, int64_t place, int64_t count, int64_t key, float* row) {
    const uint64_t seed = static_cast<uint64_t>(call.seed);
    const uint32_t dropped = static_cast<uint32_t>(call.dropped);
    const float kept = static_cast<float>(0x1p32 / (0x1p32 - dropped));
#pragma omp simd
    for (int64_t q = 0; q < count; ++q) {
        const uint32_t drawn = draw(seed, static_cast<uint32_t>(place + q), static_cast<uint32_t>(key));
        row[q] = drawn < dropped ? 0.0f : row[q] * kept;
    }
}

}  // namespace
