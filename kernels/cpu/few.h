// Products of matrices of few rows in AVX512-BF16. The other operand, a weight or a tile of keys,
// is read once and as it lies: packing it for a matmul would take longer than multiplying.
#pragma once

#include "lanes.h"

#if defined(__AVX512BF16__)

namespace mla {

constexpr int64_t kAhead = 8;  // rows of a weight that are asked for before they are needed

template <int M>
using Count = std::integral_constant<int, M>;

// Calls f(Count<M>, first) for runs of 8 rows, then of 4, 2 and 1.
template <class F>
inline void for_each_run(int64_t rows, F&& f) {
  int64_t first = 0;
  for (; first + 8 <= rows; first += 8) f(Count<8>(), first);
  if (rows & 4) f(Count<4>(), first), first += 4;
  if (rows & 2) f(Count<2>(), first), first += 2;
  if (rows & 1) f(Count<1>(), first);
}

// Adds A [M, 2 R] B [2 R, N] to C [M, N]; rows of B are interleaved on the way.
template <int M, int R>
inline void add_products(const BFloat16* a, int64_t lda, const BFloat16* b, int64_t ldb, int64_t n,
                         float* c) {
  constexpr std::make_integer_sequence<int, 32> all;
  const auto row = [](const BFloat16* p) {
    ManyShorts v;
    std::memcpy(&v, p, sizeof v);
    return v;
  };
  for (int64_t i = 0; i < n; i += 2 * kLanes) {
    __m512 left[M], right[M];
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      left[m] = _mm512_loadu_ps(c + m * n + i);
      right[m] = _mm512_loadu_ps(c + m * n + i + kLanes);
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const BFloat16* at = b + 2 * r * ldb + i;
      _mm_prefetch(reinterpret_cast<const char*>(at + kAhead * ldb), _MM_HINT_T0);
      _mm_prefetch(reinterpret_cast<const char*>(at + (kAhead + 1) * ldb), _MM_HINT_T0);
      const ManyShorts low = row(at), high = row(at + ldb);
      const auto first = same_bits<__m512bh>(interleave<false>(low, high, all));
      const auto second = same_bits<__m512bh>(interleave<true>(low, high, all));
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        int32_t pair;
        std::memcpy(&pair, a + m * lda + 2 * r, sizeof pair);
        const auto weights = (__m512bh)_mm512_set1_epi32(pair);
        left[m] = _mm512_dpbf16_ps(left[m], weights, first);
        right[m] = _mm512_dpbf16_ps(right[m], weights, second);
      }
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      _mm512_storeu_ps(c + m * n + i, left[m]);
      _mm512_storeu_ps(c + m * n + i + kLanes, right[m]);
    }
  }
}

// C [M, N] = A [M, K] B [K, N], for even K and N a multiple of 32; the rows of A and C lie one
// after the other.
inline void few_products(int64_t m, int64_t k, int64_t n, const BFloat16* a, const BFloat16* b,
                         int64_t ldb, float* c) {
  constexpr int kPairs = 4;
  std::memset(c, 0, m * n * sizeof(float));
  for (int64_t p = 0; p < k;) {
    const int64_t pairs = p + 2 * kPairs <= k ? kPairs : 1;
    for_each_run(m, [&](auto rows, int64_t first) {
      const auto add = pairs == kPairs ? add_products<rows(), kPairs> : add_products<rows(), 1>;
      add(a + first * k + p, k, b + p * ldb, ldb, n, c + first * n);
    });
    p += 2 * pairs;
  }
}

// The scalar product of two rows; n may be any number.
inline float dot(const BFloat16* a, const BFloat16* b, int64_t n) {
  __m512 even = _mm512_setzero_ps(), odd = _mm512_setzero_ps();
  int64_t i = 0;
  for (; i + 64 <= n; i += 64) {
    even = _mm512_dpbf16_ps(even, (__m512bh)_mm512_loadu_si512(a + i),
                            (__m512bh)_mm512_loadu_si512(b + i));
    odd = _mm512_dpbf16_ps(odd, (__m512bh)_mm512_loadu_si512(a + i + 32),
                           (__m512bh)_mm512_loadu_si512(b + i + 32));
  }
  for (; i < n; i += 32) {
    const __mmask32 rest = n - i >= 32 ? ~__mmask32(0) : (__mmask32(1) << (n - i)) - 1;
    even = _mm512_dpbf16_ps(even, (__m512bh)_mm512_maskz_loadu_epi16(rest, a + i),
                            (__m512bh)_mm512_maskz_loadu_epi16(rest, b + i));
  }
  return _mm512_reduce_add_ps(_mm512_add_ps(even, odd));
}

// C [M, N] = A [M, K] times the transpose of B [N, K], of any sizes. One row of B after the other:
// the first row of A draws it from memory at full speed, the others find it in the nearest cache.
inline void few_dots(int64_t m, int64_t k, int64_t n, const BFloat16* a, int64_t lda,
                     const BFloat16* b, int64_t ldb, float* c, int64_t ldc) {
  for (int64_t j = 0; j < n; ++j) {
    for (int64_t i = 0; i < m; ++i) c[i * ldc + j] = dot(b + j * ldb, a + i * lda, k);
  }
}

// Adds K q^T to scores [keys, 16 V] for the few rows of a decode: there the keys come from memory,
// and multiplying takes no longer than reading. So every line that is multiplied asks for one of
// the next tile, at `ahead[key]`. `words` of a key's width are multiplied; `query` is packed.
template <int V>
inline void few_scores(const BFloat16* keys, int64_t stride, int64_t count, int64_t words,
                       const BFloat16* query, float* scores, const char* const* ahead, bool add) {
  constexpr int kKeys = 16 / V, kWords = 16;
  const auto* q = reinterpret_cast<const uint32_t*>(query);
  for (int64_t k = 0; k < count; k += kKeys) {
    const uint32_t* row[kKeys];
    __m512 sums[kKeys][V];
#pragma GCC unroll 16
    for (int i = 0; i < kKeys; ++i) {
      row[i] = reinterpret_cast<const uint32_t*>(keys + (k + i) * stride);
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) {
        sums[i][v] =
            add ? _mm512_loadu_ps(scores + ((k + i) * V + v) * kLanes) : _mm512_setzero_ps();
      }
    }
    for (int64_t begin = 0; begin < words; begin += kWords) {
      if (ahead != nullptr) {
        for (int i = 0; i < kKeys; ++i) _mm_prefetch(ahead[k + i] + begin * 4, _MM_HINT_T1);
      }
      const int64_t end = std::min<int64_t>(begin + kWords, words);
      for (int64_t w = begin; w < end; ++w) {
        __m512bh right[V];
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v)
          right[v] = (__m512bh)_mm512_loadu_si512(q + (w * V + v) * kLanes);
#pragma GCC unroll 16
        for (int i = 0; i < kKeys; ++i) {
          const auto left = (__m512bh)_mm512_set1_epi32(row[i][w]);
#pragma GCC unroll 4
          for (int v = 0; v < V; ++v) sums[i][v] = _mm512_dpbf16_ps(sums[i][v], left, right[v]);
        }
      }
    }
#pragma GCC unroll 16
    for (int i = 0; i < kKeys; ++i) {
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) _mm512_storeu_ps(scores + ((k + i) * V + v) * kLanes, sums[i][v]);
    }
  }
}

}  // namespace mla

#endif
