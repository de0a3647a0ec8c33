// x [T, D] times the transpose of w [N, D] on a CPU, called by XLA (jax.ffi): float32, bfloat16, or int8 with scales. Sums are
// float32, those of int8 int32.
//
// The weights are read where they lie: one layer of a stack that is never copied, in the order of the file. Every sum runs
// over D in the same order whatever T is: a row's bits do not depend on the other rows. Gated, w has 2N rows, and the result is
// silu of N of them times the N others. Zeros at the end of x, which are a step's padding, cost nothing.
//
// All is counted in words of 32 bits: one float32, two bfloat16 or four int8. x is packed so that a vector holds the same word
// of 16 rows. With AVX-512 a word of w is multiplied with such vectors; with AMX the tiles of w are the left operand as they
// are, and the vectors of x the right one. Without both few rows are multiplied by plain loops.

#include <type_traits>

#include "share.h"

#if defined(__AVX512BF16__) && defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define JAXSERVE_VECTORS
#include <immintrin.h>
#endif
#if defined(JAXSERVE_VECTORS) && defined(__AMX_BF16__) && defined(__AMX_INT8__)
#define JAXSERVE_TILES
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace jaxserve {
namespace {

struct Shape {
  int64_t rows, depth, out;  // T, D in words, N
  bool gated;
  const float* scales = nullptr;  // of int8: of each row of w
  float* x_scales = nullptr;      // and of x, up to a multiple of 16 rows
};

#ifdef JAXSERVE_VECTORS

constexpr int kSide = kLanes;  // words of a vector
constexpr int kMost = 3;       // vectors of rows of x that are multiplied together

constexpr int kFew = 4;        // rows of x for which the words of w are turned

struct alignas(64) Sums {
  uint32_t of[kSide][kSide];  // [row of w, row of x]
};

// Turns words of 16 rows. Returns whether any is not zero.
bool turn(Ints (&row)[kSide], uint32_t* to) {
  Ints bits = {};
  for (const Ints& some : row) bits |= some;
  transpose(row);
  std::memcpy(to, row, sizeof row);
  int32_t any = 0;
  for (int i = 0; i < kSide; ++i) any |= bits[i];
  return any;
}

// Rows 16 t .. 16 t + 15 of x, word by word: each vector holds one word of all of them. Missing rows are zero. Returns whether
// any is not.
bool pack(const uint32_t* x, const Shape& z, int64_t t, uint32_t* to) {
  int rows = std::min<int64_t>(kSide, z.rows - t * kSide);
  const uint32_t* from = x + t * kSide * z.depth;
  bool any = false;
  for (int64_t k = 0; k < z.depth; k += kSide, to += kSide * kSide) {
    Ints row[kSide] = {};
    for (int i = 0; i < rows; ++i) std::memcpy(&row[i], from + i * z.depth + k, sizeof(Ints));
    any |= turn(row, to);
  }
  return any;
}

// The same of numbers that become int8: each row is divided by its scale, 1/127 of its largest number.
template <typename In>
bool pack_int8(const In* x, const Shape& z, int64_t t, uint32_t* to) {
  int rows = std::min<int64_t>(kSide, z.rows - t * kSide);
  int64_t depth = z.depth * 4;
  const In* from = x + t * kSide * depth;
  float* scale = z.x_scales + t * kSide;
  std::fill(scale, scale + kSide, 1.0f);
  for (int i = 0; i < rows; ++i) {
    __m512i largest = _mm512_setzero_si512();  // as integers, of which those that are not finite are the largest
    for (int64_t k = 0; k < depth; k += kLanes)
      largest = _mm512_max_epi32(largest, _mm512_castps_si512(_mm512_abs_ps(load(from + i * depth + k))));
    if (int32_t most = _mm512_reduce_max_epi32(largest)) scale[i] = as_float(most) / 127;
  }
  bool any = false;
  for (int64_t k = 0; k < z.depth; k += kSide, to += kSide * kSide) {
    Ints row[kSide] = {};
    for (int i = 0; i < rows; ++i)
      for (int part = 0; part < 4; ++part) {
        __m512 x = load(from + i * depth + k * 4 + part * kLanes) / scale[i];
        __m128i narrow = _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(x));
        std::memcpy(reinterpret_cast<char*>(&row[i]) + part * kLanes, &narrow, sizeof narrow);
      }
    any |= turn(row, to);
  }
  return any;
}

void put(const Ints& x, float* to) { std::memcpy(to, &x, sizeof x); }
void put(const Ints& x, uint16_t* to) {
  auto narrow = _mm512_cvtneps_pbh(reinterpret_cast<__m512>(x));
  std::memcpy(to, &narrow, sizeof narrow);
}

// Sums into y [T, N] from row t and column n on.
template <typename Out>
void store(const Sums& sums, int64_t n, int64_t t, const Shape& z, Out* y) {
  Ints row[kSide];
  std::memcpy(row, sums.of, sizeof row);
  transpose(row);
  int64_t rows = std::min<int64_t>(kSide, z.rows - t);
  for (int64_t i = 0; i < rows; ++i) put(row[i], y + (t + i) * z.out + n);
}

// What 128 too much in each element of x adds to the sum of a row of w.
int32_t excess(const uint32_t* w, int64_t depth) {
  __m512i sum = _mm512_setzero_si512(), x = _mm512_set1_epi8(-128);
  for (int64_t k = 0; k < depth; k += kSide) sum = _mm512_dpbusd_epi32(sum, x, _mm512_loadu_si512(w + k));
  return _mm512_reduce_add_epi32(sum);
}

// Of each type: what x becomes when it is loaded, and how a word is multiplied and added in every lane.
struct Float32 {
  static constexpr bool kInt8 = false;
  using Sum = __m512;
  static __m512i from(__m512i x) { return x; }
  static Sum add(Sum sum, __m512i x, __m512i w) { return _mm512_fmadd_ps(_mm512_castsi512_ps(x), _mm512_castsi512_ps(w), sum); }
};
struct Bfloat16 : Float32 {
  static Sum add(Sum sum, __m512i x, __m512i w) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(x), reinterpret_cast<__m512bh>(w));
  }
};
struct Int8 {  // the processor multiplies bytes without a sign by bytes with one: 128 is added to x
  static constexpr bool kInt8 = true;
  using Sum = __m512i;
  static __m512i from(__m512i x) { return _mm512_xor_si512(x, _mm512_set1_epi8(-128)); }
  static Sum add(Sum sum, __m512i x, __m512i w) { return _mm512_dpbusd_epi32(sum, x, w); }
  // Takes what that adds out of the sums of R rows of w. If the last lane is of no row, it holds just that.
  template <int R>
  static void correct(Sum (&sum)[R], const uint32_t* w, int64_t depth, bool spare, const Sum (&last)[R]) {
    for (int r = 0; r < R; ++r) {
      int32_t more = spare ? reinterpret_cast<const Ints&>(last[r])[kSide - 1] : excess(w + r * depth, depth);
      sum[r] = _mm512_sub_epi32(sum[r], _mm512_set1_epi32(more));
    }
  }
};

