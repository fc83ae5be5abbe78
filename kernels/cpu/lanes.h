// Sixteen floats at a time: loading and storing every dtype, exp, and the layouts of a matmul.
//
// The vector type is the compiler's own (GCC, Clang), so the same code becomes one AVX-512
// register, two of AVX2, or four of anything else.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Float8_e4m3fn.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace mla {

using at::BFloat16;
using at::ScalarType;

constexpr int64_t kLanes = 16;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

using Vec = float __attribute__((vector_size(64)));
using Ints = int32_t __attribute__((vector_size(64)));
using Words = uint32_t __attribute__((vector_size(64)));
using Shorts = uint16_t __attribute__((vector_size(32)));
using ManyShorts = uint16_t __attribute__((vector_size(64)));

constexpr int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }
constexpr int64_t even(int64_t n) { return round_up(n, 2); }

template <class To, class From>
inline To same_bits(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

inline Vec broadcast(float x) { return x - Vec{}; }
inline Vec larger(Vec a, Vec b) { return a > b ? a : b; }

// Elements of two vectors by their constant positions; those of `b` follow those of `a`.
template <class V, int... I>
inline V pick(V a, V b, std::integer_sequence<int, I...>) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, I...);
#else
  using Index = std::conditional_t<sizeof(a[0]) == 2, ManyShorts, Words>;
  return __builtin_shuffle(a, b, Index{I...});
#endif
}

// Element j from `a` or `b` by bit D of j: with High those that the other half leaves.
template <int D, bool High, int... J>
inline Words exchange(Words a, Words b, std::integer_sequence<int, J...>) {
  return pick(a, b,
              std::integer_sequence<int, (High ? ((J & D) ? 16 + J : J + D)
                                               : ((J & D) ? 16 + J - D : J))...>());
}

template <int D>
inline void transpose_step(Words (&rows)[16]) {
  constexpr std::make_integer_sequence<int, 16> all;
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) {
    if (i & D) continue;
    const Words a = rows[i], b = rows[i + D];
    rows[i] = exchange<D, false>(a, b, all);
    rows[i + D] = exchange<D, true>(a, b, all);
  }
}

inline void transpose(Words (&rows)[16]) {
  transpose_step<1>(rows);
  transpose_step<2>(rows);
  transpose_step<4>(rows);
  transpose_step<8>(rows);
}

// The first (High: the last) sixteen of two rows of 16-bit elements, one of each in turn.
template <bool High, int... J>
inline ManyShorts interleave(ManyShorts a, ManyShorts b, std::integer_sequence<int, J...>) {
  return pick(a, b, std::integer_sequence<int, ((J & 1) * 32 + J / 2 + (High ? 16 : 0))...>());
}

inline Vec load(const float* p) {
  Vec v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

inline Vec load(const BFloat16* p) {
  Shorts half;
  std::memcpy(&half, p, sizeof half);
  return same_bits<Vec>(__builtin_convertvector(half, Words) << 16);
}

inline Vec load(const at::Half* p) {
#if defined(__AVX512F__)
  return same_bits<Vec>(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
#else
  float out[kLanes];
  for (int i = 0; i < kLanes; ++i) out[i] = p[i];
  return load(out);
#endif
}

inline Vec load(const c10::Float8_e4m3fn* p) {
  float out[kLanes];
  for (int i = 0; i < kLanes; ++i) out[i] = p[i];
  return load(out);
}

inline void store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }

// Rounds to nearest even, as torch does.
inline Words to_bfloat16_bits(Vec v) {
  const Words bits = same_bits<Words>(v);
  const Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return v == v ? rounded : Words{} + 0x7fc0;
}

inline void store(BFloat16* p, Vec v) {
#if defined(__AVX512BF16__)
  const auto half = _mm512_cvtneps_pbh(same_bits<__m512>(v));
#else
  const auto half = __builtin_convertvector(to_bfloat16_bits(v), Shorts);
#endif
  std::memcpy(p, &half, sizeof half);
}

inline void store(at::Half* p, Vec v) {
#if defined(__AVX512F__)
  const auto half = _mm512_cvtps_ph(same_bits<__m512>(v), _MM_FROUND_TO_NEAREST_INT);
  std::memcpy(p, &half, sizeof half);
#else
  for (int i = 0; i < kLanes; ++i) p[i] = v[i];
#endif
}

inline void store(c10::Float8_e4m3fn* p, Vec v) {
  for (int i = 0; i < kLanes; ++i) p[i] = v[i];
}

// Puts two rows side by side in 32-bit words, for the pairs that a bf16 matmul multiplies at once.
inline Words pair(Vec low, Vec high) {
#if defined(__AVX512BF16__)
  // A conversion of both at once would concatenate; the words need them interleaved.
  const auto a = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(same_bits<__m512>(low)));
  const auto b = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(same_bits<__m512>(high)));
  return same_bits<Words>(_mm512_or_si512(a, _mm512_slli_epi32(b, 16)));
