// Attention to the latents themselves: the up projections act on queries and results.
//
//   project   q W_uk for every head, all tokens of the group at once
//   attend    tasks of (some tokens x heads) x (a span of keys): scores as K q^T, so that a latent
//             row is the left operand as it lies and only q is packed, once; online softmax; P V
//   finish    the spans' partial results are merged in their order, then times W_uv
//
// Absorption: DeepSeek-V2 (arXiv:2405.04434). Spans: Flash-Decoding (Dao et al., 2023).
#pragma once

#include "batch.h"
#include "few.h"

namespace mla {

constexpr int64_t kAbsorbedKeys = 128;  // of a tile
constexpr int64_t kAbsorbedRows = 128;  // tokens x heads of a task
constexpr int64_t kGroupTokens = 64;    // that the up projections act on at once
constexpr int64_t kGroupRows = 4096;    // tokens x heads of these
constexpr int64_t kFewRows = 24;        // for which a weight is not worth packing
constexpr int64_t kLeastSpan = 256;     // keys that are worth a task of their own
constexpr int64_t kTasksPerThread = 4;

// Tokens [first, first + count) of one request, and where they stand in the group.
struct Piece {
  const Request* request;
  int64_t first, count, place;
};

// One block of rows (token-major: row = token * H + head) against one span of keys.
struct Task {
  const Piece* piece;
  int64_t row, rows, begin, end;
  int64_t partial;  // first of its rows among the partial results
};

struct Group {
  int64_t tokens = 0;
  std::vector<Piece> pieces;
  std::vector<Task> tasks;  // of one row block: next to each other, in the order of the keys
  int64_t partial_rows = 0;
};

inline int64_t group_tokens(const Dims& dims) {
  return std::max<int64_t>(1, std::min(kGroupTokens, kGroupRows / dims.heads));
}

// Cuts the row blocks of a group into spans of keys. They follow from lengths and threads alone.
inline void plan_tasks(Group& group, const Dims& dims, int threads) {
  struct Block {
    const Piece* piece;
    int64_t row, rows, begin, end;
  };
  std::vector<Block> blocks;
  int64_t work = 0;
  for (const Piece& piece : group.pieces) {
    const int64_t all = piece.count * dims.heads;
    for (int64_t row = 0; row < all; row += kAbsorbedRows) {
      const int64_t rows = std::min(kAbsorbedRows, all - row);
      const int64_t last = piece.first + (row + rows - 1) / dims.heads;
      const int64_t begin = piece.request->begin;
      const int64_t end = std::max(begin, std::min(piece.request->end, piece.request->limit(last)));
      blocks.push_back({&piece, row, rows, begin, end});
      work += round_up(rows, kLanes) * (end - begin);
    }
  }
  const int64_t share = work / (threads * kTasksPerThread) + 1;
  for (const Block& b : blocks) {
    const int64_t padded = round_up(b.rows, kLanes), keys = b.end - b.begin;
    int64_t span = keys;
    if (threads > 1)
      span = std::min(keys, std::max(kLeastSpan, round_up(share / padded, kAbsorbedKeys)));
    for (int64_t at = 0; at == 0 || at < keys; at += std::max<int64_t>(span, 1)) {
      group.tasks.push_back({b.piece, b.row, b.rows, b.begin + at,
                             b.begin + std::min(keys, at + span), group.partial_rows});
      group.partial_rows += padded;
    }
  }
}

inline std::vector<Group> plan_groups(const Batch& batch,
                                      const std::vector<const Request*>& requests) {
  const int64_t most = group_tokens(batch.dims);
  std::vector<Group> groups;
  for (const Request* request : requests) {
    for (int64_t first = 0; first < request->tokens;) {
      if (groups.empty() || groups.back().tokens == most) groups.emplace_back();
      Group& group = groups.back();
      const int64_t count = std::min(request->tokens - first, most - group.tokens);
      group.pieces.push_back({request, first, count, group.tokens});
      group.tokens += count;
      first += count;
    }
  }
  for (Group& group : groups) plan_tasks(group, batch.dims, batch.threads);
  return groups;
}

// The most rows of partial results that a group of `tokens` has, whatever the lengths: a span is
// no shorter than the share of a task, or the only one of its block.
inline int64_t most_partial_rows(const Dims& dims, int64_t tokens, int threads) {
  const int64_t blocks = round_up(tokens * dims.heads, kLanes) + tokens * kLanes;
  return blocks + (threads > 1 ? threads * kTasksPerThread * kAbsorbedRows : 0);
}

template <class C>
class Absorbed {
 public:
  // What a group of `tokens` and each thread hold; `arena` counts or hands out.
  Absorbed(const Batch& batch, int64_t tokens, int64_t partial_rows, Arena& arena) : batch_(batch) {
    const Dims& d = batch.dims;
    most_keys_ = round_up(std::min(kAbsorbedKeys, batch.most_keys), kLanes);
    query_ = arena.take<C>(tokens * d.heads * d.absorbed());
    partial_ = arena.take<float>(partial_rows * d.latent);
    top_ = arena.take<float>(partial_rows);
    mass_ = arena.take<float>(partial_rows);
    for (int i = 0; i < batch.threads; ++i)
      scratch_.emplace_back(arena, d, padded_rows(tokens), most_keys_);
  }

