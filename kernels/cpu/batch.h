// A batch of requests, whatever it came from: where the queries, the keys and the results of each
// lie, and which query sees which key.
#pragma once

#include <ATen/native/CPUBlas.h>
#include <omp.h>

#include <atomic>
#include <exception>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "lanes.h"

namespace mla {

constexpr int64_t kFewTokens = 4;  // for which a weight is read, not multiplied

struct Dims {
  int64_t heads, latent, nope, rope, value;

  int64_t latent_padded() const { return even(latent); }
  int64_t nope_padded() const { return even(nope); }
  int64_t rope_padded() const { return even(rope); }
  // The rule of `MLADims.should_expand`.
  bool should_expand(int64_t queries, int64_t keys) const {
    const int64_t once = latent * (nope + value), gain = 2 * latent - nope - value;
    const int64_t context = keys - queries, first = std::max<int64_t>(0, -context);
    const int64_t pairs = (queries - first) * (keys + context + first + 1) / 2;
    return queries > kFewTokens && context * once < pairs * gain;
  }

  int64_t absorbed() const { return latent_padded() + rope_padded(); }
  int64_t expanded() const { return nope_padded() + rope_padded(); }
};

// Memory by bump pointer. Without a base it only counts, so what is reserved is what is used.
class Arena {
 public:
  explicit Arena(char* base = nullptr) : base_(base) {}

  template <class T>
  T* take(int64_t count) {
    char* at = base_ == nullptr ? nullptr : base_ + used_;
    used_ += round_up(count * int64_t(sizeof(T)), 64);
    return reinterpret_cast<T*>(at);
  }

  int64_t used() const { return used_; }

 private:
  char* base_;
  int64_t used_ = 0;
};

// Rows of a tensor: `[row][head][width]` with any strides but the last.
struct Strided {
  const char* data = nullptr;
  ScalarType dtype = ScalarType::Float;
  int64_t row = 0, head = 0, itemsize = 4;

  Strided() = default;
  Strided(const at::Tensor& t, int64_t row_dim, int64_t head_dim = -1)
      : data(static_cast<const char*>(t.data_ptr())),
        dtype(t.scalar_type()),
        row(t.stride(row_dim)),
        head(head_dim < 0 ? 0 : t.stride(head_dim)),
        itemsize(t.element_size()) {}

  const char* at(int64_t r, int64_t h = 0) const { return data + (r * row + h * head) * itemsize; }
  Strided moved(int64_t elements) const {
    Strided copy = *this;
    copy.data += elements * itemsize;
    return copy;
  }
  Strided from_row(int64_t r) const { return moved(r * row); }
};

// The cached rows of one request, page by page.
struct Pages {
  const char* cache = nullptr;
  ScalarType dtype = ScalarType::Float;
  int64_t itemsize = 4, block_size = 1, block_stride = 0, row_stride = 0;
  const int32_t* table = nullptr;
  float scale = 1.0f;

  const char* at(int64_t i) const {
    const int64_t block = table[i / block_size];
    return cache + (block * block_stride + i % block_size * row_stride) * itemsize;
  }
};

// The keys of one request: `context` rows from pages, then rows of two tensors; or keys and values
// that are expanded already.
struct Keys {
  Pages pages;
  int64_t context = 0;
  Strided latent, rope;
  Strided nope, value;  // with data: expanded; `rope` goes with them
  bool clean = false;   // hidden values may be NaN, which a weight of 0 would not remove

  bool expanded() const { return value.data != nullptr; }

  // Where a latent row lies, and the rotary one beside it.
  const char* row(int64_t i) const { return i < context ? pages.at(i) : latent.at(i - context); }
  const char* rope_row(int64_t i, int64_t latent_width) const {
    return i < context ? pages.at(i) + latent_width * pages.itemsize : rope.at(i - context);
  }
};

// An attention mask `[H, S, T]` of bools (true: seen) or of floats that are added.
struct Mask {
  const char* data = nullptr;
  ScalarType dtype = ScalarType::Float;
  int64_t itemsize = 4, head = 0, query = 0, key = 0;