// The rows of w that one thread takes: 16 from `first` on, and 16 from `second` on unless that is below 0, for columns of y
// from `out` on. The two rows that a gate joins are N apart, those of int8 beside each other.
struct Block {
  int64_t first, second, out;
};
int64_t blocks(const Shape& z) { return z.gated ? z.out / kSide : (z.out / kSide + 1) / 2; }
template <typename Type>
Block block_at(int64_t i, const Shape& z) {
  if (z.gated && !Type::kInt8) return {i * kSide, z.out + i * kSide, i * kSide};
  int64_t first = 2 * i * kSide, second = first + kSide;
  if (z.gated) return {first, second, i * kSide};
  return {first, second < z.out ? second : -1, first};
}

// The sums of a block, [16 of w, 16 of x] twice.
template <typename Type, typename Out>
void store(Sums& first, Sums& second, const Block& b, int64_t t, const Shape& z, Out* y) {
  auto floats = [](Sums& sums, int i) -> Floats& { return reinterpret_cast<Floats&>(sums.of[i]); };
  if constexpr (Type::kInt8)
    for (int part = 0; part < (b.second < 0 ? 1 : 2); ++part)
      for (int i = 0; i < kSide; ++i) {
        Floats& sum = floats(part ? second : first, i);
        Floats scale = load(z.x_scales + t) * z.scales[(part ? b.second : b.first) + i];
        sum = __builtin_convertvector(reinterpret_cast<Ints>(sum), Floats) * scale;
      }
  if (z.gated) {
    Sums joined;
    for (int i = 0; i < kSide; ++i) {
      Sums& part = i < kSide / 2 ? first : second;
      int pair = i % (kSide / 2) * 2;
      floats(joined, i) = Type::kInt8 ? silu(floats(part, pair)) * floats(part, pair + 1) : silu(floats(first, i)) * floats(second, i);
    }
    return store(joined, b.out, t, z, y);
  }
  store(first, b.out, t, z, y);
  if (b.second >= 0) store(second, b.out + kSide, t, z, y);
}

