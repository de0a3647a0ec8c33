// Work for several threads, numbers as they lie in memory, and functions of one or of several side by side.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>

#include "xla/ffi/api/ffi.h"

namespace jaxserve {

namespace ffi = xla::ffi;

// Runs work(i) for i in [0, count) on this thread and on those of the pool that are free. A pool thread that comes late
// finds nothing left; only items that have begun are waited for, so a busy pool can not hold this thread up.
template <typename F>
void share(ffi::ThreadPool& pool, int64_t count, F work) {
  struct State {
    F work;
    int64_t count;
    std::atomic<int64_t> next{0}, done{0};
    void run() {
      for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) {
        work(i);
        done.fetch_add(1, std::memory_order_release);
      }
    }
  };
  std::shared_ptr<State> state(new State{std::move(work), count});
  for (int64_t n = std::min<int64_t>(pool.num_threads(), count) - 1; n > 0; --n) pool.Schedule([state] { state->run(); });
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

inline int32_t truncate(float x) { return static_cast<int32_t>(x); }
inline Ints truncate(Floats x) { return __builtin_convertvector(x, Ints); }
inline float as_floating(int32_t x) { return static_cast<float>(x); }
inline Floats as_floating(Ints x) { return __builtin_convertvector(x, Floats); }

// e^x for x <= 0 to 2e-7 of its value: 2^n by the exponent bits, 2^f by Taylor's series around 0.
template <typename F>
inline F exp_of_negative(F x) {
  x = (x > -87.0f ? x : x * 0 - 87.0f) * 1.44269504f;
  auto n = truncate(x - 0.5f);
  F f = (x - as_floating(n)) * 0.69314718f;
  F p = 1 + f * (1 + f * (1 / 2.f + f * (1 / 6.f + f * (1 / 24.f + f * (1 / 120.f + f * (1 / 720.f))))));
  n = (n + 127) << 23;
  F power;
  std::memcpy(&power, &n, sizeof power);
  return p * power;
}

// x / (1 + e^-x)
template <typename F>
inline F silu(F x) {
  F e = exp_of_negative(x > 0 ? -x : x);
  return x * (x > 0 ? x * 0 + 1 : e) / (1 + e);
}

}  // namespace jaxserve
