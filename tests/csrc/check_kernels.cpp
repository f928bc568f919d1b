// Runs every kernel on random shapes in memory of exactly the right size, for sanitizers, and compares with plain loops.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "../../dspark/csrc/kernels.h"

using namespace dspark;

namespace {

std::mt19937 random_bits(7);
int num_checked = 0;

float normal() { return std::normal_distribution<float>()(random_bits); }
int64_t up_to(int64_t n) { return static_cast<int64_t>(random_bits() % static_cast<uint32_t>(n)) + 1; }

void check(bool ok, const char* what, const char* set, int64_t a, int64_t b, int64_t c) {
  ++num_checked;
  if (ok) return;
  std::printf("%s differs with %s at %ld, %ld, %ld\n", what, set, static_cast<long>(a), static_cast<long>(b),
              static_cast<long>(c));
  std::exit(1);
}

bool is_close(double got, double expected, double scale) { return std::abs(got - expected) <= 1e-5 * (1.0 + scale); }

uint16_t half(int n) { return static_cast<uint16_t>((n & 1 ? 0x8000 : 0) | ((14 + n % 3) << 10) | (n * 37 & 0x3ff)); }

// Packed weights of random bits that are numbers: exponents of floats are kept moderate.
std::vector<uint8_t> random_panels(Format f, int64_t num_panels, int64_t num_inputs) {
  std::vector<uint8_t> bytes(static_cast<size_t>(num_panels * panel_bytes(f, num_inputs)));
  for (auto& byte : bytes) byte = static_cast<uint8_t>(random_bits());
  const int64_t count = num_panels * num_inputs * kLanes;
  if (f == Format::kFloat32)
    for (int64_t i = 0; i < count; ++i) reinterpret_cast<float*>(bytes.data())[i] = normal();
  if (f == Format::kFloat16)
    for (int64_t i = 0; i < count; ++i) reinterpret_cast<uint16_t*>(bytes.data())[i] = half(static_cast<int>(up_to(999)));
  if (f == Format::kBFloat16)
    for (int64_t i = 0; i < count; ++i) {
      const float x = normal();
      uint32_t bits;
      std::memcpy(&bits, &x, 4);
      reinterpret_cast<uint16_t*>(bytes.data())[i] = static_cast<uint16_t>(bits >> 16);
    }
  if (f == Format::kQ8_0 || f == Format::kQ4_0 || f == Format::kQ4_1) {
    const int64_t size = panel_bytes(f, kBlock), halves = kLanes * (f == Format::kQ4_1 ? 2 : 1);
    for (size_t at = 0; at < bytes.size(); at += static_cast<size_t>(size))
      for (int64_t i = 0; i < halves; ++i)
        reinterpret_cast<uint16_t*>(bytes.data() + at)[i] = half(static_cast<int>(up_to(999)));
  }
  return bytes;
}

void check_linear(const Kernels& k, Format f) {
  const bool has_blocks = f >= Format::kQ8_0;
  const int64_t rows = up_to(30), outputs = up_to(70), inputs = has_blocks ? kBlock * up_to(4) : up_to(100);
  const int64_t panels = (outputs + kLanes - 1) / kLanes;
  const auto weights = random_panels(f, panels, inputs);
  std::vector<float> scales(static_cast<size_t>(panels * kLanes)), bias(static_cast<size_t>(outputs));
  std::vector<float> x(static_cast<size_t>(rows * inputs)), y(static_cast<size_t>(rows * outputs));
  for (auto* v : {&scales, &bias, &x, &y})
    for (auto& value : *v) value = normal();
  LinearArgs a{};
  a.format = f;
  a.weights = weights.data();
  a.scales = f == Format::kInt8 ? scales.data() : nullptr;
  a.bias = rows % 2 ? bias.data() : nullptr;
  a.x = x.data();
  a.y = y.data();
  a.adds = rows % 3 == 0;
  a.num_rows = rows;
  a.num_inputs = inputs;
  a.num_outputs = outputs;
  std::vector<int64_t> ids(static_cast<size_t>(outputs));
  for (int64_t i = 0; i < outputs; ++i) ids[static_cast<size_t>(i)] = i;
  std::vector<float> dense(static_cast<size_t>(outputs * inputs));
  k.unpack_rows(a, ids.data(), outputs, dense.data());
  const std::vector<float> before = y;
  k.linear(a, 0, panels / 2);
  k.linear(a, panels / 2, panels);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t o = 0; o < outputs; ++o) {
      double sum = a.bias ? bias[static_cast<size_t>(o)] : 0.0, scale = 0.0;
      for (int64_t i = 0; i < inputs; ++i) {
        const double term = static_cast<double>(x[static_cast<size_t>(r * inputs + i)]) * dense[static_cast<size_t>(o * inputs + i)];
        sum += term;
        scale += std::abs(term);
      }
      const auto at = static_cast<size_t>(r * outputs + o);
      if (a.adds) sum += before[at];
      check(is_close(y[at], sum, scale), "a product", k.name, rows, outputs, inputs);
    }
}

