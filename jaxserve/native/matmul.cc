// x [T, D] times the transpose of w [N, D] on a CPU, called by XLA (jax.ffi): float32 and bfloat16 summed in float32, int8 in
// int32.
//
// The weights are read where they lie: one layer of a stack that is never copied, in the order of the file. Every sum runs
// over D in the same order whatever T is: a row's bits do not depend on the other rows. Gated, w is two matrices [2, N, D] and
// the result silu of the first product times the second. Zeros at the end of x, which are a step's padding, cost nothing.
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
};

#ifdef JAXSERVE_VECTORS

constexpr int kSide = kLanes;  // words of a vector
constexpr int kMost = 3;       // vectors of rows of x that are multiplied together

struct alignas(64) Sums {
  uint32_t of[kSide][kSide];  // [row of w, row of x]
};

// Rows 16 t .. 16 t + 15 of x, word by word: each vector holds one word of all of them. Missing rows are zero. Returns
// whether any is not.
bool pack(const uint32_t* x, const Shape& z, int64_t t, uint32_t* to) {
  int rows = std::min<int64_t>(kSide, z.rows - t * kSide);
  const uint32_t* from = x + t * kSide * z.depth;
  Ints bits = {};
  for (int64_t k = 0; k < z.depth; k += kSide, to += kSide * kSide) {
    Ints row[kSide] = {};
    for (int i = 0; i < rows; ++i) std::memcpy(&row[i], from + i * z.depth + k, sizeof(Ints));
    for (Ints some : row) bits |= some;
    transpose(row);
    std::memcpy(to, row, sizeof row);
  }
  int32_t any = 0;
  for (int i = 0; i < kSide; ++i) any |= bits[i];
  return any;
}

void put(const Ints& x, float* to) { std::memcpy(to, &x, sizeof x); }
void put(const Ints& x, int32_t* to) { std::memcpy(to, &x, sizeof x); }
void put(const Ints& x, uint16_t* to) {
  auto narrow = _mm512_cvtneps_pbh(reinterpret_cast<__m512>(x));
  std::memcpy(to, &narrow, sizeof narrow);
}

// The rows of w that one thread takes: 16 from `first` on, and 16 from `second` on unless that is below 0.
struct Block {
  int64_t first, second;
};
int64_t blocks(const Shape& z) { return z.gated ? z.out / kSide : (z.out / kSide + 1) / 2; }
Block block_at(int64_t i, const Shape& z) {
  if (z.gated) return {i * kSide, z.out + i * kSide};
  int64_t second = (2 * i + 1) * kSide;
  return {2 * i * kSide, second < z.out ? second : -1};
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

// The sums of a block, [16 of w, 16 of x] twice.
template <typename Out>
void store(Sums& first, const Sums& second, const Block& b, int64_t t, const Shape& z, Out* y) {
  if constexpr (!std::is_same_v<Out, int32_t>)
    if (z.gated)
      for (int i = 0; i < kSide; ++i) {
        Floats gate = _mm512_load_ps(first.of[i]), up = _mm512_load_ps(second.of[i]);
        _mm512_store_ps(first.of[i], silu(gate) * up);
      }
  store(first, b.first, t, z, y);
  if (!z.gated && b.second >= 0) store(second, b.second, t, z, y);
}

// What 128 too much in each element of x adds to the sum of a row of w.
int32_t excess(const uint32_t* w, int64_t depth) {
  __m512i sum = _mm512_setzero_si512(), x = _mm512_set1_epi8(-128);
  for (int64_t k = 0; k < depth; k += kSide) sum = _mm512_dpbusd_epi32(sum, x, _mm512_loadu_si512(w + k));
  return _mm512_reduce_add_epi32(sum);
}

// Of each type: what x becomes when it is loaded, how a word is multiplied and added in every lane, what the sum then is.
struct Float32 {
  using Sum = __m512;
  static __m512i from(__m512i x) { return x; }
  static Sum add(Sum sum, __m512i x, __m512i w) { return _mm512_fmadd_ps(_mm512_castsi512_ps(x), _mm512_castsi512_ps(w), sum); }
  static __m512i value(Sum sum, const uint32_t*, int64_t) { return _mm512_castps_si512(sum); }
};
struct Bfloat16 : Float32 {
  static Sum add(Sum sum, __m512i x, __m512i w) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(x), reinterpret_cast<__m512bh>(w));
  }
};
struct Int8 {  // the processor multiplies bytes without a sign by bytes with one: 128 is added to x
  using Sum = __m512i;
  static __m512i from(__m512i x) { return _mm512_xor_si512(x, _mm512_set1_epi8(-128)); }
  static Sum add(Sum sum, __m512i x, __m512i w) { return _mm512_dpbusd_epi32(sum, x, w); }
  static __m512i value(Sum sum, const uint32_t* w, int64_t depth) {
    return _mm512_sub_epi32(sum, _mm512_set1_epi32(excess(w, depth)));
  }
};

