// Paged attention on a CPU, called by XLA (jax.ffi). XLA would copy every page into a buffer, convert it and multiply it in
// tiles too small for its matrix kernels; here each key and value is read where it lies.
//
// One item of work is one token, or 16 tokens of one chunk, and one KV head, computed by one thread. Both ways do the same
// additions in the same order, so a token's bits depend on nothing else that is in the step. The threads are XLA's own.

#include <vector>

#include "share.h"

// The model's: query heads of a KV head, and elements of a head.
#ifndef JAXSERVE_GROUP
#error "JAXSERVE_GROUP and JAXSERVE_HEAD_DIM must be given"
#endif

namespace jaxserve {
namespace {

constexpr int kTile = 128;  // keys between two corrections of the running sums
constexpr int kGroup = JAXSERVE_GROUP, kHeadDim = JAXSERVE_HEAD_DIM;
constexpr int kParts = (kHeadDim + kLanes - 1) / kLanes;                // vectors of a head
constexpr int kTogether = std::min(std::max(24 / kParts, 1), kLanes);  // heads of one token whose sums fit the registers
constexpr int kAhead = 32;  // keys that are fetched before their use
constexpr int kAlone = 4;  // tokens of a chunk that are computed one by one, others kLanes side by side
constexpr int kStrip = 8;  // keys, or elements of values, whose sums fit the registers for kBeside heads
constexpr int kBeside = kGroup % 3 == 0 ? 3 : kGroup % 2 == 0 ? 2 : 1;
constexpr float kNothing = -1e30f;  // the score of what is not seen

// Where a sequence's keys and values are, for one KV head.
template <typename T>
struct Pages {
  T* pool;               // [pages, 2, K, page, H]
  const int32_t* table;  // of the sequence
  int64_t first;         // page of the layer
  int64_t heads, head, size;

  T* at(int64_t i, int part) const { return pool + (((first + table[i]) * 2 + part) * heads + head) * size * kHeadDim; }

