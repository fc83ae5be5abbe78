// Attention with keys and values: a tile of them is made from the latents for one head, in cache,
// used by every query that sees it, and overwritten.
//
//   K^T = W_uk kv_c^T    leaves keys in columns, which is how the scores' right operand is packed
//   V^T = W_uv kv_c^T    has to be transposed, but neither has the weight, which is larger
//
// Source: FlashAttention-2 (arXiv:2307.08691).
#pragma once

#include "batch.h"

namespace mla {

constexpr int64_t kExpandedKeys = 256;    // of a tile
constexpr int64_t kExpandedQueries = 64;  // of a block
constexpr int64_t kMostQueries = 4096;    // of a task
constexpr int64_t kLeastQueries = 128;    // of a task: each task makes the keys anew

// Queries [first, first + count) of one head.
struct ExpandedTask {
  const Request* request;
  int64_t head, first, count;
};

// Cuts requests into tasks. With fewer heads than threads queries are divided too, at the price of
// expanding more often.
inline std::vector<ExpandedTask> plan_expanded(const Batch& batch,
                                               const std::vector<const Request*>& requests) {
  int64_t most = 0;
  for (const Request* r : requests) most = std::max(most, r->tokens);
  const int64_t items = std::max<int64_t>(1, batch.dims.heads * int64_t(requests.size()));
  const int64_t parts = (batch.threads + items - 1) / items;
  const int64_t share = round_up((most + parts - 1) / parts, kExpandedQueries);
  const int64_t step = std::clamp(share, kLeastQueries, kMostQueries);
  std::vector<ExpandedTask> tasks;
  for (int64_t head = 0; head < batch.dims.heads; ++head) {  // outside: requests share its weight
    for (const Request* r : requests) {
      for (int64_t first = 0; first < r->tokens; first += step) {
        tasks.push_back({r, head, first, std::min(step, r->tokens - first)});
      }
    }
  }
  return tasks;
}

template <class C>
class Expanded {
 public:
  // What each thread holds for tasks of at most `queries`; `arena` counts or hands out.
  Expanded(const Batch& batch, int64_t queries, Arena& arena) : batch_(batch) {
    most_keys_ = round_up(std::min(kExpandedKeys, batch.most_keys), kLanes);
    for (int i = 0; i < batch.threads; ++i)
      scratch_.emplace_back(arena, batch.dims, queries, most_keys_);
  }

  void run(const std::vector<ExpandedTask>& tasks) {
    for_each_task(tasks.size(), batch_.threads,
                  [&](int64_t i, int t) { attend(tasks[i], scratch_[t]); });
  }

 private:
  using Task = ExpandedTask;

  // Keys [begin, end) of a request.
  struct Span {
    const Request* request = nullptr;
    int64_t begin = 0, end = 0;
    bool operator==(const Span&) const = default;
  };

  struct Scratch {
    C *query, *weight;
    Span packed;              // whose latents are packed: the heads of a short prompt share them
    float *out, *top, *mass;  // running results of the task
    C *latent_columns, *keys, *values;  // of a tile, packed
    C* columns;                         // expanded keys or values before they are packed
    float *product, *scores;
    C* weights;
    LatentLoader<C> load;

    Scratch(Arena& arena, const Dims& d, int64_t queries, int64_t keys)
        : query(arena.take<C>(queries * d.expanded())),
          weight(arena.take<C>(std::max(d.nope, d.value) * d.latent_padded())),
          out(arena.take<float>(queries * d.value)),
          top(arena.take<float>(queries)),
          mass(arena.take<float>(queries)),
          latent_columns(arena.take<C>(d.latent_padded() * keys)),
          keys(arena.take<C>(d.expanded() * keys)),
          values(arena.take<C>(keys * d.value)),
          columns(arena.take<C>(keys * std::max(d.nope_padded(), d.value))),
          product(arena.take<float>(keys * std::max(d.nope, d.value))),
          scores(arena.take<float>(kExpandedQueries * keys)),
          weights(arena.take<C>(kExpandedQueries * keys)),
          load(arena, d, keys) {}
  };

