// Work for several threads, numbers as they lie in memory, and 16 of them side by side.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

#include "xla/ffi/api/ffi.h"

namespace jaxserve {

namespace ffi = xla::ffi;

// Runs work(i) for i in [0, count) on this thread and on those of the pool that are free. Each begins with a stretch of its own,
// as memory is read fastest in its order, and then helps with the others. A pool thread that comes late finds nothing left;
// only items that have begun are waited for, so a busy pool can not hold this thread up.
template <typename F>
void share(ffi::ThreadPool& pool, int64_t count, F work) {
  struct alignas(64) Stretch {
    std::atomic<int64_t> next;
    int64_t end;
  };
  struct State {
    F work;
    int64_t count, threads;
    std::unique_ptr<Stretch[]> stretches{new Stretch[threads]};
    std::atomic<int64_t> arrived{0}, done{0};
    void run() {
      int64_t mine = arrived.fetch_add(1, std::memory_order_relaxed);
      for (int64_t n = 0; n < threads; ++n) {
        Stretch& stretch = stretches[(mine + n) % threads];
        for (int64_t i; (i = stretch.next.fetch_add(1, std::memory_order_relaxed)) < stretch.end;) {
          work(i);
          done.fetch_add(1, std::memory_order_release);
        }
      }
    }
  };
  int64_t threads = std::max<int64_t>(std::min<int64_t>(pool.num_threads(), count), 1);
  std::shared_ptr<State> state(new State{std::move(work), count, threads});
  for (int64_t n = 0; n < threads; ++n) {
    state->stretches[n].next = count * n / threads;
    state->stretches[n].end = count * (n + 1) / threads;
  }
  for (int64_t n = 1; n < threads; ++n) pool.Schedule([state] { state->run(); });
  state->run();
  while (state->done.load(std::memory_order_acquire) < count) std::this_thread::yield();
}

inline float as_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
inline uint32_t as_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
inline float widen(float x) { return x; }
inline float widen(uint16_t bfloat16) { return as_float(uint32_t{bfloat16} << 16); }

inline void narrow(float x, float* to) { *to = x; }
// Rounds to the nearest bfloat16, ties to even.
inline void narrow(float x, uint16_t* to) {
  uint32_t bits = as_bits(x);
  *to = static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

constexpr int kLanes = 16;  // numbers that are computed side by side
typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));

typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));

// a * b + c, rounded once where the processor can: the compiler is not left to choose.
inline Floats multiply_add(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__) || defined(__aarch64__)
  for (int i = 0; i < kLanes; ++i) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return c;
#else
  return a * b + c;
#endif
}
inline Floats multiply_add(float a, Floats b, Floats c) { return multiply_add(Floats{} + a, b, c); }

// The first `count` of 16 numbers, the others zero.
template <int count = kLanes>
inline Floats load(const float* from) {
  Floats x = {};
  std::memcpy(&x, from, 4 * count);
  return x;
}
template <int count = kLanes>
inline Floats load(const uint16_t* from) {
  Halves x = {};
  std::memcpy(&x, from, 2 * count);
  return reinterpret_cast<Floats>(__builtin_convertvector(x, Ints) << 16);
}

// Their sum: halves, quarters ... are added to each other.
inline float total(Floats x) {
  float part[kLanes];
  std::memcpy(part, &x, sizeof x);
  for (int n = kLanes / 2; n > 0; n /= 2)
    for (int i = 0; i < n; ++i) part[i] += part[i + n];
  return part[0];
}

// Swaps rows and columns.
inline void transpose(Ints (&row)[kLanes]) {
#ifdef __AVX512F__
  // Blocks of 8, then of 4, 2 and 1, each across its diagonal.
  Ints lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#pragma GCC unroll 4
  for (int side = kLanes / 2; side > 0; side /= 2) {
    Ints right = (lane & side) != 0;
    Ints upper = lane + (right & (kLanes - side)), lower = lane + (right ? Ints{} + kLanes : Ints{} + side);
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
      if (i & side) continue;
      auto a = reinterpret_cast<__m512i>(row[i]), b = reinterpret_cast<__m512i>(row[i + side]);
      row[i] = reinterpret_cast<Ints>(_mm512_permutex2var_epi32(a, reinterpret_cast<__m512i>(upper), b));
      row[i + side] = reinterpret_cast<Ints>(_mm512_permutex2var_epi32(a, reinterpret_cast<__m512i>(lower), b));
    }
  }
#else
  for (int i = 0; i < kLanes; ++i)
    for (int j = 0; j < i; ++j) {
      int32_t x = row[i][j];
      row[i][j] = row[j][i];
      row[j][i] = x;
    }
#endif
}

// e^x for x <= 0 to 2e-7 of its value: 2^n by the exponent bits, 2^f by Taylor's series around 0.
inline Floats exp_of_negative(Floats x) {
  x = (x > -87.0f ? x : Floats{} - 87.0f) * 1.44269504f;
  Ints n = __builtin_convertvector(x - 0.5f, Ints);
  Floats f = (x - __builtin_convertvector(n, Floats)) * 0.69314718f;
  Floats p = Floats{} + 1 / 720.f;
  for (float next : {1 / 120.f, 1 / 24.f, 1 / 6.f, 1 / 2.f, 1.f, 1.f}) p = multiply_add(f, p, Floats{} + next);
  return p * reinterpret_cast<Floats>((n + 127) << 23);
}

// x / (1 + e^-x)
inline Floats silu(Floats x) {
  Floats e = exp_of_negative(x > 0 ? -x : x);
  return x * (x > 0 ? Floats{} + 1 : e) / (1 + e);
}

}  // namespace jaxserve