  void run(const std::vector<Group>& groups) {
    for (const Group& group : groups) {
      for_each_task(batch_.dims.heads, batch_.threads,
                    [&](int64_t h, int t) { project(group, h, scratch_[t]); });
      for_each_task(group.tasks.size(), batch_.threads,
                    [&](int64_t i, int t) { attend(group.tasks[i], scratch_[t]); });
      for_each_task(batch_.dims.heads, batch_.threads,
                    [&](int64_t h, int t) { finish(group, h, scratch_[t]); });
    }
  }

 private:
  struct Scratch {
    C *left, *weight, *packed;  // of the projections
    float* product;
    C *query, *weights, *values;  // of a task: q^T, P, V, packed
    float* scores;                // [keys, rows]
    float* factor;                // [rows]
    LatentLoader<C> load;
    std::vector<LatentTile<C>> runs;  // of the tile that is loaded

    Scratch(Arena& arena, const Dims& d, int64_t tokens, int64_t keys)
        : left(arena.take<C>(tokens * std::max(d.nope_padded(), d.latent_padded()))),
          weight(arena.take<C>(std::max(d.nope, d.value) * d.latent_padded())),
          packed(arena.take<C>(std::max(d.nope_padded() * d.latent, d.latent_padded() * d.value))),
          product(arena.take<float>(tokens * std::max(d.latent, d.value))),
          query(arena.take<C>(kAbsorbedRows * d.absorbed())),
          weights(arena.take<C>(kAbsorbedRows * keys)),
          values(arena.take<C>(keys * d.latent)),
          scores(arena.take<float>(keys * kAbsorbedRows)),
          factor(arena.take<float>(kAbsorbedRows)),
          load(arena, d, keys) {}
  };

  // Absorbs W_uk into the queries of one head: query_ [token][head][L + R].
  void project(const Group& group, int64_t head, Scratch& s) {
    const Dims& d = batch_.dims;
    const int64_t wide = d.nope_padded(), rows = padded_rows(group.tokens);
    for (const Piece& piece : group.pieces) {
      for (int64_t i = 0; i < piece.count; ++i) {
        const char* from = piece.request->query.at(piece.first + i, head);
        const ScalarType dtype = piece.request->query.dtype;
        C* left = s.left + (piece.place + i) * wide;
        convert_row(dtype, from, left, d.nope);
        if (wide > d.nope) left[d.nope] = C(0.0f);
        C* rope = query_ + ((piece.place + i) * d.heads + head) * d.absorbed() + d.latent_padded();
        convert_row(dtype, from + d.nope * piece.request->query.itemsize, rope, d.rope);
        if (d.rope_padded() > d.rope) rope[d.rope] = C(0.0f);
      }
    }
    std::memset(static_cast<void*>(s.left + group.tokens * wide), 0,
                (rows - group.tokens) * wide * sizeof(C));
    int64_t stride = 0;
    const C* w =
        rows_of<C>(batch_.up, head * batch_.head_rows(), d.nope, d.latent, s.weight, &stride);
    project_down(group.tokens, rows, w, stride, s);
    for (int64_t t = 0; t < group.tokens; ++t) {
      C* to = query_ + (t * d.heads + head) * d.absorbed();
      convert_row(ScalarType::Float, s.product + t * d.latent, to, d.latent);
      if (d.latent_padded() > d.latent) to[d.latent] = C(0.0f);
    }
  }