  // Pointers to the keys (part 0) or values (1) from .. to - 1.
  void rows(int part, int from, int to, const T** row) const {
    for (int key = from; key < to;) {
      int64_t page = key / size, offset = key % size;
      int end = std::min<int64_t>(to, key - offset + size);
      const T* place = at(page, part) + offset * kHeadDim;
      for (; key < end; ++key, place += kHeadDim) *row++ = place;
    }
  }
};

// The arithmetic of a token and a head, whichever way it is computed: a key's product is added element by element, a tile's
// weights in kLanes parts, a value's element key by key.

// Element e of the words that lie in the lanes.
inline Floats element(const Ints& words, const float*, int) { return reinterpret_cast<Floats>(words); }
inline Floats element(const Ints& words, const uint16_t*, int e) {
  return reinterpret_cast<Floats>(e ? words & static_cast<int32_t>(0xFFFF0000) : words << 16);
}

// Pages lie anywhere, so the processor does not guess which row comes next.
template <typename T>
void fetch(const T* row) {
  for (int i = 0; i < kHeadDim; i += 64 / sizeof(T)) __builtin_prefetch(row + i);
}

// Products of queries [G, H] with kLanes keys.
template <int G, typename T>
void multiply(const float (&q)[G][kHeadDim], const T* const* row, Floats (&dot)[G]) {
  constexpr int kEach = 4 / sizeof(T), kWords = kHeadDim / kEach;
#pragma GCC unroll 8
  for (int k = 0; k < kWords; k += kLanes) {
    Ints word[kLanes] = {};
    for (int i = 0; i < kLanes; ++i) std::memcpy(&word[i], row[i] + k * kEach, 4 * std::min(kLanes, kWords - k));
    transpose(word);
#pragma GCC unroll 16
    for (int i = 0; i < std::min(kLanes, kWords - k); ++i)
      for (int e = 0; e < kEach; ++e) {
        Floats key = element(word[i], row[0], e);
        for (int g = 0; g < G; ++g) dot[g] = multiply_add(q[g][(k + i) * kEach + e], key, dot[g]);
      }
  }
}

// Query heads [G, H] of one token at `at` over the keys low .. at. Scores have kLanes keys side by side.
template <int G, typename T>
void attend_alone(const T* query, const Pages<T>& pages, float scale, int low, int at, T* out) {
  constexpr int H = kHeadDim, kLast = H - (kParts - 1) * kLanes;
  float q[G][H];
  Floats sum[G][kParts] = {}, score[G][kTile / kLanes];
  Floats top = Floats{} + kNothing, norm = {};  // of head g in lane g
  const T *key[kTile + kAhead], *value[kTile];
  for (int g = 0; g < G; ++g)
    for (int h = 0; h < H; ++h) q[g][h] = widen(query[g * H + h]) * scale;
  for (int begin = low / kTile * kTile; begin <= at; begin += kTile) {
    int from = std::max(low - begin, 0), to = std::min(kTile, at + 1 - begin), n = (to + kLanes - 1) / kLanes;
    int more = std::min(to + kAhead, at + 1 - begin);
    pages.rows(0, begin + from, begin + more, key + from);
    pages.rows(1, begin + from, begin + to, value + from);
    std::fill(key, key + from, key[from]);
    std::fill(key + more, key + n * kLanes + kAhead, key[from]);
    std::fill(value, value + from, value[from]);
    std::fill(value + to, value + n * kLanes, value[from]);
    Floats best = top, total = {};
    for (int c = 0; c < n; ++c) {
      Floats dot[G] = {};
      for (int i = c * kLanes; i < (c + 1) * kLanes; ++i) {
        fetch(key[i + kAhead]);
        fetch(value[i]);
      }
      multiply(q, key + c * kLanes, dot);
      Ints place = Ints{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} + c * kLanes;
      for (int g = 0; g < G; ++g) {
        score[g][c] = (place >= from) & (place < to) ? dot[g] : Floats{} + kNothing;
        for (int i = 0; i < kLanes; ++i) best[g] = std::max(best[g], score[g][c][i]);
      }
    }
    for (int g = 0; g < G; ++g) {
      Floats parts = {};
      for (int c = 0; c < n; ++c) {
        Floats p = exp_of_negative(score[g][c] - best[g]);
        parts += score[g][c] = score[g][c] > kNothing ? p : Floats{};
      }
      total[g] = jaxserve::total(parts);
    }
    Floats shrink = exp_of_negative(top - best), add[G][kParts] = {};
    top = best;
    norm = multiply_add(norm, shrink, total);
    for (int c = from; c < to; ++c) {
      Floats v[kParts];
      for (int i = 0; i < kParts - 1; ++i) v[i] = load(value[c] + i * kLanes);
      v[kParts - 1] = load<kLast>(value[c] + H - kLast);
      for (int g = 0; g < G; ++g)
        for (int i = 0; i < kParts; ++i) add[g][i] = multiply_add(score[g][c / kLanes][c % kLanes], v[i], add[g][i]);
    }
    for (int g = 0; g < G; ++g)
      for (int i = 0; i < kParts; ++i) sum[g][i] = multiply_add(shrink[g], sum[g][i], add[g][i]);
  }
  for (int g = 0; g < G; ++g)
    for (int h = 0; h < H; ++h) narrow(sum[g][h / kLanes][h % kLanes] / norm[g], out + g * H + h);
}

template <int G = kGroup, typename T>
void attend_heads(const T* query, const Pages<T>& pages, float scale, int low, int at, T* out) {
  constexpr int some = std::min(G, kTogether);
  attend_alone<some>(query, pages, scale, low, at, out);
  if constexpr (G > some)
    attend_heads<G - some>(query + some * kHeadDim, pages, scale, low, at, out + some * kHeadDim);
}

// kBeside query heads of `count` tokens, which lie `stride` elements apart; the first is at `at`. Each lane is a token.
template <typename T>
void attend_beside(const T* query, const Pages<T>& pages, float scale, int window, int at, int count, int64_t stride, T* out) {
  constexpr int H = kHeadDim, G = kBeside;
  Floats q[G][H], sum[G][H] = {}, top[G], norm[G] = {}, score[G][kTile];
  float keys[kTile][H], values[kTile][H];
  Ints position, low;
  for (int t = 0; t < kLanes; ++t) {
    position[t] = t < count ? at + t : -1;
    low[t] = window > 0 ? at + t - window + 1 : 0;
    for (int g = 0; g < G; ++g)
      for (int h = 0; h < H; ++h) q[g][h][t] = t < count ? widen(query[t * stride + g * H + h]) * scale : 0;
  }
  for (int g = 0; g < G; ++g) top[g] = Floats{} + kNothing;
  int lowest = std::max(low[0], 0), last = at + count - 1;
  for (int begin = lowest / kTile * kTile; begin <= last; begin += kTile) {
    int from = std::max(lowest - begin, 0), to = std::min(kTile, last + 1 - begin), n = (to + kLanes - 1) / kLanes * kLanes;
    auto put = [&](float (&tile)[kTile][H], int part) {
      const T* row[kTile];
      pages.rows(part, begin + from, begin + to, row);
      for (int c = from; c < to; ++c)
        for (int h = 0; h < H; ++h) tile[c][h] = widen(row[c - from][h]);
      std::fill(tile[0], tile[from], 0.0f);
      std::fill(tile[to], tile[n], 0.0f);
    };
    put(keys, 0);
    put(values, 1);
    for (int c = 0; c < n; c += kStrip) {
      Floats dot[G][kStrip] = {};
      for (int h = 0; h < H; ++h)
#pragma GCC unroll 8
        for (int i = 0; i < kStrip; ++i)
#pragma GCC unroll 4
          for (int g = 0; g < G; ++g) dot[g][i] = multiply_add(keys[c + i][h], q[g][h], dot[g][i]);
      for (int i = 0; i < kStrip; ++i) {
        Ints key = Ints{} + (begin + c + i);
        for (int g = 0; g < G; ++g) score[g][c + i] = (key <= position) & (key >= low) ? dot[g][i] : Floats{} + kNothing;
      }
    }
    Floats shrink[G];
    for (int g = 0; g < G; ++g) {
      Floats best = top[g], parts[kLanes] = {};
      for (int c = 0; c < n; ++c) best = best > score[g][c] ? best : score[g][c];
      for (int c = 0; c < n; ++c) {
        Floats p = exp_of_negative(score[g][c] - best);
        parts[c % kLanes] += score[g][c] = score[g][c] > kNothing ? p : Floats{};
      }
      for (int some = kLanes / 2; some > 0; some /= 2)
        for (int i = 0; i < some; ++i) parts[i] += parts[i + some];
      shrink[g] = exp_of_negative(top[g] - best);
      top[g] = best;
      norm[g] = multiply_add(norm[g], shrink[g], parts[0]);
    }
    for (int h = 0; h < H; h += kStrip) {
      Floats add[G][kStrip] = {};
      for (int c = 0; c < n; ++c)
#pragma GCC unroll 8
        for (int i = 0; i < kStrip; ++i)
#pragma GCC unroll 4
          for (int g = 0; g < G; ++g) add[g][i] = multiply_add(values[c][h + i], score[g][c], add[g][i]);
      for (int i = 0; i < kStrip; ++i)
        for (int g = 0; g < G; ++g) sum[g][h + i] = multiply_add(sum[g][h + i], shrink[g], add[g][i]);
    }
  }
  for (int t = 0; t < count; ++t)
    for (int g = 0; g < G; ++g)
      for (int h = 0; h < H; ++h) narrow(sum[g][h][t] / norm[g][t], out + t * stride + g * H + h);
}

struct Step {
  int64_t tokens, chunks, kv_heads, page, entries;  // entries: of a row of the page table
  const int32_t *table, *starts, *counts, *lengths, *slots;
  int64_t first;  // page of the layer
  int window;     // 0: none
  float scale;
};

struct Item {
  int32_t chunk, offset, count;  // tokens of the chunk
};

std::vector<Item> items(const Step& z) {
  std::vector<Item> found;
  for (int s = 0; s < z.chunks; ++s) {
    int together = z.counts[s] <= kAlone ? 1 : kLanes;
    for (int i = 0; i < z.counts[s]; i += together) found.push_back({s, i, std::min(together, z.counts[s] - i)});
  }
  return found;
}

template <typename T>
ffi::Error attend(ffi::ThreadPool& pool, const Step& z, const T* q, const T* k, const T* v, T* kv, T* out) {
  constexpr int H = kHeadDim;
  int64_t wide = z.kv_heads * H;
  for (int64_t t = 0; t < z.tokens; ++t) {
    if (z.slots[t] == INT32_MAX) {
      std::fill_n(out + t * wide * kGroup, wide * kGroup, T{});
      continue;
    }
    int32_t page = z.slots[t] / z.page, offset = z.slots[t] % z.page;
    for (int64_t head = 0; head < z.kv_heads; ++head) {
      Pages<T> pages{kv, &page, z.first, z.kv_heads, head, z.page};
      std::copy_n(k + t * wide + head * H, H, pages.at(0, 0) + offset * H);
      std::copy_n(v + t * wide + head * H, H, pages.at(0, 1) + offset * H);
    }
  }
  auto list = std::make_shared<std::vector<Item>>(items(z));
  share(pool, list->size() * z.kv_heads, [=](int64_t i) {
    auto [s, offset, count] = (*list)[i / z.kv_heads];
    int64_t head = i % z.kv_heads, place = (z.starts[s] + offset) * wide * kGroup + head * kGroup * H;
    Pages<T> pages{kv, z.table + s * z.entries, z.first, z.kv_heads, head, z.page};
    int at = z.lengths[s] - z.counts[s] + offset, low = z.window > 0 ? std::max(at - z.window + 1, 0) : 0;
    if (count == 1) return attend_heads(q + place, pages, z.scale, low, at, out + place);
    for (int g = 0; g < kGroup * H; g += kBeside * H)
      attend_beside(q + place + g, pages, z.scale, z.window, at, count, wide * kGroup, out + place + g);
  });
  return ffi::Error::Success();
}

using Ids = ffi::Buffer<ffi::S32>;

ffi::Error Attend(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v, ffi::AnyBuffer kv, Ids table,
                  Ids starts, Ids counts, Ids lengths, Ids slots, Ids where, ffi::Result<ffi::AnyBuffer> out,
                  ffi::Result<ffi::AnyBuffer> kv_out, float scale) {
  auto shape = kv.dimensions();
  if (shape[4] != kHeadDim || q.dimensions()[1] != shape[2] * kGroup)
    return ffi::Error::InvalidArgument("compiled for other heads");
  if (kv_out->untyped_data() != kv.untyped_data()) return ffi::Error::InvalidArgument("the pool must be changed in place");
  auto type = kv.element_type();
  if (q.element_type() != type || k.element_type() != type || v.element_type() != type)
    return ffi::Error::InvalidArgument("q, k, v and the pool must be of one type");
  Step z{.tokens = q.dimensions()[0],
         .chunks = table.dimensions()[0],
         .kv_heads = shape[2],
         .page = shape[3],
         .entries = table.dimensions()[1],
         .table = table.typed_data(),
         .starts = starts.typed_data(),
         .counts = counts.typed_data(),
         .lengths = lengths.typed_data(),
         .slots = slots.typed_data(),
         .first = where.typed_data()[0],
         .window = where.typed_data()[1],
         .scale = scale};
  auto go = [&](auto* kv) {
    using T = std::remove_pointer_t<decltype(kv)>;
    auto data = [](auto& buffer) { return static_cast<const T*>(buffer.untyped_data()); };
    return attend(pool, z, data(q), data(k), data(v), kv, static_cast<T*>(out->untyped_data()));
  };
  if (type == ffi::F32) return go(static_cast<float*>(kv_out->untyped_data()));
  if (type == ffi::BF16) return go(static_cast<uint16_t*>(kv_out->untyped_data()));
  return ffi::Error::InvalidArgument("the pool must be float32 or bfloat16");
}

}  // namespace
}  // namespace jaxserve

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_attend, jaxserve::Attend,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()  // q [T, N, H]
                                  .Arg<xla::ffi::AnyBuffer>()  // k [T, K, H]
                                  .Arg<xla::ffi::AnyBuffer>()  // v [T, K, H]
                                  .Arg<xla::ffi::AnyBuffer>()  // kv [pages, 2, K, page, H]
                                  .Arg<jaxserve::Ids>()        // table [S, P]
                                  .Arg<jaxserve::Ids>()        // starts [S]: first token of the chunk
                                  .Arg<jaxserve::Ids>()        // counts [S]: its tokens
                                  .Arg<jaxserve::Ids>()        // lengths [S]: of the sequence, to the chunk's end
                                  .Arg<jaxserve::Ids>()        // slots [T]: page * size + offset; INT32_MAX: of no chunk
                                  .Arg<jaxserve::Ids>()        // first page of the layer; window, 0: none
                                  .Ret<xla::ffi::AnyBuffer>()  // [T, N, H]
                                  .Ret<xla::ffi::AnyBuffer>()  // kv itself
                                  .Attr<float>("scale"));