  // The score of query `s` and key `t` under the mask; what is hidden may be NaN.
  float applied(float score, int64_t h, int64_t s, int64_t t) const {
    const char* at = data + (h * head + s * query + t * key) * itemsize;
    if (dtype == ScalarType::Bool) return *at ? score : -kInfinity;
    float bias = 0.0f;
    with_type(dtype, at, [&](const auto* value) { bias = float(*value); });
    return bias == -kInfinity ? bias : score + bias;
  }
};

struct Request {
  int64_t tokens = 0;          // S, new ones
  int64_t begin = 0, end = 0;  // keys that may be seen
  bool causal = false;         // the last token sees the last key before `end`
  Strided query, out;          // rows are tokens
  float* lse = nullptr;        // [H, S] with a stride from head to head
  int64_t lse_head = 0;
  Keys keys;
  Mask mask;

  // One behind the last key that token `s` sees.
  int64_t limit(int64_t s) const { return causal ? end - tokens + s + 1 : end; }
};

struct Batch {
  Dims dims;
  float scale = 1.0f;
  Strided up;                    // w_kv_b: rows [H * (P + V)] of width L
  const float* sinks = nullptr;  // [H]
  int64_t most_keys = 1 << 20;   // of a tile
  int threads = 1;
  std::vector<Request> requests;

  int64_t head_rows() const { return dims.nope + dims.value; }
};

// Runs `body(task, thread)` for every task, on a team of threads that take the next one when they
// are free. Results may not depend on who does what.
template <class F>
void for_each_task(int64_t tasks, int threads, F&& body) {
  if (tasks == 0) return;
  std::exception_ptr failure;
  std::mutex guard;
  const auto run = [&](int64_t task, int thread) {
    try {
      body(task, thread);
    } catch (...) {
      const std::lock_guard<std::mutex> hold(guard);
      failure = std::current_exception();
    }
  };
  const int team = int(std::min<int64_t>(threads, tasks));
  std::atomic<int64_t> next{0};
#pragma omp parallel num_threads(team) if (team > 1)
  {
    const int thread = omp_get_thread_num();
    for (int64_t task = next++; task < tasks; task = next++) run(task, thread);
    at::native::cpublas::brgemm_release();
  }
  if (failure) std::rethrow_exception(failure);
}

// C [M, N] (+)= A [M, K] * B [K, N], with B packed. All fp32 in C.
template <class C>
inline void matmul(int64_t m, int64_t n, int64_t k, const C* a, int64_t lda, const C* b,
                   int64_t ldb, float* c, int64_t ldc, bool add) {
  if (m == 0 || n == 0) return;
  if (k == 0) {
    if (!add) {
      for (int64_t i = 0; i < m; ++i) std::memset(c + i * ldc, 0, n * sizeof(float));
    }
    return;
  }
  at::native::cpublas::brgemm(m, n, k, lda, ldb, ldc, add, a, b, c, kPack<C> == 2);
}

// Writes one row of results in their dtype.
inline void write_row(const Strided& out, int64_t row, int64_t head, const float* src, int64_t n,
                      float scale = 1.0f) {
  char* to = const_cast<char*>(out.at(row, head));
  with_type(out.dtype, to, [&](const auto* typed) {
    using To = std::remove_cv_t<std::remove_pointer_t<decltype(typed)>>;
    convert_row(ScalarType::Float, src, reinterpret_cast<To*>(to), n, scale);
  });
}

// Rows of a left operand: few distinct sizes, since each is a kernel of its own.
constexpr int64_t padded_rows(int64_t n) {
  return n <= 1 ? 1 : n <= 4 ? 4 : n <= 8 ? 8 : round_up(n, 16);
}

// Rows of a weight as a left operand: as they lie where dtype and width allow it, else a copy.
template <class C>
inline const C* rows_of(const Strided& from, int64_t first, int64_t count, int64_t width, C* copy,
                        int64_t* stride) {
  constexpr ScalarType type = c10::CppTypeToScalarType<C>::value;
  if (from.dtype == type && even(width) == width) {
    *stride = from.row;
    return reinterpret_cast<const C*>(from.at(first));
  }
  const int64_t padded = even(width);
  for (int64_t i = 0; i < count; ++i) {
    convert_row(from.dtype, from.at(first + i), copy + i * padded, width);
    if (padded > width) copy[i * padded + width] = C(0.0f);
  }
  *stride = padded;
  return copy;
}

// Latent rows in the compute type, one stride after the other: as they lie where they do, else a
// copy whose rows go up to a multiple of 16, the ones behind the last key 0.
template <class C>
struct LatentTile {
  const C* latent;
  const C* rope;
  int64_t latent_stride, rope_stride;
  int64_t count, padded;
};

template <class C>
struct LatentLoader {
  C* latent;  // [keys, L], padded
  C* rope;    // [keys, R], padded