  void attend(const Task& task, Scratch& s) {
    const Dims& d = batch_.dims;
    const Request& request = *task.piece->request;
    const int64_t rows = round_up(task.rows, kLanes);
    float* out = partial_ + task.partial * d.latent;
    float* top = top_ + task.partial;
    float* mass = mass_ + task.partial;
    std::fill(top, top + rows, -kInfinity);
    std::fill(mass, mass + rows, 0.0f);
    const C* query = query_ + (task.piece->place * d.heads + task.row) * d.absorbed();
    pack_columns<C>(query, d.absorbed(), task.rows, rows, d.absorbed(), s.query);
    const int64_t step = std::min(most_keys_, batch_.most_keys);
    for (int64_t begin = task.begin; begin < task.end; begin += step) {
      const int64_t end = std::min(begin + step, task.end);
      const int64_t count = end - begin, padded = round_up(count, kLanes);
      s.load.runs(request.keys, d, begin, end, s.runs);
      scores(request.keys, rows, end, std::min(end + step, task.end), s);
      for (int64_t i = 0; i < count * rows; i += kLanes)
        store(s.scores + i, load(s.scores + i) * batch_.scale);
      hide(task, begin, end, rows, s.scores);
      softmax(count, padded, rows, top, mass, s);
      bool add = begin > task.begin;
      if (add) rescale(out, s.factor, task.rows, d.latent);
      const bool pack = kPack<C> > 1 || request.keys.clean;
      int64_t at = 0;
      for (const LatentTile<C>& run : s.runs) {
        if (pack) {
          pack_rows<C>(run.latent, run.latent_stride, run.count, run.padded, d.latent,
                       s.values + at * d.latent, request.keys.clean);
        } else {
          matmul<C>(rows, d.latent, run.padded, s.weights + at, padded, run.latent,
                    run.latent_stride, out, d.latent, add);
          add = true;
        }
        at += run.padded;
      }
      if (pack) {
        matmul<C>(rows, d.latent, padded, s.weights, padded, s.values, d.latent, out, d.latent,
                  add);
      }
    }
  }

  // Scores [keys, rows] of the tile whose runs are loaded; the tile behind it is [next, behind).
  void scores(const Keys& keys, int64_t rows, int64_t next, int64_t behind, Scratch& s) const {
    const Dims& d = batch_.dims;
    const int64_t wide = d.latent_padded(), narrow = d.rope_padded();
    const C* rope_query = s.query + wide * rows;
    float* to = s.scores;
    for (const LatentTile<C>& run : s.runs) {
#if defined(__AVX512BF16__)
      if constexpr (kPack<C> == 2) {
        if (rows <= 2 * kLanes) {
          const char* ahead[2][kAbsorbedKeys];
          for (int64_t i = 0; i < run.padded && next < behind; ++i) {
            const int64_t key = std::min(next + i, behind - 1);
            ahead[0][i] = keys.row(key);
            ahead[1][i] = keys.rope_row(key, d.latent);
          }
          const auto few = rows == kLanes ? few_scores<1> : few_scores<2>;
          const bool more = next < behind;
          few(run.latent, run.latent_stride, run.padded, wide / 2, s.query, to,
              more ? ahead[0] : nullptr, false);
          few(run.rope, run.rope_stride, run.padded, narrow / 2, rope_query, to,
              more ? ahead[1] : nullptr, true);
          next += run.padded;
          to += run.padded * rows;
          continue;
        }
      }
#endif
      matmul<C>(run.padded, rows, wide, run.latent, run.latent_stride, s.query, rows, to, rows,
                false);
      matmul<C>(run.padded, rows, narrow, run.rope, run.rope_stride, rope_query, rows, to, rows,
                true);
      to += run.padded * rows;
    }
  }

