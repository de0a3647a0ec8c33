// Paged attention of single tokens on a CPU, called by XLA (jax.ffi). XLA would copy every page into a buffer, convert it and
// multiply it in tiles too small for its matrix kernels; here each key and value is read once, where it lies.
//
// One item of work is one token and one KV head, computed by one thread in the order of the keys: a token's bits depend on
// nothing else that is in the step. The threads are XLA's own.

#include <cmath>

#include "share.h"

// The model's: query heads of a KV head, and elements of a head.
#ifndef JAXSERVE_GROUP
#error "JAXSERVE_GROUP and JAXSERVE_HEAD_DIM must be given"
#endif

namespace jaxserve {
namespace {

constexpr int kTile = 128;  // keys between two corrections of the running sums
constexpr int kGroup = JAXSERVE_GROUP, kHeadDim = JAXSERVE_HEAD_DIM;
constexpr int kTogether = 8;  // heads whose sums fit the registers
constexpr int kAhead = 2;     // pages of keys that are fetched before their use

// e^x for x <= 0 to 2e-7 of its value: 2^n by the exponent bits, 2^f by Taylor's series around 0.
inline float exp_of_negative(float x) {
  x = std::max(x, -87.0f) * 1.44269504f;
  float n = std::floor(x + 0.5f), f = (x - n) * 0.69314718f;
  float p = 1 + f * (1 + f * (1 / 2.f + f * (1 / 6.f + f * (1 / 24.f + f * (1 / 120.f + f * (1 / 720.f))))));
  return p * as_float(static_cast<uint32_t>(static_cast<int32_t>(n) + 127) << 23);
}

struct Sizes {
  int64_t kv_heads, page, entries;  // entries: of a row of the page table
};

// Query heads q [G, H], scaled, of one KV head over keys low .. at. `pages` are the sequence's, counted from the layer's
// `first`. Writes out [G, H].
template <int G, int H, typename T>
void attend(const float* q, const T* pool, const int32_t* pages, int32_t first, int64_t head, const Sizes& z, int low, int at,
            float* out) {
  float sum[G][H] = {}, top[G], norm[G] = {};
  float score[G][kTile];
  std::fill(top, top + G, -1e30f);
  auto at_page = [&](int64_t i, int part) {
    return pool + (((first + int64_t{pages[i]}) * 2 + part) * z.kv_heads + head) * z.page * H;
  };
  // Pages lie anywhere, so the processor does not guess which comes next.
  auto fetch = [&](int64_t i, int part) {
    if (i * z.page > at) return;
    auto line = reinterpret_cast<const char*>(at_page(i, part));
    for (int64_t byte = 0; byte < z.page * H * int64_t{sizeof(T)}; byte += 64) __builtin_prefetch(line + byte);
  };
  // Calls run(row, c) for the keys from .. to - 1, each the c-th of the tile.
  auto rows = [&](int part, int from, int to, auto run) {
    for (int key = from; key < to;) {
      int64_t page = key / z.page, offset = key % z.page;
      if (part == 0) {
        fetch(page + kAhead, 0);
        fetch(page, 1);
      }
      int end = std::min<int64_t>(to, key - offset + z.page);
      const T* row = at_page(page, part) + offset * H;
      for (; key < end; ++key, row += H) run(row, key - from);
    }
  };
  for (int begin = low / kTile * kTile; begin <= at; begin += kTile) {
    int from = std::max(begin, low), to = std::min(begin + kTile, at + 1);
    rows(0, from, to, [&](const T* k, int c) {
      float dot[G] = {};
      for (int h = 0; h < H; ++h) {
        float x = widen(k[h]);
        for (int g = 0; g < G; ++g) dot[g] += q[g * H + h] * x;
      }
      for (int g = 0; g < G; ++g) score[g][c] = dot[g];
    });
    int n = to - from;
    for (int g = 0; g < G; ++g) {
      float best = top[g], total = 0;
      for (int c = 0; c < n; ++c) best = std::max(best, score[g][c]);
      for (int c = 0; c < n; ++c) total += score[g][c] = exp_of_negative(score[g][c] - best);
      float shrink = exp_of_negative(top[g] - best);
      top[g] = best;
      norm[g] = norm[g] * shrink + total;
      for (int h = 0; h < H; ++h) sum[g][h] *= shrink;
    }
    rows(1, from, to, [&](const T* v, int c) {
      for (int h = 0; h < H; ++h) {
        float x = widen(v[h]);
        for (int g = 0; g < G; ++g) sum[g][h] += score[g][c] * x;
      }
    });
  }
  for (int g = 0; g < G; ++g)
    for (int h = 0; h < H; ++h) out[g * H + h] = sum[g][h] / norm[g];
}

template <int G = kGroup, typename T>
void attend_group(const float* q, const T* pool, const int32_t* pages, int32_t first, int64_t head, const Sizes& z, int low,
                  int at, float* out) {
  constexpr int some = std::min(G, kTogether);
  attend<some, kHeadDim>(q, pool, pages, first, head, z, low, at, out);
  if constexpr (G > some)
    attend_group<G - some>(q + some * kHeadDim, pool, pages, first, head, z, low, at, out + some * kHeadDim);
}

ffi::Error Attend(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> q, ffi::AnyBuffer kv, ffi::Buffer<ffi::S32> table,
                  ffi::Buffer<ffi::S32> row, ffi::Buffer<ffi::S32> at, ffi::Buffer<ffi::S32> where,
                  ffi::ResultBuffer<ffi::F32> out) {
  auto shape = kv.dimensions();
  Sizes z{shape[2], shape[3], table.dimensions()[1]};
  if (shape[4] != kHeadDim || q.dimensions()[1] != z.kv_heads * kGroup)
    return ffi::Error::InvalidArgument("compiled for other heads");
  int32_t first = where.typed_data()[0], window = where.typed_data()[1];
  auto go = [&](auto* pages) {
    share(pool, q.dimensions()[0] * z.kv_heads,
          [=, q = q.typed_data(), table = table.typed_data(), row = row.typed_data(), at = at.typed_data(),
           out = out->typed_data()](int64_t item) {
            int64_t t = item / z.kv_heads, head = item % z.kv_heads, place = item * kGroup * kHeadDim;
            if (at[t] < 0) return;
            int low = window > 0 ? std::max(at[t] - window + 1, 0) : 0;
            attend_group(q + place, pages, table + row[t] * z.entries, first, head, z, low, at[t], out + place);
          });
    return ffi::Error::Success();
  };
  if (kv.element_type() == ffi::F32) return go(static_cast<const float*>(kv.untyped_data()));
  if (kv.element_type() == ffi::BF16) return go(static_cast<const uint16_t*>(kv.untyped_data()));
  return ffi::Error::InvalidArgument("the pool must be float32 or bfloat16");
}

}  // namespace
}  // namespace jaxserve

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_attend, jaxserve::Attend,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()  // q [T, N, H], scaled
                                  .Arg<xla::ffi::AnyBuffer>()         // kv [pages, 2, K, page, H]
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()  // table [S, P]
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()  // row [T]: of the table
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()  // at [T]: position; below 0: nothing to do
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()  // first page of the layer; window, 0: none
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>());
