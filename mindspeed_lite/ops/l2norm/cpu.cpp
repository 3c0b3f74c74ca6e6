// The sum of squares over a table of tensors, read once.
#include <vector>

#include "numbers.h"

namespace {

struct Entry {
    const void* data;
    int64_t size;
};

struct Piece {
    int64_t entry, start;
};

constexpr int64_t PIECE = 1 << 15;

template <class T>
double squares(const T* x, int64_t n) {
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; ++i) {
        const double value = load(x + i);
        sum += value * value;
    }
    return sum;
}

template <class T>
double total(const Entry* table, int64_t count, int threads) {
    std::vector<Piece> pieces;
    for (int64_t entry = 0; entry < count; ++entry)
        for (int64_t start = 0; start < table[entry].size; start += PIECE) pieces.push_back({entry, start});
    const int64_t n = static_cast<int64_t>(pieces.size());
    // One sum for each piece, added up in order: the result does not depend on who computed which.
    std::vector<double> sums(pieces.size());
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t i = 0; i < n; ++i) {
        const Entry& entry = table[pieces[i].entry];
        sums[i] = squares(static_cast<const T*>(entry.data) + pieces[i].start,
                          std::min(PIECE, entry.size - pieces[i].start));
    }
    double sum = 0;
    for (const double each : sums) sum += each;
    return sum;
}

}  // namespace

// table: rows of address and number of elements.
extern "C" void l2norm(const Entry* table, int64_t count, int narrow, float* out, int threads) {
    *out = static_cast<float>(
        std::sqrt(narrow ? total<bf16>(table, count, threads) : total<float>(table, count, threads)));
}
