// x [T, D] times the transpose of w [N, D] on a CPU, called by XLA (jax.ffi): bfloat16 summed in float32, int8 in int32.
//
// The weights are read where they lie: one layer of a stack that is never copied, in the order of the file. Every sum runs
// over D in the same order whatever T is: a row's bits do not depend on the other rows. With AMX the tiles of w are the left
// operand as they are, and x is laid out in pairs as the right one; without it few rows are multiplied by plain loops.

#include <type_traits>

#include "share.h"

#if defined(__AMX_BF16__) && defined(__AMX_INT8__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace jaxserve {
namespace {

struct Shape {
  int64_t rows, depth, out;  // T, D in 32-bit words, N
};

#if defined(__AMX_BF16__) && defined(__AMX_INT8__)

constexpr int kSide = 16;            // rows of a tile, and its columns of 32-bit words
constexpr int kBlock = 2 * kSide;    // of w, and of x

struct alignas(64) Tiles {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

bool allowed() {
  constexpr int kRequest = 0x1023, kTileData = 18;  // arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)
  static const bool yes = syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
  return yes;
}

// Swaps rows and columns: blocks of 8, then of 4, 2 and 1, each across its diagonal.
void transpose(__m512i (&row)[kSide]) {
  __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
#pragma GCC unroll 4
  for (int side = kSide / 2; side > 0; side /= 2) {
    __mmask16 right = _mm512_test_epi32_mask(lane, _mm512_set1_epi32(side));
    __m512i upper = _mm512_mask_add_epi32(lane, right, lane, _mm512_set1_epi32(kSide - side));
    __m512i lower = _mm512_mask_add_epi32(_mm512_add_epi32(lane, _mm512_set1_epi32(side)), right, lane, _mm512_set1_epi32(kSide));
#pragma GCC unroll 16
    for (int i = 0; i < kSide; ++i) {
      if (i & side) continue;
      __m512i a = row[i], b = row[i + side];
      row[i] = _mm512_permutex2var_epi32(a, upper, b);
      row[i + side] = _mm512_permutex2var_epi32(a, lower, b);
    }
  }
}

// Tile (t, k) of x: row r holds the r-th word of 16 rows, two bfloat16 or four int8 each. Missing rows are zero.
void pack(const uint32_t* x, const Shape& z, int64_t t, uint32_t* to) {
  int rows = std::min<int64_t>(kSide, z.rows - t * kSide);
  const uint32_t* from = x + t * kSide * z.depth;
  for (int64_t k = 0; k < z.depth; k += kSide, to += kSide * kSide) {
    __m512i row[kSide];
    for (int i = 0; i < kSide; ++i) row[i] = i < rows ? _mm512_loadu_si512(from + i * z.depth + k) : _mm512_setzero_si512();
    transpose(row);
    for (int i = 0; i < kSide; ++i) _mm512_store_si512(to + i * kSide, row[i]);
  }
}

void put(__m512i x, float* to) { _mm512_storeu_si512(to, x); }
void put(__m512i x, int32_t* to) { _mm512_storeu_si512(to, x); }
void put(__m512i x, uint16_t* to) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(_mm512_castsi512_ps(x))));
}

// A tile of sums [16 of w, 16 of x] into y [T, N].
template <typename Out>
void store(const uint32_t* tile, int64_t n, int64_t t, const Shape& z, Out* y) {
  __m512i row[kSide];
  for (int i = 0; i < kSide; ++i) row[i] = _mm512_load_si512(tile + i * kSide);
  transpose(row);
  int64_t rows = std::min<int64_t>(kSide, z.rows - t);
  for (int64_t i = 0; i < rows; ++i) put(row[i], y + (t + i) * z.out + n);
}

// What `Out` sums: int8 in int32, bfloat16 in float32.
#define JAXSERVE_ADD(to, a, b)                  \
  if constexpr (std::is_same_v<Out, int32_t>) { \
    _tile_dpbssd(to, a, b);                     \
  } else {                                      \
    _tile_dpbf16ps(to, a, b);                   \
  }