  void attend(const Task& task, Scratch& s) {
    const Dims& d = batch_.dims;
    const Request& request = *task.request;
    begin_task(task, s);
    const int64_t step = std::min(most_keys_, batch_.most_keys);
    const int64_t last = std::min(request.end, request.limit(task.first + task.count - 1));
    for (int64_t begin = request.begin; begin < last; begin += step) {
      const int64_t end = std::min(begin + step, last), padded = round_up(end - begin, kLanes);
      if (request.keys.expanded()) {
        place(task, begin, end, padded, s);
      } else {
        expand(task, begin, end, padded, s);
      }
      for (int64_t q = 0; q < task.count; q += kExpandedQueries) {
        const int64_t queries = std::min(kExpandedQueries, task.count - q);
        const int64_t seen = std::min(end, request.limit(task.first + q + queries - 1)) - begin;
        if (seen <= 0) continue;
        const int64_t rows = padded_rows(queries), columns = round_up(seen, kLanes);
        const C* query = s.query + q * d.expanded();
        float* out = s.out + q * d.value;
        matmul<C>(rows, columns, d.expanded(), query, d.expanded(), s.keys, padded, s.scores,
                  columns, false);
        for (int64_t i = 0; i < queries; ++i) softmax_row(task, q + i, begin, seen, columns, i, s);
        matmul<C>(rows, d.value, columns, s.weights, columns, s.values, d.value, out, d.value,
                  true);
      }
    }
    finish_task(task, s);
  }

  void begin_task(const Task& task, Scratch& s) const {
    const Dims& d = batch_.dims;
    const Strided& from = task.request->query;
    const int64_t rows = round_up(task.count, kExpandedQueries);
    for (int64_t i = 0; i < task.count; ++i) {
      const char* row = from.at(task.first + i, task.head);
      C* to = s.query + i * d.expanded();
      convert_row(from.dtype, row, to, d.nope);
      convert_row(from.dtype, row + d.nope * from.itemsize, to + d.nope_padded(), d.rope);
      if (d.nope_padded() > d.nope) to[d.nope] = C(0.0f);
      if (d.rope_padded() > d.rope) to[d.expanded() - 1] = C(0.0f);
    }
    std::fill(s.out, s.out + rows * d.value, 0.0f);
    std::fill(s.top, s.top + rows, -kInfinity);
    std::fill(s.mass, s.mass + rows, 0.0f);
  }

  // Makes a tile's keys [P + R, padded] and values [padded, V] of one head, packed.
  void expand(const Task& task, int64_t begin, int64_t end, int64_t padded, Scratch& s) const {
    const Dims& d = batch_.dims;
    const Keys& keys = task.request->keys;
    const int64_t wide = d.latent_padded(), first = task.head * batch_.head_rows();
    if (const Span span{task.request, begin, end}; s.packed != span) {
      s.packed = span;
      const auto tile = s.load(keys, d, begin, end);
      pack_columns<C>(tile.rope, tile.rope_stride, tile.count, padded, d.rope_padded(),
                      s.keys + d.nope_padded() * padded);
      pack_columns<C>(tile.latent, tile.latent_stride, tile.count, padded, wide, s.latent_columns);
    }
    const auto project = [&](int64_t row, int64_t rows) {
      int64_t stride = 0;
      const C* w = rows_of<C>(batch_.up, row, rows, d.latent, s.weight, &stride);
      matmul<C>(rows, padded, wide, w, stride, s.latent_columns, padded, s.product, padded, false);
    };
    project(first, d.nope);
    pack_floats<C>(s.product, d.nope, d.nope_padded(), padded, s.keys);
    project(first + d.nope, d.value);
    const auto tidy = [&](Vec v) { return keys.clean ? zero_if_not_finite(v) : v; };
    map_row(s.product, s.columns, d.value * padded, tidy);
    pack_columns<C>(s.columns, padded, d.value, d.value, padded, s.values);
  }