#else
  return to_bfloat16_bits(low) | (to_bfloat16_bits(high) << 16);
#endif
}

// e to the x for x <= 0; exactly 0 below the smallest normal number, NaN for NaN.
// Range reduction by ln 2 in two parts and a polynomial of degree 7 (Cephes, expf): about 1 ulp.
inline Vec exp_negative(Vec x) {
  constexpr float log2e = 1.44269504088896341f, magic = 12582912.0f;  // 1.5 * 2^23
  constexpr float ln2_high = 0.693359375f, ln2_low = -2.12194440e-4f;
  const Vec shifted = x * log2e + magic, n = shifted - magic;
  const Vec r = (x - n * ln2_high) - n * ln2_low;
  Vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const Ints exponent = same_bits<Ints>(shifted) - same_bits<Ints>(broadcast(magic)) + 127;
  const Vec value = p * same_bits<Vec>(exponent << 23);
  return x < -87.0f ? Vec{} : value;
}

inline float exp_negative(float x) { return exp_negative(broadcast(x))[0]; }

inline float sum(Vec v) {
  float total = 0.0f;
  for (int i = 0; i < kLanes; ++i) total += v[i];
  return total;
}

inline float largest(Vec v) {
  float top = v[0];
  for (int i = 1; i < kLanes; ++i) top = v[i] > top ? v[i] : top;
  return top;
}

// Calls f(dst, value) for runs of 16 elements of `src`; the last one goes through padded copies.
template <class From, class To, class F>
inline void map_row(const From* src, To* dst, int64_t n, F&& f) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(dst + i, f(load(src + i)));
  if (i < n) {
    alignas(64) From in[kLanes] = {};
    alignas(64) To out[kLanes];
    std::copy(src + i, src + n, in);
    store(out, f(load(in)));
    std::copy(out, out + (n - i), dst + i);
  }
}

// Calls f with a pointer of the C++ type that `dtype` stands for.
template <class F>
inline void with_type(ScalarType dtype, const void* data, F&& f) {
  switch (dtype) {
    case ScalarType::BFloat16:
      return f(static_cast<const BFloat16*>(data));
    case ScalarType::Half:
      return f(static_cast<const at::Half*>(data));
    case ScalarType::Float8_e4m3fn:
      return f(static_cast<const c10::Float8_e4m3fn*>(data));
    default:
      return f(static_cast<const float*>(data));
  }
}

inline Vec zero_if_not_finite(Vec v) { return (v - v == v - v) ? v : Vec{}; }

// Copies a row into another dtype, times `scale`.
template <class To>
inline void convert_row(ScalarType dtype, const void* src, To* dst, int64_t n, float scale = 1.0f) {
  with_type(dtype, src, [&](const auto* from) {
    using From = std::remove_cv_t<std::remove_pointer_t<decltype(from)>>;
    if constexpr (std::is_same_v<From, To>) {
      if (scale == 1.0f) {
        std::memcpy(dst, from, n * sizeof(To));
        return;
      }
    }
    map_row(from, dst, n, [scale](Vec v) { return v * scale; });
  });
}

// The layout in which a matmul takes its right operand, B [K, N]. fp32: the rows of B as they lie.
// bf16: rows in pairs, [K/2, N, 2]. Word (k, n) is the unit that moves.
template <class C>
constexpr int64_t kPack = 4 / sizeof(C);

