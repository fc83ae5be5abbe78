// Multi-head latent attention for CPUs: what Python calls. Arguments arrive validated.
//
// The matrix products are torch's own micro-kernels (oneDNN, with AMX or AVX512-BF16 where the CPU
// has them); everything around them is in the headers.

#include <ATen/ops/empty.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <utility>

#include "absorbed.h"
#include "expanded.h"
#include "rows.h"

namespace mla {
namespace {

using at::Tensor;
using Optional = std::optional<Tensor>;

Pages pages_of(const Tensor& cache, const Optional& scale) {
  Pages pages;
  pages.cache = static_cast<const char*>(cache.data_ptr());
  pages.dtype = cache.scalar_type();
  pages.itemsize = cache.element_size();
  pages.block_size = cache.size(1);
  pages.block_stride = cache.stride(0);
  pages.row_stride = cache.size(1) > 1 ? cache.stride(1) : cache.size(2);
  if (scale.has_value() && pages.itemsize == 1) {
    pages.scale = scale->item().toFloat();
  }
  return pages;
}

// Refuses spans that fall or leave [0, rows].
void check_spans(const char* name, const Tensor& bounds, int64_t rows) {
  const auto* at = bounds.const_data_ptr<int32_t>();
  const int64_t n = bounds.size(0);
  bool fits = n > 0 && at[0] >= 0 && at[n - 1] <= rows;
  for (int64_t i = 1; fits && i < n; ++i) fits = at[i - 1] <= at[i];
  if (fits) return;
  std::string got;
  for (int64_t i = 0; i < n; ++i) got += (i > 0 ? ", " : "") + std::to_string(at[i]);
  throw std::invalid_argument(std::string(name) + " must rise from 0 to at most " +
                              std::to_string(rows) + ", got [" + got + "]");
}

// Refuses ids that are not in the cache.
void check_table(const int32_t* table, int64_t width, int64_t first, int64_t behind, int64_t limit,
                 int64_t request) {
  if (behind > width) {
    throw std::invalid_argument("block_table must hold " + std::to_string(behind) +
                                " ids from 0 to " + std::to_string(limit - 1) + " for request " +
                                std::to_string(request) + ", got " + std::to_string(width));
  }
  for (int64_t i = first; i < behind; ++i) {
    if (table[i] < 0 || table[i] >= limit) {
      throw std::invalid_argument("block_table must hold " + std::to_string(behind - first) +
                                  " ids from 0 to " + std::to_string(limit - 1) +
                                  " for the rows that are read, got " + std::to_string(table[i]) +
                                  " for request " + std::to_string(request));
    }
  }
}

// Bytes of a form's scratch, and as many to align it.
template <class Form, class... Sizes>
int64_t bytes_of(const Batch& batch, Sizes... sizes) {
  Arena count;
  Form(batch, sizes..., count);
  return count.used() + 64;
}

template <class Form, class F, class... Sizes>
void with_memory(F&& use, const Batch& batch, Sizes... sizes) {
  const Tensor memory = at::empty({bytes_of<Form>(batch, sizes...)}, at::kByte);
  auto* base = static_cast<char*>(memory.data_ptr());
  Arena arena(base + (64 - reinterpret_cast<uintptr_t>(base) % 64) % 64);
  Form form(batch, sizes..., arena);
  use(form);
}

template <class C>
void run_as(const Batch& batch) {
  std::vector<const Request*> few, many;
  for (const Request& r : batch.requests) {
    if (r.tokens == 0) continue;
    const bool expand = r.keys.expanded() || batch.dims.should_expand(r.tokens, r.end - r.begin);
    (expand ? many : few).push_back(&r);
  }
  if (!few.empty()) {
    const std::vector<Group> groups = plan_groups(batch, few);
    int64_t tokens = 0, partial_rows = 0;
    for (const Group& group : groups) {
      tokens = std::max(tokens, group.tokens);
      partial_rows = std::max(partial_rows, group.partial_rows);
    }
    with_memory<Absorbed<C>>([&](auto& form) { form.run(groups); }, batch, tokens, partial_rows);
  }
  if (!many.empty()) {
    const std::vector<ExpandedTask> tasks = plan_expanded(batch, many);
    int64_t queries = 0;
    for (const ExpandedTask& task : tasks)
      queries = std::max(queries, round_up(task.count, kExpandedQueries));
    with_memory<Expanded<C>>([&](auto& form) { form.run(tasks); }, batch, queries);
  }
}

// The bytes that the worst batch of so many tokens holds beside its results.
template <class C>
int64_t worst_bytes_as(const Batch& batch, int64_t tokens) {
  const int64_t grouped = std::min(tokens, group_tokens(batch.dims));
  const int64_t rows = most_partial_rows(batch.dims, grouped, batch.threads);
  const int64_t absorbed = bytes_of<Absorbed<C>>(batch, grouped, rows);
  const int64_t queries = std::min(round_up(tokens, kExpandedQueries), kMostQueries);
  return std::max(absorbed, bytes_of<Expanded<C>>(batch, queries));
}

int64_t worst_bytes(int64_t heads, int64_t latent, int64_t nope, int64_t rope, int64_t value,
                    int64_t tokens, int64_t most_keys, bool in_bfloat16, int threads) {
  Batch batch;
  batch.dims = {heads, latent, nope, rope, value};
  batch.most_keys = most_keys;
  batch.threads = threads;
  return in_bfloat16 ? worst_bytes_as<BFloat16>(batch, tokens)
                     : worst_bytes_as<float>(batch, tokens);
}

// The rule by which a request is expanded; tests compare it with `MLADims.should_expand`.
bool should_expand(int64_t latent, int64_t nope, int64_t rope, int64_t value, int64_t queries,
                   int64_t keys) {
  return Dims{1, latent, nope, rope, value}.should_expand(queries, keys);
}

// Whether this CPU has the products of two bf16 matrices that the kernels are made of.
bool takes_bfloat16() {
  BFloat16 a[64] = {}, b[64] = {};
  float c[16] = {};
  try {
    at::native::cpublas::brgemm(1, 16, 2, 2, 16, 16, false, a, b, c, true);
    at::native::cpublas::brgemm_release();
    return true;
  } catch (...) {
    return false;
  }
}

// What a ragged batch says of the request whose tokens are rows [first, behind).
Request ragged_request(const Tensor& query, const Tensor& out, const Tensor& lse, int64_t first,
                       int64_t behind) {
  Request request;
  request.tokens = behind - first;
  request.query = Strided(query, 0, 1).from_row(first);
  request.out = Strided(out, 0, 1).from_row(first);
  request.lse = lse.data_ptr<float>() + first;
  request.lse_head = lse.stride(0);
  return request;
}

void run(const Batch& batch, bool in_bfloat16) {
  const pybind11::gil_scoped_release released;
  if (in_bfloat16) {
    run_as<BFloat16>(batch);
  } else {
    run_as<float>(batch);
  }
}

// Dense: query [B, H, S, P+R], kv_c [B, T, L], k_pe [B, T, R], w_kv_b [H*(P+V), L]; mask
// [B, H, S, T] by strides; bounds [B, 2] and sinks [H] fp32. Writes out [B, H, S, V], lse [B, H,
// S].
void attention(const Tensor& query, const Tensor& kv_c, const Tensor& k_pe, const Tensor& w_kv_b,
               const Optional& mask, const Optional& bounds, const Optional& sinks, double scale,
               bool causal, int64_t most_keys, bool in_bfloat16, int threads, const Tensor& out,
               const Tensor& lse) {
  Batch batch;
  const int64_t heads = query.size(1), rope = k_pe.size(2), nope = query.size(3) - rope;
  batch.dims = {heads, kv_c.size(2), nope, rope, out.size(3)};
  batch.scale = float(scale);
  batch.up = Strided(w_kv_b, 0);
  batch.sinks = sinks.has_value() ? sinks->const_data_ptr<float>() : nullptr;
  batch.most_keys = most_keys;
  batch.threads = threads;
  const Strided q(query, 2, 1), o(out, 2, 1), c(kv_c, 1), r(k_pe, 1);
  for (int64_t b = 0; b < query.size(0); ++b) {
    Request request;
    request.tokens = query.size(2);
    request.end = kv_c.size(1);
    if (bounds.has_value()) {
      const auto* pair = bounds->const_data_ptr<int32_t>() + b * 2;
      request.end = std::clamp<int64_t>(pair[1], 0, request.end);
      request.begin = std::clamp<int64_t>(pair[0], 0, request.end);
    }
    request.causal = causal;
    request.query = q.moved(b * query.stride(0));
    request.out = o.moved(b * out.stride(0));
    request.lse = lse.data_ptr<float>() + b * lse.stride(0);
    request.lse_head = lse.stride(1);
    request.keys.latent = c.moved(b * kv_c.stride(0));
    request.keys.rope = r.moved(b * k_pe.stride(0));
    if (mask.has_value()) {
      request.keys.clean = true;
      request.mask.data =
          static_cast<const char*>(mask->data_ptr()) + b * mask->stride(0) * mask->element_size();
      request.mask.dtype = mask->scalar_type();
      request.mask.itemsize = mask->element_size();
      request.mask.head = mask->stride(1);
      request.mask.query = mask->stride(2);
      request.mask.key = mask->stride(3);
    }
    batch.requests.push_back(request);
  }
  run(batch, in_bfloat16);
}

// Paged: query [T, H, P+R] of requests at `starts` [n+1] with lengths `lens` [n], both int32. The
// new tokens of the first `cached` requests are read from the cache, those of others from kv_c and
// k_pe.
void paged(const Tensor& query, const Optional& kv_c, const Optional& k_pe, const Tensor& w_kv_b,
           const Tensor& cache, const Tensor& block_table, const Tensor& starts, const Tensor& lens,
           const Optional& kv_scale, int64_t cached, double scale, int64_t most_keys,
           bool in_bfloat16, int threads, const Tensor& out, const Tensor& lse) {
  check_spans("cu_seqlens_q", starts, query.size(0));
  Batch batch;
  const int64_t latent = w_kv_b.size(1), rope = cache.size(2) - latent, nope = query.size(2) - rope;
  batch.dims = {query.size(1), latent, nope, rope, out.size(2)};
  batch.scale = float(scale);
  batch.up = Strided(w_kv_b, 0);
  batch.most_keys = most_keys;
  batch.threads = threads;
  const Pages pages = pages_of(cache, kv_scale);
  const auto* first = starts.const_data_ptr<int32_t>();
  const auto* length = lens.const_data_ptr<int32_t>();
  const auto* table = block_table.const_data_ptr<int32_t>();
  for (int64_t i = 0; i + 1 < starts.size(0); ++i) {
    if (first[i + 1] == first[i]) continue;
    Request request = ragged_request(query, out, lse, first[i], first[i + 1]);
    request.end = length[i];
    if (request.end < 0 || (i >= cached && request.end < request.tokens)) {
      throw std::invalid_argument("seq_lens must be at least the number of new tokens, " +
                                  std::to_string(request.tokens) + ", got " +
                                  std::to_string(length[i]) + " for request " + std::to_string(i));
    }
    request.causal = true;
    request.keys.pages = pages;
    request.keys.pages.table = table + i * block_table.stride(0);
    request.keys.context = length[i];
    if (i >= cached && kv_c.has_value()) {
      request.keys.context = length[i] - request.tokens;
      request.keys.latent = Strided(*kv_c, 0).from_row(first[i]);
      request.keys.rope = Strided(*k_pe, 0).from_row(first[i]);
    }
    const int64_t behind =
        (std::max<int64_t>(request.keys.context, 0) + pages.block_size - 1) / pages.block_size;
    check_table(request.keys.pages.table, block_table.size(1), 0, behind, cache.size(0), i);
    batch.requests.push_back(request);
  }
  run(batch, in_bfloat16);
}

// Ragged, expanded: query [T, H, P+R], k_nope [K, H, P], k_pe [K, R], value [K, H, V].
void prefill(const Tensor& query, const Tensor& k_nope, const Tensor& k_pe, const Tensor& value,
             const Tensor& starts, const Tensor& key_starts, double scale, bool causal,
             bool in_bfloat16, int threads, const Tensor& out, const Tensor& lse) {
  check_spans("cu_seqlens_q", starts, query.size(0));
  check_spans("cu_seqlens_k", key_starts, k_pe.size(0));
  Batch batch;
  const int64_t rope = k_pe.size(1);
  batch.dims = {query.size(1), 1, query.size(2) - rope, rope, value.size(2)};
  batch.scale = float(scale);
  batch.threads = threads;
  const auto* first = starts.const_data_ptr<int32_t>();
  const auto* key = key_starts.const_data_ptr<int32_t>();
  for (int64_t i = 0; i + 1 < starts.size(0); ++i) {
    Request request = ragged_request(query, out, lse, first[i], first[i + 1]);
    request.end = key[i + 1] - key[i];
    request.causal = causal;
    request.keys.nope = Strided(k_nope, 0, 1).from_row(key[i]);
    request.keys.value = Strided(value, 0, 1).from_row(key[i]);
    request.keys.rope = Strided(k_pe, 0).from_row(key[i]);
    batch.requests.push_back(request);
  }
  run(batch, in_bfloat16);
}

void update_cache(const Tensor& kv_c, const Tensor& k_pe, const Tensor& cache, const Tensor& slots,
                  const Optional& kv_scale, int threads) {
  const int64_t limit = cache.size(0) * cache.size(1);
  const auto* slot = slots.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < slots.size(0); ++i) {
    if (slot[i] >= limit) {
      throw std::invalid_argument("slot_mapping must be below " + std::to_string(limit) +
                                  ", the slots of the cache, got " + std::to_string(slot[i]));
    }
  }
  update(Strided(kv_c, 0), kv_c.size(1), Strided(k_pe, 0), k_pe.size(1),
         static_cast<char*>(cache.data_ptr()), cache.scalar_type(), pages_of(cache, kv_scale), slot,
         slots.size(0), threads);
}

void gather(const Tensor& cache, const Tensor& block_table, const Tensor& key_starts,
            const Tensor& seq_starts, const Tensor& workspace, const Optional& kv_scale,
            int threads) {
  check_spans("cu_seqlens_k", key_starts, workspace.size(0));
  Pages pages = pages_of(cache, kv_scale);
  const auto* place = key_starts.const_data_ptr<int32_t>();
  const auto* first = seq_starts.const_data_ptr<int32_t>();
  const Strided to(workspace, 0);
  for (int64_t r = 0; r < seq_starts.size(0); ++r) {
    const int64_t rows = place[r + 1] - place[r];
    if (first[r] < 0) {
      throw std::invalid_argument("seq_starts must be at least 0, got " + std::to_string(first[r]));
    }
    if (rows == 0) continue;
    pages.table = block_table.const_data_ptr<int32_t>() + r * block_table.stride(0);
    check_table(pages.table, block_table.size(1), first[r] / pages.block_size,
                (first[r] + rows + pages.block_size - 1) / pages.block_size, cache.size(0), r);
    for_each_row(rows, threads, [&](int64_t i) {
      char* row = const_cast<char*>(to.at(place[r] + i));
      with_type(to.dtype, row, [&](const auto* typed) {
        using To = std::remove_cv_t<std::remove_pointer_t<decltype(typed)>>;
        convert_row(pages.dtype, pages.at(first[r] + i), reinterpret_cast<To*>(row), cache.size(2),
                    pages.scale);
      });
    });
  }
}

// out [T, H, V], lse [H, T].
void merge(const Tensor& prefix, const Tensor& prefix_lse, const Tensor& suffix,
           const Tensor& suffix_lse, const Tensor& out, const Tensor& lse, int threads) {
  const Merge merge{Strided(prefix, 0, 1), Strided(suffix, 0, 1), Strided(out, 0, 1), out.size(2)};
  const int64_t heads = out.size(1);
  const auto at = [](const Tensor& t, int64_t h, int64_t i) {
    return t.const_data_ptr<float>()[h * t.stride(0) + i * t.stride(1)];
  };
  for_each_row(out.size(0) * heads, threads, [&](int64_t i) {
    const int64_t token = i / heads, head = i % heads;
    lse.data_ptr<float>()[head * lse.stride(0) + token * lse.stride(1)] =
        merge(token, head, at(prefix_lse, head, token), at(suffix_lse, head, token));
  });
}

}  // namespace
}  // namespace mla

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("takes_bfloat16", &mla::takes_bfloat16);
  m.def("worst_bytes", &mla::worst_bytes);
  m.def("should_expand", &mla::should_expand);
  m.def("attention", &mla::attention);
  m.def("paged", &mla::paged);
  m.def("prefill", &mla::prefill);
  m.def("update_cache", &mla::update_cache);
  m.def("gather", &mla::gather);
  m.def("merge", &mla::merge);
}