// R rows of w by M vectors of rows of x.
template <typename Type, int M, int R>
void add_rows(const uint32_t* x, const uint32_t* w, int64_t depth, bool spare, Sums* to, int first) {
  typename Type::Sum sum[M][R] = {};
  for (int64_t k = 0; k < depth; k += kSide) {
    for (int r = 0; r < R; ++r) __builtin_prefetch(w + (r + R) * depth + k);
#pragma GCC unroll 4
    for (int i = 0; i < kSide; ++i) {
      __m512i left[M];
      for (int m = 0; m < M; ++m) left[m] = Type::from(_mm512_load_si512(x + (m * depth + k + i) * kSide));
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        __m512i right = _mm512_set1_epi32(w[r * depth + k + i]);
#pragma GCC unroll 4
        for (int m = 0; m < M; ++m) sum[m][r] = Type::add(sum[m][r], left[m], right);
      }
    }
  }
  if constexpr (Type::kInt8)
    for (int m = 0; m < M; ++m) Type::correct(sum[m], w, depth, spare, sum[M - 1]);
  for (int r = 0; r < R; ++r)
    for (int m = 0; m < M; ++m) std::memcpy(to[m].of[first + r], &sum[m][r], sizeof sum[m][r]);
}

// 16 rows of w by M vectors of rows of x.
template <typename Type, int M>
void add(const uint32_t* x, const uint32_t* w, int64_t depth, bool spare, Sums* to) {
  constexpr int kRows = M == 1 ? kSide : kSide / 2;  // whose sums fit the registers
  for (int i = 0; i < kSide; i += kRows) add_rows<Type, M, kRows>(x, w + i * depth, depth, spare, to, i);
}

// The same for few rows of x, of which the first lanes of a vector have one each: here the words of w are turned, so that one
// word of x is multiplied with 16 rows of w at a time. That takes a fraction of the loads.
template <typename Type, int T = kFew>
void add_few(const uint32_t* x, const uint32_t* w, int64_t rows, int64_t depth, Sums& to) {
  if constexpr (T > 1)
    if (rows < T) return add_few<Type, T - 1>(x, w, rows, depth, to);
  constexpr int kSums = T + Type::kInt8;  // and what is to be taken out of them, by the last lane, which is of no row
  typename Type::Sum sum[kSums] = {};
  for (int64_t k = 0; k < depth; k += kSide) {
    Ints word[kSide];
#pragma GCC unroll 16
    for (int r = 0; r < kSide; ++r) {
      __builtin_prefetch(w + (r + kSide) * depth + k);
      std::memcpy(&word[r], w + r * depth + k, sizeof(Ints));
    }
    transpose(word);
#pragma GCC unroll 16
    for (int i = 0; i < kSide; ++i)
#pragma GCC unroll 16
      for (int t = 0; t < kSums; ++t) {
        __m512i left = Type::from(_mm512_set1_epi32(x[(k + i) * kSide + (t < T ? t : kSide - 1)]));
        sum[t] = Type::add(sum[t], left, reinterpret_cast<__m512i>(word[i]));
      }
  }
  Ints row[kSide] = {};
  for (int t = 0; t < T; ++t) {
    if constexpr (Type::kInt8) sum[t] = _mm512_sub_epi32(sum[t], sum[T]);
    std::memcpy(&row[t], &sum[t], sizeof(Ints));
  }
  transpose(row);
  std::memcpy(to.of, row, sizeof row);
}

template <typename Type, typename Out>
void vector_block(const uint32_t* x, const uint32_t* w, const Block& b, const Shape& z, Out* y) {
  Sums sums[2][kMost];
  int64_t tall = (z.rows + kSide - 1) / kSide;
  if (z.rows <= kFew) {
    add_few<Type>(x, w + b.first * z.depth, z.rows, z.depth, sums[0][0]);
    if (b.second >= 0) add_few<Type>(x, w + b.second * z.depth, z.rows, z.depth, sums[1][0]);
    return store<Type>(sums[0][0], sums[1][0], b, 0, z, y);
  }
  for (int64_t t = 0, m; t < tall; t += m) {
    m = tall - t == kMost + 1 ? 2 : std::min<int64_t>(kMost, tall - t);
    const uint32_t* left = x + t * kSide * z.depth;
    bool spare = t + m == tall && z.rows % kSide;
    for (int part = 0; part < (b.second < 0 ? 1 : 2); ++part) {
      const uint32_t* right = w + (part ? b.second : b.first) * z.depth;
      if (m == 1) add<Type, 1>(left, right, z.depth, spare, sums[part]);
      if (m == 2) add<Type, 2>(left, right, z.depth, spare, sums[part]);
      if (m == 3) add<Type, 3>(left, right, z.depth, spare, sums[part]);
    }
    for (int i = 0; i < m; ++i) store<Type>(sums[0][i], sums[1][i], b, (t + i) * kSide, z, y);
  }
}