  // Applies the mask and the causal rule to scores [keys, rows].
  void hide(const Task& task, int64_t begin, int64_t end, int64_t rows, float* scores) const {
    const Request& request = *task.piece->request;
    const int64_t heads = batch_.dims.heads;
    const auto token = [&](int64_t r) { return task.piece->first + (task.row + r) / heads; };
    if (request.mask.data != nullptr) {
      for (int64_t r = 0; r < task.rows; ++r) {
        for (int64_t k = begin; k < end; ++k) {
          float& score = scores[(k - begin) * rows + r];
          score = request.mask.applied(score, (task.row + r) % heads, token(r), k);
        }
      }
    }
    if (end <= request.limit(token(0))) return;
    for (int64_t r = 0; r < task.rows; ++r) {
      for (int64_t k = std::max(begin, request.limit(token(r))); k < end; ++k) {
        scores[(k - begin) * rows + r] = -kInfinity;
      }
    }
  }

  // Down the columns of scores [keys, rows], sixteen rows at a time. Writes P [rows, keys] in the
  // compute type and what earlier results are multiplied by.
  static void softmax(int64_t keys, int64_t padded, int64_t rows, float* top, float* mass,
                      Scratch& s) {
    for (int64_t r = 0; r < rows; r += kLanes) {
      const float* column = s.scores + r;
      const Vec before = load(top + r);
      Vec now = before;
      for (int64_t k = 0; k < keys; ++k) now = larger(load(column + k * rows), now);
      const Vec base = now == -kInfinity ? Vec{} : now;
      Vec total = {};
      // P is wanted row by row and made column by column: sixteen words of a row at a time.
      constexpr int64_t kBlock = kLanes * kPack<C>;
      for (int64_t begin = 0; begin < padded; begin += kBlock) {
        Words block[kLanes];
#pragma GCC unroll 16
        for (int64_t i = 0; i < kLanes; ++i) {
          const auto weight = [&](int64_t k) {
            return k < keys ? exp_negative(load(column + k * rows) - base) : Vec{};
          };
          const Vec a = weight(begin + i * kPack<C>);
          if constexpr (kPack<C> == 2) {
            const Vec b = weight(begin + i * 2 + 1);
            total += a + b;
            block[i] = pair(a, b);
          } else {
            total += a;
            block[i] = same_bits<Words>(a);
          }
        }
        transpose(block);
        const int64_t bytes = std::min(kBlock, padded - begin) * int64_t(sizeof(C));
        for (int64_t i = 0; i < kLanes; ++i) {
          void* to = s.weights + (r + i) * padded + begin;
          if (bytes == sizeof(Words)) {
            std::memcpy(to, &block[i], sizeof(Words));
          } else {
            std::memcpy(to, &block[i], bytes);
          }
        }
      }
      const Vec factor = exp_negative(before - base);
      store(s.factor + r, factor);
      store(mass + r, load(mass + r) * factor + total);
      store(top + r, now);
    }
  }

  static void rescale(float* out, const float* factor, int64_t rows, int64_t width) {
    for (int64_t r = 0; r < rows; ++r) {
      if (factor[r] == 1.0f) continue;
      map_row(out + r * width, out + r * width, width, [f = factor[r]](Vec v) { return v * f; });
    }
  }

  // Merges the spans of every token of one head and projects the result up.
  void finish(const Group& group, int64_t head, Scratch& s) {
    const Dims& d = batch_.dims;
    const int64_t wide = d.latent_padded(), rows = padded_rows(group.tokens);
    std::memset(static_cast<void*>(s.left), 0, rows * wide * sizeof(C));
    for (size_t i = 0; i < group.tasks.size();) {
      size_t behind = i;  // tasks [i, behind) are the spans of one block of rows
      const Task& task = group.tasks[i];
      while (behind < group.tasks.size() && group.tasks[behind].piece == task.piece &&
             group.tasks[behind].row == task.row) {
        ++behind;
      }
      const int64_t ahead = (head - task.row % d.heads + d.heads) % d.heads;
      for (int64_t r = ahead; r < task.rows; r += d.heads) {
        merge(group, i, behind, r, head, (task.row + r) / d.heads, s);
      }
      i = behind;
    }
    int64_t stride = 0;
    const C* w = rows_of<C>(batch_.up, head * batch_.head_rows() + d.nope, d.value, d.latent,
                            s.weight, &stride);
    project_up(group.tokens, rows, w, stride, s);
    for (const Piece& piece : group.pieces) {
      for (int64_t i = 0; i < piece.count; ++i) {
        const Strided& out = piece.request->out;
        write_row(out, piece.first + i, head, s.product + (piece.place + i) * d.value, d.value);
      }
    }
  }