// R rows of w by M vectors of rows of x.
template <typename Type, int M, int R>
void add_rows(const uint32_t* x, const uint32_t* w, int64_t depth, Sums* to, int first) {
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
  for (int r = 0; r < R; ++r)
    for (int m = 0; m < M; ++m) _mm512_store_si512(to[m].of[first + r], Type::value(sum[m][r], w + r * depth, depth));
}

// 16 rows of w by M vectors of rows of x.
template <typename Type, int M>
void add(const uint32_t* x, const uint32_t* w, int64_t depth, Sums* to) {
  constexpr int kRows = M == 1 ? kSide : kSide / 2;  // whose sums fit the registers
  for (int i = 0; i < kSide; i += kRows) add_rows<Type, M, kRows>(x, w + i * depth, depth, to, i);
}

template <typename Type, typename Out>
void vector_block(const uint32_t* x, const uint32_t* w, const Block& b, const Shape& z, Out* y) {
  Sums sums[2][kMost];
  int64_t tall = (z.rows + kSide - 1) / kSide;
  for (int64_t t = 0, m; t < tall; t += m) {
    m = tall - t == kMost + 1 ? 2 : std::min<int64_t>(kMost, tall - t);
    const uint32_t* left = x + t * kSide * z.depth;
    for (int part = 0; part < (b.second < 0 ? 1 : 2); ++part) {
      const uint32_t* right = w + (part ? b.second : b.first) * z.depth;
      if (m == 1) add<Type, 1>(left, right, z.depth, sums[part]);
      if (m == 2) add<Type, 2>(left, right, z.depth, sums[part]);
      if (m == 3) add<Type, 3>(left, right, z.depth, sums[part]);
    }
    for (int i = 0; i < m; ++i) store(sums[0][i], sums[1][i], b, (t + i) * kSide, z, y);
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

// What `Out` sums: int8 in int32, bfloat16 in float32.
#define JAXSERVE_ADD(to, a, b)                  \
  if constexpr (std::is_same_v<Out, int32_t>) { \
    _tile_dpbssd(to, a, b);                     \
  } else {                                      \
    _tile_dpbf16ps(to, a, b);                   \
  }

template <typename Out>
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
    store(sum[0], sum[1], b, t, z, y);
    if (wide) store(sum[2], sum[3], b, t + kSide, z, y);
  }
  _tile_release();
}

#endif

template <typename Type, typename Out>
void run(const uint32_t* x, const uint32_t* w, const Block& b, const Shape& z, Out* y) {
#ifdef JAXSERVE_TILES
  if constexpr (!std::is_same_v<Type, Float32>)
    if (allowed()) return tile_block(x, w, b, z, y);
#endif
  vector_block<Type>(x, w, b, z, y);
}