#ifdef JAXSERVE_TILES

struct alignas(64) Layout {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

bool allowed() {
  constexpr int kRequest = 0x1023, kTileData = 18;  // arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)
  static const bool yes = syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
  return yes;
}

#define JAXSERVE_ADD(to, a, b)                  \
  if constexpr (Type::kInt8) {                  \
    _tile_dpbssd(to, a, b);                     \
  } else {                                      \
    _tile_dpbf16ps(to, a, b);                   \
  }

template <typename Type, typename Out>
void tile_block(const uint32_t* x, const uint32_t* w, const Block& b, const Shape& z, Out* y) {
  static const Layout layout;
  _tile_loadconfig(&layout);
  int64_t steps = z.depth / kSide, stride = z.depth * 4, size = z.depth * kSide;
  const uint32_t* upper = w + b.first * z.depth;
  const uint32_t* lower = b.second < 0 ? upper : w + b.second * z.depth;
  Sums sum[4];
  for (int64_t t = 0; t < z.rows; t += 2 * kSide) {
    const uint32_t* left = x + t / kSide * size;
    bool wide = t + kSide < z.rows;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t k = 0; k < steps; ++k) {
      _tile_loadd(4, upper + k * kSide, stride);
      _tile_loadd(5, lower + k * kSide, stride);
      _tile_loadd(6, left + k * kSide * kSide, 64);
      JAXSERVE_ADD(0, 4, 6)
      JAXSERVE_ADD(1, 5, 6)
      if (wide) {
        _tile_loadd(7, left + size + k * kSide * kSide, 64);
        JAXSERVE_ADD(2, 4, 7)
        JAXSERVE_ADD(3, 5, 7)
      }
    }
    _tile_stored(0, sum[0].of, 64);
    _tile_stored(1, sum[1].of, 64);
    _tile_stored(2, sum[2].of, 64);
    _tile_stored(3, sum[3].of, 64);
    store<Type>(sum[0], sum[1], b, t, z, y);
    if (wide) store<Type>(sum[2], sum[3], b, t + kSide, z, y);
  }
  _tile_release();
}

#endif

template <typename Type, typename Out>
void run(const uint32_t* x, const uint32_t* w, const Block& b, const Shape& z, Out* y) {
#ifdef JAXSERVE_TILES
  if constexpr (!std::is_same_v<Type, Float32>)
    if (allowed()) return tile_block<Type>(x, w, b, z, y);
#endif
  vector_block<Type>(x, w, b, z, y);
}

template <typename Type, typename In, typename Out>
ffi::Error multiply(ffi::ThreadPool& pool, const In* x, const uint32_t* w, Shape z, Out* y) {
  int64_t tall = (z.rows + kSide - 1) / kSide, size = z.depth * kSide;
  std::unique_ptr<uint32_t[]> memory(new uint32_t[tall * (size + kSide) + kSide]);
  uint32_t* packed = memory.get() + (64 - reinterpret_cast<uintptr_t>(memory.get()) % 64) % 64 / 4;
  z.x_scales = reinterpret_cast<float*>(packed + tall * size);
  std::atomic<int64_t> live{0};  // rows up to the last that is not zero
  share(pool, tall, [=, &live](int64_t t) {
    bool any;
    if constexpr (Type::kInt8)
      any = pack_int8(x, z, t, packed + t * size);
    else
      any = pack(reinterpret_cast<const uint32_t*>(x), z, t, packed + t * size);
    int64_t end = std::min((t + 1) * kSide, z.rows), most = live;
    while (any && most < end && !live.compare_exchange_weak(most, end)) continue;
  });
  std::fill(y + live * z.out, y + z.rows * z.out, Out{});
  z.rows = live;
  share(pool, blocks(z), [=](int64_t i) { run<Type>(packed, w, block_at<Type>(i, z), z, y); });
  return ffi::Error::Success();
}

#else

struct Float32 {};
struct Bfloat16 {};
struct Int8 {};