  // product [tokens, L] = left [tokens, P] times W_uk [P, L].
  void project_down(int64_t tokens, int64_t rows, const C* w, int64_t stride, Scratch& s) const {
    const Dims& d = batch_.dims;
    const int64_t wide = d.nope_padded();
#if defined(__AVX512BF16__)
    if constexpr (kPack<C> == 2) {
      if (tokens <= kFewRows && wide == d.nope && d.latent % 32 == 0) {
        few_products(tokens, d.nope, d.latent, s.left, w, stride, s.product);
        return;
      }
    }
#endif
    pack_rows<C>(w, stride, d.nope, wide, d.latent, s.packed, false);
    matmul<C>(rows, d.latent, wide, s.left, wide, s.packed, d.latent, s.product, d.latent, false);
  }

  // product [tokens, V] = left [tokens, L] times the transpose of W_uv [V, L].
  void project_up(int64_t tokens, int64_t rows, const C* w, int64_t stride, Scratch& s) const {
    const Dims& d = batch_.dims;
    const int64_t wide = d.latent_padded();
#if defined(__AVX512BF16__)
    if constexpr (kPack<C> == 2) {
      if (tokens <= kFewRows) {  // packing would take longer than multiplying
        few_dots(tokens, wide, d.value, s.left, wide, w, stride, s.product, d.value);
        return;
      }
    }
#endif
    pack_columns<C>(w, stride, d.value, d.value, wide, s.packed);
    matmul<C>(rows, d.value, wide, s.left, wide, s.packed, d.value, s.product, d.value, false);
  }

  // Merges row `r` of the spans [first, behind) into `left`, and writes its lse.
  void merge(const Group& group, size_t first, size_t behind, int64_t r, int64_t head,
             int64_t token, Scratch& s) {
    const Dims& d = batch_.dims;
    const Piece& piece = *group.tasks[first].piece;
    const float sink = batch_.sinks == nullptr ? -kInfinity : batch_.sinks[head];
    float top = sink;
    bool seen = sink > -kInfinity;
    for (size_t i = first; i < behind; ++i) {
      const int64_t at = group.tasks[i].partial + r;
      top = std::max(top, top_[at]);
      seen = seen || mass_[at] != 0.0f;  // NaN too
    }
    float& lse = piece.request->lse[head * piece.request->lse_head + piece.first + token];
    lse = -kInfinity;
    if (!seen) return;
    const float base = top == -kInfinity ? 0.0f : top;
    float mass = exp_negative(sink - base);
    float* row = s.product;  // free until the matmul
    std::fill(row, row + d.latent, 0.0f);
    for (size_t i = first; i < behind; ++i) {
      const int64_t at = group.tasks[i].partial + r;
      if (mass_[at] == 0.0f) continue;  // its sums were not written, or are 0
      const float weight = exp_negative(top_[at] - base);
      mass += weight * mass_[at];
      const float* part = partial_ + at * d.latent;
      for (int64_t j = 0; j < d.latent; ++j) row[j] += weight * part[j];
    }
    lse = base + std::log(mass);
    C* to = s.left + (piece.place + token) * d.latent_padded();
    convert_row(ScalarType::Float, row, to, d.latent, 1.0f / mass);
  }

  const Batch& batch_;
  int64_t most_keys_;
  C* query_;
  float *partial_, *top_, *mass_;
  std::vector<Scratch> scratch_;
};

}  // namespace mla