  // Packs keys and values that are expanded already.
  void place(const Task& task, int64_t begin, int64_t end, int64_t padded, Scratch& s) const {
    const Dims& d = batch_.dims;
    const Keys& keys = task.request->keys;
    const int64_t count = end - begin;
    const auto copy = [&](const Strided& from, int64_t width) {
      const int64_t wide = even(width);
      for (int64_t i = 0; i < count; ++i) {
        C* to = s.columns + i * wide;
        convert_row(from.dtype, from.at(begin + i, task.head), to, width);
        if (wide > width) to[width] = C(0.0f);
      }
      return wide;
    };
    int64_t wide = copy(keys.nope, d.nope);
    pack_columns<C>(s.columns, wide, count, padded, wide, s.keys);
    // The rotary rows go through the loader's buffer: they are as narrow as those of a latent tile.
    for (int64_t i = 0; i < count; ++i) {
      C* to = s.load.rope + i * d.rope_padded();
      convert_row(keys.rope.dtype, keys.rope.at(begin + i), to, d.rope);
      if (d.rope_padded() > d.rope) to[d.rope] = C(0.0f);
    }
    pack_columns<C>(s.load.rope, d.rope_padded(), count, padded, d.rope_padded(),
                    s.keys + d.nope_padded() * padded);
    for (int64_t i = 0; i < count; ++i)
      convert_row(keys.value.dtype, keys.value.at(begin + i, task.head), s.columns + i * d.value,
                  d.value);
    pack_rows<C>(s.columns, d.value, count, padded, d.value, s.values, keys.clean);
  }

  // One row of scores -> one row of P, the running statistics, and the row of results rescaled.
  void softmax_row(const Task& task, int64_t query, int64_t begin, int64_t seen, int64_t columns,
                   int64_t row, Scratch& s) const {
    const Request& request = *task.request;
    const int64_t token = task.first + query;
    float* scores = s.scores + row * columns;
    const int64_t own =
        std::clamp<int64_t>(std::min(request.end, request.limit(token)) - begin, 0, seen);
    std::fill(scores + own, scores + columns, -kInfinity);
    if (request.mask.data != nullptr) {
      for (int64_t k = 0; k < own; ++k) {
        scores[k] = request.mask.applied(scores[k] * batch_.scale, task.head, token, begin + k);
      }
    }
    const float scale = request.mask.data != nullptr ? 1.0f : batch_.scale;
    const int64_t used = round_up(own, kLanes);
    Vec most = broadcast(-kInfinity);
    for (int64_t k = 0; k + kLanes <= own; k += kLanes) {
      const Vec v = load(scores + k) * scale;
      store(scores + k, v);
      most = larger(v, most);
    }
    float top = s.top[query];
    if (own % kLanes != 0) {
      for (int64_t k = own / kLanes * kLanes; k < own; ++k) {
        scores[k] *= scale;
        top = scores[k] > top ? scores[k] : top;
      }
    }
    top = std::max(top, largest(most));
    const float base = top == -kInfinity ? 0.0f : top;
    Vec total = {};
    C* weights = s.weights + row * columns;
    for (int64_t k = 0; k < used; k += kLanes) {
      const Vec p = exp_negative(load(scores + k) - base);
      total += p;
      store(weights + k, p);
    }
    std::memset(static_cast<void*>(weights + used), 0, (columns - used) * sizeof(C));
    const float factor = exp_negative(s.top[query] - base);
    s.mass[query] = s.mass[query] * factor + sum(total);
    s.top[query] = top;
    if (factor == 1.0f) return;
    float* out = s.out + query * batch_.dims.value;
    map_row(out, out, batch_.dims.value, [factor](Vec v) { return v * factor; });
  }

  void finish_task(const Task& task, Scratch& s) const {
    const Dims& d = batch_.dims;
    const Request& request = *task.request;
    const float sink = batch_.sinks == nullptr ? -kInfinity : batch_.sinks[task.head];
    for (int64_t i = 0; i < task.count; ++i) {
      float* row = s.out + i * d.value;
      const bool seen = s.mass[i] != 0.0f;  // NaN too
      const float top = std::max(s.top[i], sink), base = top == -kInfinity ? 0.0f : top;
      const float factor = exp_negative(s.top[i] - base);
      const float mass = s.mass[i] * factor + exp_negative(sink - base);
      if (!seen) std::fill(row, row + d.value, 0.0f);
      write_row(request.out, task.first + i, task.head, row, d.value, seen ? factor / mass : 1.0f);
      request.lse[task.head * request.lse_head + task.first + i] =
          mass == 0.0f ? -kInfinity : base + std::log(mass);
    }
  }

  const Batch& batch_;
  int64_t most_keys_;
  std::vector<Scratch> scratch_;
};

}  // namespace mla