// Packs B [K, N] from rows of B in the compute type: row k and row k + 1 are interleaved.
// `rows` are given, up to the even number `padded` the rest is 0.
template <class C>
inline void pack_rows(const C* src, int64_t stride, int64_t rows, int64_t padded, int64_t n, C* dst,
                      bool clean) {
  const auto tidy = [clean](Vec v) { return clean ? zero_if_not_finite(v) : v; };
  if constexpr (kPack<C> == 1) {
    for (int64_t k = 0; k < rows; ++k) map_row(src + k * stride, dst + k * n, n, tidy);
    std::memset(dst + rows * n, 0, (padded - rows) * n * sizeof(C));
  } else {
    auto* words = reinterpret_cast<uint32_t*>(dst);
    const auto* from = reinterpret_cast<const uint16_t*>(src);
    const auto whole = [clean](uint16_t x) {
      return clean && (x & 0x7f80) == 0x7f80 ? uint16_t{0} : x;
    };
    for (int64_t k = 0; k < padded; k += 2, words += n) {
      const uint16_t* low = from + k * stride;
      const uint16_t* high = low + stride;
      int64_t i = 0;
      if (!clean && k + 1 < rows) {
        constexpr std::make_integer_sequence<int, 32> all;
        for (; i + 32 <= n; i += 32) {
          ManyShorts a, b;
          std::memcpy(&a, low + i, sizeof a);
          std::memcpy(&b, high + i, sizeof b);
          const ManyShorts first = interleave<false>(a, b, all),
                           second = interleave<true>(a, b, all);
          std::memcpy(words + i, &first, sizeof first);
          std::memcpy(words + i + kLanes, &second, sizeof second);
        }
      }
      for (; i < n; ++i) {
        const uint32_t a = k < rows ? whole(low[i]) : 0, b = k + 1 < rows ? whole(high[i]) : 0;
        words[i] = a | (b << 16);
      }
    }
  }
}

// Packs B [K, N] from its columns in the compute type: `columns` [N, width], of which `count` are
// given and the rest up to `padded` is 0. Widths are even for bf16, so words move as they are.
template <class C>
inline void pack_columns(const C* columns, int64_t stride, int64_t count, int64_t padded,
                         int64_t width, C* dst) {
  const int64_t words = width / kPack<C>;
  auto* to = reinterpret_cast<uint32_t*>(dst);
  constexpr int64_t kBlock = 16;
  for (int64_t n = 0; n < padded; n += kBlock) {
    const int64_t n_end = std::min(n + kBlock, padded), n_given = std::min(n_end, count);
    for (int64_t w = 0; w < words; w += kBlock) {
      const int64_t w_end = std::min(w + kBlock, words);
      Words tile[kBlock] = {};
      if (w_end - w == kBlock && n_given - n == kBlock) {
        for (int i = 0; i < kBlock; ++i) {
          std::memcpy(&tile[i], reinterpret_cast<const uint32_t*>(columns + (n + i) * stride) + w,
                      sizeof(Words));
        }
        transpose(tile);
        for (int i = 0; i < kBlock; ++i)
          std::memcpy(to + (w + i) * padded + n, &tile[i], sizeof(Words));
        continue;
      }
      for (int64_t i = n; i < n_given; ++i) {
        const auto* row = reinterpret_cast<const uint32_t*>(columns + i * stride);
        std::memcpy(&tile[i - n], row + w, (w_end - w) * sizeof(uint32_t));
      }
      transpose(tile);
      for (int64_t k = w; k < w_end; ++k) {
        std::memcpy(to + k * padded + n, &tile[k - w], (n_end - n) * sizeof(uint32_t));
      }
    }
  }
}

// Packs B [K, N] from fp32 rows, as a matmul leaves them.
template <class C>
inline void pack_floats(const float* src, int64_t rows, int64_t padded, int64_t n, C* dst) {
  if constexpr (kPack<C> == 1) {
    pack_rows<float>(src, n, rows, padded, n, dst, false);
  } else {
    auto* words = reinterpret_cast<uint32_t*>(dst);
    alignas(64) float buffer[2][kLanes];
    for (int64_t k = 0; k < padded; k += 2, words += n) {
      for (int64_t i = 0; i < n; i += kLanes) {
        const int64_t m = std::min(kLanes, n - i);
        Vec v[2];
        for (int j = 0; j < 2; ++j) {
          if (k + j >= rows) {
            v[j] = Vec{};
          } else if (m == kLanes) {
            v[j] = load(src + (k + j) * n + i);
          } else {
            std::memset(buffer[j], 0, sizeof buffer[j]);
            std::memcpy(buffer[j], src + (k + j) * n + i, m * sizeof(float));
            v[j] = load(buffer[j]);
          }
        }
        const Words both = pair(v[0], v[1]);
        std::memcpy(words + i, &both, m * sizeof(uint32_t));
      }
    }
  }
}

}  // namespace mla
