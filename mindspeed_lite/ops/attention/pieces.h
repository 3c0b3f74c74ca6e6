// Scheduling and shared I/O of the attention passes.
#pragma once

#include <optional>
#include <thread>
#include <vector>

#include "call.h"

namespace {

// A pass: `prepare` per tile of keys, `run` per tile of queries of each head, `finish` per tile of keys.
//
// As many (sequence, key head) pairs run together as there are threads; `slot` is the pair's index. Unlike OpenMP
// schedules the order is fixed, so that items wait for earlier ones only. The last tiles, with the most keys under a
// causal mask, go first.
template <typename Space, typename In, typename Prepare, typename Run, typename Finish>
void in_pieces(const Call<In>& call, const Cut& cut, Guard& guard, const Prepare& prepare, const Run& run,
               const Finish& finish) {
    std::atomic<int64_t> next{0};
#pragma omp parallel num_threads(cut.threads)
    {
        std::optional<Space> space;
        guard([&] { space.emplace(call); });
        for (int64_t first = 0; first < cut.pairs; first += cut.together) {
            const int64_t count = std::min(cut.together, cut.pairs - first);
#pragma omp single nowait
            next = 0;
#pragma omp for collapse(2)
            for (int64_t slot = 0; slot < count; ++slot)
                for (int64_t tile = 0; tile < cut.key_tiles; ++tile)
                    guard([&] { prepare(*space, first + slot, slot, tile); });
            const int64_t items = cut.tiles * cut.per_group * count;
            for (int64_t item; (item = next++) < items;) {
                guard([&] {
                    const int64_t slot = item % count, rest = item / count;
                    run(*space, first + slot, slot, rest % cut.per_group, cut.tiles - 1 - rest / cut.per_group);
                });
            }
#pragma omp barrier
#pragma omp for collapse(2)
            for (int64_t slot = 0; slot < count; ++slot)
                for (int64_t tile = 0; tile < cut.key_tiles; ++tile) guard([&] { finish(first + slot, slot, tile); });
        }
        guard.always(Space::done);
    }
}

// Order in which query tiles add to dK and dV of each key tile: from the last visible query tile on, heads in order.
class Turns {
    std::vector<std::atomic<int64_t>> next_;
    std::vector<int64_t> last_;  // last visible query tile of each key tile
    int64_t tiles_, per_group_;

   public:
    template <typename In>
    Turns(const Call<In>& call, const Cut& cut)
        : next_(cut.together * cut.key_tiles), last_(cut.key_tiles, -1), tiles_(cut.key_tiles), per_group_(cut.per_group) {
        for (int64_t tile = 0; tile < cut.tiles; ++tile) {
            const int64_t q0 = tile * cut.queries, end = call.end_key(std::min(call.sq, q0 + cut.queries));
            for (int64_t k = call.first_key(q0) / cut.height; k * cut.height < end; ++k) last_[k] = tile;
        }
    }
    void reset(int64_t slot, int64_t tile) { next_[slot * tiles_ + tile].store(0, std::memory_order_relaxed); }
    // Waits for this query tile and head; returns its turn.
    int64_t wait(int64_t slot, int64_t tile, int64_t queries, int64_t member, const Guard& guard) const {
        const int64_t turn = (last_[tile] - queries) * per_group_ + member;
        const auto& next = next_[slot * tiles_ + tile];
        for (int64_t spins = 0; next.load(std::memory_order_acquire) != turn && !guard.status(); ++spins) {
            // There may be more threads than cores.
            if (spins > 1000) std::this_thread::yield();
        }
        return turn;
    }
    void end(int64_t slot, int64_t tile, int64_t turn) {
        next_[slot * tiles_ + tile].store(turn + 1, std::memory_order_release);
    }
};

// Output of a pass: rounded to the inputs' type, or fp32 for callers that accumulate over calls.
template <typename In>
class Result {
    char* to_;
    int64_t bytes_;  // bytes of an element

   public:
    Result(void* to, bool wide) : to_(static_cast<char*>(to)), bytes_(wide ? sizeof(float) : sizeof(In)) {}
    void put(const float* from, int64_t count, int64_t at) const {
        char* const to = to_ + at * bytes_;
        if (bytes_ == sizeof(float)) {
            std::copy(from, from + count, reinterpret_cast<float*>(to));
        } else {
            round_row(from, count, reinterpret_cast<In*>(to));
        }
    }
    void prefetch(int64_t count, int64_t at) const {
        for (int64_t byte = 0; byte < count * bytes_; byte += 64) __builtin_prefetch(to_ + at * bytes_ + byte, 1);
    }
};

// Writes sums [size][width] transposed to rows of a result from element `at` on, scaled by each query's factor.
template <typename In>
void write_rows(float* sums, const float* factor, int64_t queries, int64_t width, int64_t size, float* scratch,
                const Result<In>& to, int64_t at, int64_t stride) {
    // Prefetch while the rows are computed.
    for (int64_t q = 0; q < queries; ++q) to.prefetch(size, at + q * stride);
    for (int64_t j = 0; j < size; ++j) {
        float* row = sums + j * width;
#pragma omp simd
        for (int64_t q = 0; q < width; ++q) row[q] *= factor[q];
    }
    transpose(sums, size, width, scratch);
    for (int64_t q = 0; q < queries; ++q) to.put(scratch + q * size, size, at + q * stride);
}

template <typename In>
float dot(const In* a, const In* b, int64_t size) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < size; ++j) sum += load(a + j) * load(b + j);
    return sum;
}

// Softmax state for backward of some queries of a head, from rows of out and dout.
//
// logs: lse; infinite for a query without keys, so its probabilities are zero. dots: out . dout.
template <typename In>
void read_softmax(const Call<In>& call, const In* out, const float* lse, const In* dout, int64_t stride, int64_t queries,
                  float* logs, float* dots) {
    for (int64_t q = 0; q < queries; ++q) {
        const int64_t step = call.b * call.n * call.dv;
        for (int64_t j = 0; j < call.dv; j += 64 / sizeof(In)) __builtin_prefetch(out + (q + AHEAD) * step + j);
        dots[q] = dot(out + q * step, dout + q * stride, call.dv);
        logs[q] = lse[q] == -INF ? INF : lse[q];
    }
}

}  // namespace