// Rows n .. n + 31 of w for all of x.
template <typename Out>
void block(const uint32_t* x, const uint32_t* w, int64_t n, const Shape& z, Out* y) {
  static const Tiles tiles;
  _tile_loadconfig(&tiles);
  int64_t steps = z.depth / kSide, stride = z.depth * 4, size = z.depth * kSide;
  bool two = n + kSide < z.out;
  const uint32_t* upper = w + n * z.depth;
  const uint32_t* lower = two ? upper + kSide * z.depth : upper;
  alignas(64) uint32_t sum[4][kSide * kSide];
  for (int64_t t = 0; t < z.rows; t += kBlock) {
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
    _tile_stored(0, sum[0], 64);
    _tile_stored(1, sum[1], 64);
    _tile_stored(2, sum[2], 64);
    _tile_stored(3, sum[3], 64);
    for (int i = 0; i < 1 + two; ++i) {
      store(sum[i], n + i * kSide, t, z, y);
      if (wide) store(sum[2 + i], n + i * kSide, t + kSide, z, y);
    }
  }
  _tile_release();
}

template <typename Out>
ffi::Error multiply(ffi::ThreadPool& pool, const uint32_t* x, const uint32_t* w, const Shape& z, Out* y) {
  int64_t tall = (z.rows + kSide - 1) / kSide, size = z.depth * kSide;
  std::unique_ptr<uint32_t[]> memory(new uint32_t[tall * size + kSide]);
  uint32_t* packed = memory.get() + (64 - reinterpret_cast<uintptr_t>(memory.get()) % 64) % 64 / 4;
  share(pool, tall, [=](int64_t t) { pack(x, z, t, packed + t * size); });
  share(pool, (z.out + kBlock - 1) / kBlock, [=](int64_t i) { block(packed, w, i * kBlock, z, y); });
  return ffi::Error::Success();
}

#else

template <typename Out>
ffi::Error multiply(ffi::ThreadPool& pool, const uint32_t* x, const uint32_t* w, const Shape& z, Out* y) {
  if constexpr (std::is_same_v<Out, int32_t>) return ffi::Error::InvalidArgument("int8 is for AMX");
  int64_t depth = z.depth * 2;
  auto narrow_x = reinterpret_cast<const uint16_t*>(x);
  std::shared_ptr<float[]> wide(new float[z.rows * depth]);
  for (int64_t i = 0; i < z.rows * depth; ++i) wide[i] = widen(narrow_x[i]);
  share(pool, z.out / 16, [=](int64_t block) {
    for (int64_t n = block * 16; n < block * 16 + 16; ++n) {
      auto from = reinterpret_cast<const uint16_t*>(w) + n * depth;
      for (int64_t t = 0; t < z.rows; ++t) {
        float sum = 0;
        for (int64_t k = 0; k < depth; ++k) sum += wide[t * depth + k] * widen(from[k]);
        narrow(sum, y + t * z.out + n);
      }
    }
  });
  return ffi::Error::Success();
}

#endif

ffi::Error Multiply(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer w, ffi::Buffer<ffi::S32> layer,
                    ffi::Result<ffi::AnyBuffer> y) {
  auto dims = w.dimensions();
  int64_t bytes = w.element_type() == ffi::S8 ? 1 : 2;
  Shape z{x.dimensions()[0], dims[2] * bytes / 4, dims[1]};
  auto xs = static_cast<const uint32_t*>(x.untyped_data());
  auto ws = static_cast<const uint32_t*>(w.untyped_data()) + layer.typed_data()[0] * z.out * z.depth;
  bool int8 = w.element_type() == ffi::S8 && x.element_type() == ffi::S8;
  bool bfloat16 = w.element_type() == ffi::BF16 && x.element_type() == ffi::BF16;
  auto type = y->element_type();
  if (int8 && type == ffi::S32) return multiply(pool, xs, ws, z, static_cast<int32_t*>(y->untyped_data()));
  if (bfloat16 && type == ffi::F32) return multiply(pool, xs, ws, z, static_cast<float*>(y->untyped_data()));
  if (bfloat16 && type == ffi::BF16) return multiply(pool, xs, ws, z, static_cast<uint16_t*>(y->untyped_data()));
  return ffi::Error::InvalidArgument("bfloat16 gives float32 or bfloat16, int8 gives int32");
}

}  // namespace
}  // namespace jaxserve

// The most rows of bfloat16, and of int8, that it multiplies faster than XLA does.
extern "C" int64_t jaxserve_multiply_rows(bool int8) {
#if defined(__AMX_BF16__) && defined(__AMX_INT8__)
  return jaxserve::allowed() ? 1 << 30 : 0;
#else
  return int8 ? 0 : 4;
#endif
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_multiply, jaxserve::Multiply,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()              // x [T, D]
                                  .Arg<xla::ffi::AnyBuffer>()              // w [layers, N, D]
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()  // layer [1]
                                  .Ret<xla::ffi::AnyBuffer>());            // y [T, N]
