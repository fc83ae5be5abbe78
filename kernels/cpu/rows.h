// Rows without attention: writing into a paged cache, gathering from it, merging partial results.
#pragma once

#include "batch.h"

namespace mla {

constexpr int64_t kRowsPerTask = 64;

template <class F>
void for_each_row(int64_t rows, int threads, F&& body) {
  for_each_task((rows + kRowsPerTask - 1) / kRowsPerTask, threads, [&](int64_t task, int) {
    const int64_t end = std::min(rows, (task + 1) * kRowsPerTask);
    for (int64_t i = task * kRowsPerTask; i < end; ++i) body(i);
  });
}

// Rows [latent, rope] into their slots; slots below 0 are skipped. fp8: over the scale, saturating.
inline void update(const Strided& latent, int64_t latent_width, const Strided& rope,
                   int64_t rope_width, char* cache, ScalarType dtype, const Pages& pages,
                   const int64_t* slots, int64_t rows, int threads) {
  constexpr float limit = 448.0f;  // the largest e4m3
  for_each_row(rows, threads, [&](int64_t i) {
    const int64_t slot = slots[i];
    if (slot < 0) return;
    char* row = cache + (slot / pages.block_size * pages.block_stride +
                         slot % pages.block_size * pages.row_stride) *
                            pages.itemsize;
    const auto write = [&](const char* from, int64_t width, char* to) {
      with_type(dtype, to, [&](const auto* typed) {
        using To = std::remove_cv_t<std::remove_pointer_t<decltype(typed)>>;
        auto* out = reinterpret_cast<To*>(to);
        if constexpr (sizeof(To) == 1) {
          const auto scaled = [&](Vec v) {
            v = v / pages.scale;
            v = v < -limit ? broadcast(-limit) : v;
            return v > limit ? broadcast(limit) : v;
          };
          with_type(latent.dtype, from,
                    [&](const auto* source) { map_row(source, out, width, scaled); });
        } else {
          convert_row(latent.dtype, from, out, width);
        }
      });
    };
    write(latent.at(i), latent_width, row);
    write(rope.at(i), rope_width, row + latent_width * pages.itemsize);
  });
}

// The merge of two partial results of one row of one head. An lse of either infinity means empty.
struct Merge {
  Strided prefix, suffix, out;  // [T][H][V]
  int64_t width;

  // Returns the merged lse.
  float operator()(int64_t token, int64_t head, float a, float b) const {
    a = a == kInfinity ? -kInfinity : a;
    b = b == kInfinity ? -kInfinity : b;
    const float top = std::max(a, b), base = top == -kInfinity ? 0.0f : top;
    const float in_a = std::exp(a - base), in_b = std::exp(b - base), total = in_a + in_b;
    const float whole = total == 0.0f ? 1.0f : total;
    const float of_a = in_a / whole, of_b = in_b / whole;
    alignas(64) float x[kChunk], y[kChunk];
    for (int64_t i = 0; i < width; i += kChunk) {
      const int64_t n = std::min(kChunk, width - i);
      // What an empty side holds may be garbage, and 0 * NaN is NaN.
      take(prefix, token, head, i, n, of_a, x);
      take(suffix, token, head, i, n, of_b, y);
      for (int64_t j = 0; j < n; ++j) x[j] += y[j];
      write_row(out.moved(i), token, head, x, n);
    }
    return top + std::log(total);
  }

 private:
  static constexpr int64_t kChunk = 256;

  static void take(const Strided& from, int64_t token, int64_t head, int64_t first, int64_t n,
                   float weight, float* to) {
    if (weight == 0.0f) {
      std::fill(to, to + n, 0.0f);
    } else {
      convert_row(from.dtype, from.moved(first).at(token, head), to, n, weight);
    }
  }
};

}  // namespace mla