  LatentLoader(Arena& arena, const Dims& dims, int64_t keys)
      : latent(arena.take<C>(keys * dims.latent_padded())),
        rope(arena.take<C>(keys * dims.rope_padded())) {}

  // Keys [begin, end) as one tile.
  LatentTile<C> operator()(const Keys& keys, const Dims& dims, int64_t begin, int64_t end) const {
    if (usable(dims, end - begin)) {
      if (in_tensors(keys, begin)) {
        const int64_t row = begin - keys.context;
        return {reinterpret_cast<const C*>(keys.latent.at(row)),
                reinterpret_cast<const C*>(keys.rope.at(row)),
                keys.latent.row,
                keys.rope.row,
                end - begin,
                end - begin};
      }
      if (in_pages(keys, end) && run_end(keys.pages, begin, end) == end)
        return run_of(keys.pages, dims, begin, end);
    }
    return copy(keys, dims, begin, end);
  }

  // Keys [begin, end) in as many tiles as leave them where they are, if any number does.
  void runs(const Keys& keys, const Dims& dims, int64_t begin, int64_t end,
            std::vector<LatentTile<C>>& tiles) const {
    tiles.clear();
    const bool whole = keys.pages.block_size % kLanes == 0 && begin % kLanes == 0;
    if (!whole || !usable(dims, end - begin) || !in_pages(keys, end)) {
      tiles.push_back((*this)(keys, dims, begin, end));
      return;
    }
    while (begin < end) {
      const int64_t behind = run_end(keys.pages, begin, end);
      tiles.push_back(run_of(keys.pages, dims, begin, behind));
      begin = behind;
    }
  }

 private:
  static constexpr ScalarType kType = c10::CppTypeToScalarType<C>::value;

  // Whether rows may be used as they lie, if they lie well.
  static bool usable(const Dims& dims, int64_t count) {
    return count % kLanes == 0 && even(dims.latent) == dims.latent && even(dims.rope) == dims.rope;
  }

  static bool in_tensors(const Keys& keys, int64_t begin) {
    return begin >= keys.context && keys.latent.dtype == kType;
  }

  static bool in_pages(const Keys& keys, int64_t end) {
    return end <= keys.context && keys.pages.dtype == kType;
  }

  static LatentTile<C> run_of(const Pages& pages, const Dims& dims, int64_t begin, int64_t end) {
    const auto* row = reinterpret_cast<const C*>(pages.at(begin));
    return {row, row + dims.latent, pages.row_stride, pages.row_stride, end - begin, end - begin};
  }

  // How far rows from `begin` lie one stride after the other.
  static int64_t run_end(const Pages& pages, int64_t begin, int64_t end) {
    int64_t block = begin / pages.block_size;
    const bool dense = pages.block_stride == pages.block_size * pages.row_stride;
    while ((block + 1) * pages.block_size < end && dense &&
           pages.table[block + 1] == pages.table[block] + 1) {
      ++block;
    }
    return std::min(end, (block + 1) * pages.block_size);
  }

  LatentTile<C> copy(const Keys& keys, const Dims& dims, int64_t begin, int64_t end) const {
    const int64_t count = end - begin, padded = round_up(count, kLanes);
    const int64_t wide = dims.latent_padded(), narrow = dims.rope_padded();
    for (int64_t i = begin; i < end; ++i) {
      C* a = latent + (i - begin) * wide;
      C* b = rope + (i - begin) * narrow;
      if (i < keys.context) {
        const Pages& pages = keys.pages;
        const char* row = pages.at(i);
        convert_row(pages.dtype, row, a, dims.latent, pages.scale);
        convert_row(pages.dtype, row + dims.latent * pages.itemsize, b, dims.rope, pages.scale);
      } else {
        const int64_t j = i - keys.context;
        convert_row(keys.latent.dtype, keys.latent.at(j), a, dims.latent);
        convert_row(keys.rope.dtype, keys.rope.at(j), b, dims.rope);
      }
      if (wide > dims.latent) a[dims.latent] = C(0.0f);
      if (narrow > dims.rope) b[dims.rope] = C(0.0f);
    }
    std::memset(static_cast<void*>(latent + count * wide), 0, (padded - count) * wide * sizeof(C));
    std::memset(static_cast<void*>(rope + count * narrow), 0,
                (padded - count) * narrow * sizeof(C));
    return {latent, rope, wide, narrow, count, padded};
  }
};

}  // namespace mla