template <typename Type, typename In, typename Out>
ffi::Error multiply(ffi::ThreadPool& pool, const In* x, const uint32_t* w, const Shape& z, Out* y) {
  if constexpr (!std::is_same_v<Type, Bfloat16>) {
    return ffi::Error::InvalidArgument("only bfloat16 without AVX-512");
  } else {
    int64_t depth = z.depth * 2;
    auto sum = [=](int64_t t, int64_t n) {
      auto row = reinterpret_cast<const uint16_t*>(w) + n * depth;
      Floats sum = {};
      for (int64_t k = 0; k < depth; k += kLanes) sum = multiply_add(load(x + t * depth + k), load(row + k), sum);
      return total(sum);
    };
    share(pool, z.out / 16, [=](int64_t block) {
      for (int64_t n = block * 16; n < block * 16 + 16; ++n)
        for (int64_t t = 0; t < z.rows; ++t)
          narrow(z.gated ? silu(Floats{} + sum(t, n))[0] * sum(t, z.out + n) : sum(t, n), y + t * z.out + n);
    });
    return ffi::Error::Success();
  }
}

#endif

// Calls run(x, y) with pointers of their types: float32 or bfloat16.
template <typename F>
ffi::Error typed(const ffi::AnyBuffer& x, ffi::Result<ffi::AnyBuffer>& y, F run) {
  auto out = [&](auto* xs) {
    if (y->element_type() == ffi::F32) return run(xs, static_cast<float*>(y->untyped_data()));
    if (y->element_type() == ffi::BF16) return run(xs, static_cast<uint16_t*>(y->untyped_data()));
    return ffi::Error::InvalidArgument("the result must be float32 or bfloat16");
  };
  if (x.element_type() == ffi::F32) return out(static_cast<const float*>(x.untyped_data()));
  if (x.element_type() == ffi::BF16) return out(static_cast<const uint16_t*>(x.untyped_data()));
  return ffi::Error::InvalidArgument("x must be float32 or bfloat16");
}

// Calls run(w, z) with the layer's weights.
template <typename F>
ffi::Error shaped(const ffi::AnyBuffer& x, const ffi::AnyBuffer& w, int64_t bytes, int32_t layer, bool gated, F run) {
  auto dims = w.dimensions();
  Shape z{x.dimensions()[0], dims[2] * bytes / 4, gated ? dims[1] / 2 : dims[1], gated};
  if (z.out % 16 || z.depth % 16 || dims[2] * bytes % 4)
    return ffi::Error::InvalidArgument("N must be a multiple of 16, a row of w one of 64 bytes");
  return run(static_cast<const uint32_t*>(w.untyped_data()) + layer * dims[1] * z.depth, z);
}

ffi::Error Multiply(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer w, ffi::Buffer<ffi::S32> layer,
                    ffi::Result<ffi::AnyBuffer> y, bool gated) {
  if (x.element_type() != w.element_type()) return ffi::Error::InvalidArgument("x and w must be of one type");
  int64_t bytes = x.element_type() == ffi::F32 ? 4 : 2;
  return shaped(x, w, bytes, layer.typed_data()[0], gated, [&](const uint32_t* from, const Shape& z) {
    return typed(x, y, [&](auto* xs, auto* ys) {
      using In = std::remove_cv_t<std::remove_pointer_t<decltype(xs)>>;
      return multiply<std::conditional_t<std::is_same_v<In, float>, Float32, Bfloat16>>(pool, xs, from, z, ys);
    });
  });
}

ffi::Error MultiplyInt8(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer w, ffi::Buffer<ffi::F32> scales,
                        ffi::Buffer<ffi::S32> layer, ffi::Result<ffi::AnyBuffer> y, bool gated) {
  if (w.element_type() != ffi::S8) return ffi::Error::InvalidArgument("w must be int8");
  return shaped(x, w, 1, layer.typed_data()[0], gated, [&](const uint32_t* from, Shape z) {
    z.scales = scales.typed_data();
    return typed(x, y, [&](auto* xs, auto* ys) { return multiply<Int8>(pool, xs, from, z, ys); });
  });
}

}  // namespace
}  // namespace jaxserve

// The most rows that it multiplies faster than XLA does, by weights of so many bytes.
extern "C" int64_t jaxserve_multiply_rows(int64_t bytes) {
#ifdef JAXSERVE_VECTORS
  return int64_t{1} << 30;
#else
  return bytes == 2 ? 4 : 0;
#endif
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_multiply, jaxserve::Multiply,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()              // x [T, D]
                                  .Arg<xla::ffi::AnyBuffer>()              // w [layers, N, D]
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()  // layer [1]
                                  .Ret<xla::ffi::AnyBuffer>()              // y [T, N]
                                  .Attr<bool>("gated"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_multiply_int8, jaxserve::MultiplyInt8,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()              // x [T, D]
                                  .Arg<xla::ffi::AnyBuffer>()              // w [layers, N, D]
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()  // scales [N] of the layer's rows
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()  // layer [1]
                                  .Ret<xla::ffi::AnyBuffer>()              // y [T, N]
                                  .Attr<bool>("gated"));