void check_rows(const Kernels& k) {
  const int64_t rows = up_to(5), width = up_to(70);
  std::vector<float> x(static_cast<size_t>(rows * 2 * width)), weight(static_cast<size_t>(2 * width));
  std::vector<float> normed(x.size()), gated(static_cast<size_t>(rows * width));
  for (auto* v : {&x, &weight})
    for (auto& value : *v) value = normal() * 5.0f;
  k.rms_norm(x.data(), weight.data(), normed.data(), 2 * width, 1e-5f, 0, rows);
  k.silu_mul(x.data(), gated.data(), width, 0, rows);
  for (int64_t r = 0; r < rows; ++r) {
    const float* row = x.data() + r * 2 * width;
    double squares = 0.0;
    for (int64_t i = 0; i < 2 * width; ++i) squares += static_cast<double>(row[i]) * row[i];
    const double scale = 1.0 / std::sqrt(squares / static_cast<double>(2 * width) + 1e-5);
    for (int64_t i = 0; i < 2 * width; ++i)
      check(is_close(normed[static_cast<size_t>(r * 2 * width + i)], row[i] * scale * weight[static_cast<size_t>(i)], 5.0),
            "a norm", k.name, r, i, width);
    for (int64_t i = 0; i < width; ++i)
      check(is_close(gated[static_cast<size_t>(r * width + i)], row[i] / (1.0 + std::exp(-row[i])) * row[width + i], 50.0),
            "an activation", k.name, r, i, width);
  }
}

void check_attention(const Kernels& k) {
  AttentionArgs a{};
  a.page_size = up_to(5);
  a.num_kv_heads = up_to(3);
  const int64_t group = up_to(3);
  a.num_heads = a.num_kv_heads * group;
  a.head_dim = kLanes * (up_to(2) == 1 ? 4 : up_to(3));
  a.window = up_to(2) == 1 ? up_to(9) : 0;
  a.scale = 0.3f;
  a.softcap = up_to(2) == 1 ? 5.0f : 0.0f;
  const int64_t context = up_to(40), num_pages = (context + a.page_size - 1) / a.page_size;
  a.num_tokens = up_to(context);
  std::vector<float> pool(static_cast<size_t>(num_pages * a.page_size * 2 * a.num_kv_heads * a.head_dim));
  std::vector<float> queries(static_cast<size_t>(a.num_tokens * a.num_heads * a.head_dim)), out(queries.size());
  for (auto* v : {&pool, &queries})
    for (auto& value : *v) value = normal();
  std::vector<int64_t> pages, starts(static_cast<size_t>(a.num_tokens), 0), positions;
  for (int64_t p = 0; p < num_pages; ++p) pages.push_back(num_pages - 1 - p);
  for (int64_t t = 0; t < a.num_tokens; ++t) positions.push_back(context - a.num_tokens + t);
  a.queries = queries.data();
  a.query_stride = a.num_heads * a.head_dim;
  a.pool = pool.data();
  a.out = out.data();
  a.pages = pages.data();
  a.page_starts = starts.data();
  a.positions = positions.data();
  const int64_t longest = a.window ? std::min(a.window, context) : context;
  const int64_t width = (longest + kLanes - 1) / kLanes * kLanes;
  std::vector<float> scratch(static_cast<size_t>(width * group));
  k.attention(a, scratch.data(), width, 0, a.num_tokens * a.num_kv_heads);
  for (int64_t t = 0; t < a.num_tokens; ++t)
    for (int64_t h = 0; h < a.num_heads; ++h) {
      const int64_t last = positions[static_cast<size_t>(t)], first = a.window ? std::max<int64_t>(0, last + 1 - a.window) : 0;
      std::vector<double> weights;
      double total = 0.0;
      auto at = [&](int64_t position, int64_t kind, int64_t i) {
        const int64_t slot = pages[static_cast<size_t>(position / a.page_size)] * a.page_size + position % a.page_size;
        return pool[static_cast<size_t>(((slot * 2 + kind) * a.num_kv_heads + h / group) * a.head_dim + i)];
      };
      for (int64_t p = first; p <= last; ++p) {
        double score = 0.0;
        for (int64_t i = 0; i < a.head_dim; ++i)
          score += static_cast<double>(queries[static_cast<size_t>((t * a.num_heads + h) * a.head_dim + i)]) * at(p, 0, i);
        score *= a.scale;
        if (a.softcap > 0.0f) score = a.softcap * std::tanh(score / a.softcap);
        weights.push_back(std::exp(score));
        total += weights.back();
      }
      for (int64_t i = 0; i < a.head_dim; ++i) {
        double sum = 0.0;
        for (int64_t p = first; p <= last; ++p) sum += weights[static_cast<size_t>(p - first)] / total * at(p, 1, i);
        check(is_close(out[static_cast<size_t>((t * a.num_heads + h) * a.head_dim + i)], sum, 3.0), "attention", k.name, t, h, i);
      }
    }
}

}  // namespace

int main() {
  std::vector<const Kernels*> sets;
  if (__builtin_cpu_supports("avx2")) sets.push_back(&avx2_kernels());
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl")) sets.push_back(&avx512_kernels());
  for (const Kernels* k : sets)
    for (int repeat = 0; repeat < 60; ++repeat) {
      for (int f = 0; f <= static_cast<int>(Format::kQ4_1); ++f) check_linear(*k, static_cast<Format>(f));
      check_rows(*k);
      check_attention(*k);
    }
  std::printf("%d numbers agree, %zu instruction sets\n", num_checked, sets.size());
}