template <typename Type, typename Out>
ffi::Error multiply(ffi::ThreadPool& pool, const uint32_t* x, const uint32_t* w, Shape z, Out* y) {
  int64_t tall = (z.rows + kSide - 1) / kSide, size = z.depth * kSide;
  std::unique_ptr<uint32_t[]> memory(new uint32_t[tall * size + kSide]);
  uint32_t* packed = memory.get() + (64 - reinterpret_cast<uintptr_t>(memory.get()) % 64) % 64 / 4;
  std::atomic<int64_t> live{0};  // rows up to the last that is not zero
  share(pool, tall, [=, &live](int64_t t) {
    int64_t end = std::min((t + 1) * kSide, z.rows), most = live;
    if (pack(x, z, t, packed + t * size))
      while (most < end && !live.compare_exchange_weak(most, end)) continue;
  });
  std::fill(y + live * z.out, y + z.rows * z.out, Out{});
  z.rows = live;
  share(pool, blocks(z), [=](int64_t i) { run<Type>(packed, w, block_at(i, z), z, y); });
  return ffi::Error::Success();
}

#else

struct Float32 {};
struct Bfloat16 {};
struct Int8 {};

template <typename Type, typename Out>
ffi::Error multiply(ffi::ThreadPool& pool, const uint32_t* x, const uint32_t* w, const Shape& z, Out* y) {
  if constexpr (!std::is_same_v<Type, Bfloat16>) {
    return ffi::Error::InvalidArgument("only bfloat16 without AVX-512");
  } else {
    int64_t depth = z.depth * 2;
    auto halves = [](const uint32_t* words) { return reinterpret_cast<const uint16_t*>(words); };
    auto sum = [=](int64_t t, int64_t n) {
      Floats sum = {};
      for (int64_t k = 0; k < depth; k += kLanes) 
        sum = multiply_add(load(halves(x) + t * depth + k), load(halves(w) + n * depth + k), sum);
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

ffi::Error Multiply(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer w, ffi::Buffer<ffi::S32> layer,
                    ffi::Result<ffi::AnyBuffer> y, bool gated) {
  auto dims = w.dimensions();
  auto from = w.element_type(), to = y->element_type();
  if (x.element_type() != from) return ffi::Error::InvalidArgument("x and w must be of one type");
  int64_t bytes = from == ffi::F32 ? 4 : from == ffi::BF16 ? 2 : 1;
  Shape z{x.dimensions()[0], dims[2] * bytes / 4, gated ? dims[1] / 2 : dims[1], gated};
  if (z.out % 16 || z.depth % 16 || dims[2] * bytes % 4)
    return ffi::Error::InvalidArgument("N, of each of two if gated, must be a multiple of 16, a row of w one of 64 bytes");
  if (gated && to == ffi::S32) return ffi::Error::InvalidArgument("integers have no gate");
  auto xs = static_cast<const uint32_t*>(x.untyped_data());
  auto ws = static_cast<const uint32_t*>(w.untyped_data()) + layer.typed_data()[0] * dims[1] * z.depth;
  void* ys = y->untyped_data();
  if (from == ffi::S8 && to == ffi::S32) return multiply<Int8>(pool, xs, ws, z, static_cast<int32_t*>(ys));
  if (from == ffi::F32 && to == ffi::F32) return multiply<Float32>(pool, xs, ws, z, static_cast<float*>(ys));
  if (from == ffi::BF16 && to == ffi::F32) return multiply<Bfloat16>(pool, xs, ws, z, static_cast<float*>(ys));
  if (from == ffi::BF16 && to == ffi::BF16) return multiply<Bfloat16>(pool, xs, ws, z, static_cast<uint16_t*>(ys));
  return ffi::Error::InvalidArgument("float32 gives itself, bfloat16 itself or float32, int8 gives int32");
}

}  // namespace
}  // namespace jaxserve

// The most rows of elements of so many bytes that it multiplies faster than XLA does.
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
