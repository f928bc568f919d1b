// The kernels, written once over a vector of 16 floats (`V`); each instruction set includes this with its own V.

template <Format F>
struct Decoder;  // of one panel: `load(k)` gives the weights of input k; calls come in the order of k

template <>
struct Decoder<Format::kFloat32> {
  const float* p;
  explicit Decoder(const uint8_t* panel) : p(reinterpret_cast<const float*>(panel)) {}
  V load(int64_t k) const { return V::load(p + k * kLanes); }
  void block(int64_t) {}
};

template <>
struct Decoder<Format::kFloat16> {
  const uint16_t* p;
  explicit Decoder(const uint8_t* panel) : p(reinterpret_cast<const uint16_t*>(panel)) {}
  V load(int64_t k) const { return V::load_half(p + k * kLanes); }
  void block(int64_t) {}
};

template <>
struct Decoder<Format::kBFloat16> {
  const uint16_t* p;
  explicit Decoder(const uint8_t* panel) : p(reinterpret_cast<const uint16_t*>(panel)) {}
  V load(int64_t k) const { return V::load_bfloat16(p + k * kLanes); }
  void block(int64_t) {}
};

template <>
struct Decoder<Format::kInt8> {
  const int8_t* p;
  explicit Decoder(const uint8_t* panel) : p(reinterpret_cast<const int8_t*>(panel)) {}
  V load(int64_t k) const { return V::load_int8(p + k * kLanes); }  // scaled once, at the end
  void block(int64_t) {}
};

template <>
struct Decoder<Format::kQ8_0> {
  const uint8_t* p;
  const int8_t* q = nullptr;
  V scale;
  explicit Decoder(const uint8_t* panel) : p(panel), scale(V::zero()) {}
  void block(int64_t b) {
    const uint8_t* at = p + b * kLanes * (2 + kBlock);
    scale = V::load_half(reinterpret_cast<const uint16_t*>(at));
    q = reinterpret_cast<const int8_t*>(at + kLanes * 2) - b * kBlock * kLanes;
  }
  V load(int64_t k) const { return V::mul(V::load_int8(q + k * kLanes), scale); }
};

template <bool kHasMin>
struct Nibbles {
  static constexpr int64_t kHead = kHasMin ? 4 : 2;
  const uint8_t* p;
  const uint32_t* q = nullptr;
  V scale, min;
  explicit Nibbles(const uint8_t* panel) : p(panel), scale(V::zero()), min(V::zero()) {}
  void block(int64_t b) {
    const uint8_t* at = p + b * kLanes * (kHead + kBlock / 2);
    const uint16_t* head = reinterpret_cast<const uint16_t*>(at);
    scale = V::load_half(head);
    min = kHasMin ? V::load_half(head + kLanes) : V::mul(scale, V::set(-8.0f));
    q = reinterpret_cast<const uint32_t*>(at + kLanes * kHead) - b * (kBlock / 8) * kLanes;
  }
  V load(int64_t k) const { return V::fma(V::nibbles(q + (k / 8) * kLanes, static_cast<int>(k % 8) * 4), scale, min); }
};

template <>
struct Decoder<Format::kQ4_0> : Nibbles<false> {
  using Nibbles<false>::Nibbles;
};
template <>
struct Decoder<Format::kQ4_1> : Nibbles<true> {
  using Nibbles<true>::Nibbles;
};

constexpr bool has_blocks(Format f) { return f == Format::kQ8_0 || f == Format::kQ4_0 || f == Format::kQ4_1; }

inline void finish(const LinearArgs& a, int64_t row, int64_t first, V sum) {
  const int64_t left = a.num_outputs - first;
  if (left <= 0) return;
  float* y = a.y + row * a.num_outputs + first;
  if (a.scales != nullptr) sum = V::mul(sum, V::load(a.scales + first));
  if (left >= kLanes) {
    if (a.bias != nullptr) sum = V::add(sum, V::load(a.bias + first));
    if (a.adds) sum = V::add(sum, V::load(y));
    sum.store(y);
    return;
  }
  float lanes[kLanes];
  sum.store(lanes);
  for (int64_t i = 0; i < left; ++i) {
    float value = lanes[i];
    if (a.bias != nullptr) value += a.bias[first + i];
    if (a.adds) value += y[i];
    y[i] = value;
  }
}

// R rows times P panels: as many sums as there are registers for.
template <Format F, int R, int P>
void tile(const LinearArgs& a, int64_t row, int64_t panel) {
  const int64_t bytes = panel_bytes(F, a.num_inputs);
  static_assert(P == 1 || P == 2);
  Decoder<F> first(a.weights + panel * bytes), second(a.weights + (panel + P - 1) * bytes);
  const float* x[R];
  for (int r = 0; r < R; ++r) x[r] = a.x + (row + r) * a.num_inputs;
  V sums[R][P];
  for (int r = 0; r < R; ++r)
    for (int p = 0; p < P; ++p) sums[r][p] = V::zero();
  auto step = [&](int64_t k) {
    V w[P];
    w[0] = first.load(k);
    if constexpr (P == 2) w[1] = second.load(k);
    for (int r = 0; r < R; ++r) {
      const V input = V::set(x[r][k]);
      for (int p = 0; p < P; ++p) sums[r][p] = V::fma(input, w[p], sums[r][p]);
    }
  };
  if constexpr (has_blocks(F)) {
    for (int64_t b = 0; b < a.num_inputs / kBlock; ++b) {
      first.block(b);
      if constexpr (P == 2) second.block(b);
      for (int64_t g = 0; g < kBlock; g += 8) {
#pragma GCC unroll 8
        for (int64_t i = 0; i < 8; ++i) step(b * kBlock + g + i);
      }
    }
  } else {
#pragma GCC unroll 4
    for (int64_t k = 0; k < a.num_inputs; ++k) step(k);
  }
  for (int r = 0; r < R; ++r)
    for (int p = 0; p < P; ++p) finish(a, row + r, (panel + p) * kLanes, sums[r][p]);
}

template <Format F, int R, int P>
struct Tiles {
  static void run(int num_rows, const LinearArgs& a, int64_t row, int64_t panel) {
    if (num_rows == R) {
      tile<F, R, P>(a, row, panel);
    } else if constexpr (R > 1) {
      Tiles<F, R - 1, P>::run(num_rows, a, row, panel);
    }
  }
};

template <Format F>
void linear_panels(const LinearArgs& a, int64_t begin, int64_t end) {
  // Rows are dealt out evenly, so that no tile is left with a single row.
  const int64_t num_tiles = (a.num_rows + kMaxRows - 1) / kMaxRows;
  for (int64_t panel = begin; panel < end;) {
    const int64_t width = panel + kPanels <= end ? kPanels : 1;
    for (int64_t t = 0; t < num_tiles; ++t) {
      const int64_t row = a.num_rows * t / num_tiles;
      const int count = static_cast<int>(a.num_rows * (t + 1) / num_tiles - row);
      if (width == kPanels) {
        Tiles<F, kMaxRows, kPanels>::run(count, a, row, panel);
      } else {
        Tiles<F, kMaxRows, 1>::run(count, a, row, panel);
      }
    }
    panel += width;
  }
}

void linear(const LinearArgs& a, int64_t begin, int64_t end) {
  switch (a.format) {
    case Format::kFloat32: return linear_panels<Format::kFloat32>(a, begin, end);
    case Format::kFloat16: return linear_panels<Format::kFloat16>(a, begin, end);
    case Format::kBFloat16: return linear_panels<Format::kBFloat16>(a, begin, end);
    case Format::kInt8: return linear_panels<Format::kInt8>(a, begin, end);
    case Format::kQ8_0: return linear_panels<Format::kQ8_0>(a, begin, end);
    case Format::kQ4_0: return linear_panels<Format::kQ4_0>(a, begin, end);
    case Format::kQ4_1: return linear_panels<Format::kQ4_1>(a, begin, end);
  }
}

template <Format F>
void unpack(const LinearArgs& a, const int64_t* ids, int64_t n, float* out) {
  const int64_t bytes = panel_bytes(F, a.num_inputs);
  float lanes[kLanes];
  for (int64_t i = 0; i < n; ++i) {
    const int64_t panel = ids[i] / kLanes, lane = ids[i] % kLanes;
    Decoder<F> decoder(a.weights + panel * bytes);
    for (int64_t k = 0; k < a.num_inputs; ++k) {
      if (has_blocks(F) && k % kBlock == 0) decoder.block(k / kBlock);
      decoder.load(k).store(lanes);
      out[i * a.num_inputs + k] = a.scales == nullptr ? lanes[lane] : lanes[lane] * a.scales[ids[i]];
    }
  }
}

void unpack_rows(const LinearArgs& a, const int64_t* ids, int64_t n, float* out) {
  switch (a.format) {
    case Format::kFloat32: return unpack<Format::kFloat32>(a, ids, n, out);
    case Format::kFloat16: return unpack<Format::kFloat16>(a, ids, n, out);
    case Format::kBFloat16: return unpack<Format::kBFloat16>(a, ids, n, out);
    case Format::kInt8: return unpack<Format::kInt8>(a, ids, n, out);
    case Format::kQ8_0: return unpack<Format::kQ8_0>(a, ids, n, out);
    case Format::kQ4_0: return unpack<Format::kQ4_0>(a, ids, n, out);
    case Format::kQ4_1: return unpack<Format::kQ4_1>(a, ids, n, out);
  }
}

void rms_norm(const float* x, const float* weight, float* y, int64_t width, float eps, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const float* in = x + row * width;
    float* out = y + row * width;
    V squares = V::zero();
    int64_t i = 0;
    for (; i + kLanes <= width; i += kLanes) {
      const V v = V::load(in + i);
      squares = V::fma(v, v, squares);
    }
    float sum = squares.sum();
    for (; i < width; ++i) sum = std::fma(in[i], in[i], sum);
    const float scale = 1.0f / std::sqrt(sum / static_cast<float>(width) + eps);
    const V factor = V::set(scale);
    for (i = 0; i + kLanes <= width; i += kLanes)
      V::mul(V::mul(V::load(in + i), factor), V::load(weight + i)).store(out + i);
    for (; i < width; ++i) out[i] = in[i] * scale * weight[i];
  }
}

// e^x by 2^n * p(f), n = round(x / ln 2): within 2 ulp. NaN stays NaN, what is too small becomes 0.
inline V exponential(V x) {
  const V n = V::round(V::mul(x, V::set(1.44269504088896341f)));
  V f = V::fma(n, V::set(-0.693359375f), x);
  f = V::fma(n, V::set(2.12194440e-4f), f);
  V p = V::set(1.9875691500e-4f);
  p = V::fma(p, f, V::set(1.3981999507e-3f));
  p = V::fma(p, f, V::set(8.3334519073e-3f));
  p = V::fma(p, f, V::set(4.1665795894e-2f));
  p = V::fma(p, f, V::set(1.6666665459e-1f));
  p = V::fma(p, f, V::set(5.0000001201e-1f));
  p = V::fma(p, V::mul(f, f), V::add(f, V::set(1.0f)));
  return V::scale_by_power(p, n, x);
}

void silu_mul(const float* x, float* y, int64_t width, int64_t begin, int64_t end) {
  const V one = V::set(1.0f);
  for (int64_t row = begin; row < end; ++row) {
    const float* gate = x + row * 2 * width;
    const float* up = gate + width;
    float* out = y + row * width;
    int64_t i = 0;
    for (; i + kLanes <= width; i += kLanes) {
      const V g = V::load(gate + i);
      const V e = exponential(V::sub(V::zero(), g));
      V::mul(V::div(g, V::add(one, e)), V::load(up + i)).store(out + i);
    }
    if (i < width) {
      float g[kLanes] = {}, u[kLanes] = {};
      for (int64_t j = i; j < width; ++j) g[j - i] = gate[j], u[j - i] = up[j];
      const V e = exponential(V::sub(V::zero(), V::load(g)));
      V::mul(V::div(V::load(g), V::add(one, e)), V::load(u)).store(g);
      for (int64_t j = i; j < width; ++j) out[j] = g[j - i];
    }
  }
}

// The keys of a token in pieces that lie in one page each; the order of sums depends on positions alone.
template <class Body>
inline void each_key(const AttentionArgs& a, const int64_t* pages, int64_t first, int64_t end, Body body) {
  const int64_t token_width = 2 * a.num_kv_heads * a.head_dim;
  for (int64_t position = first; position < end;) {
    const int64_t offset = position % a.page_size;
    const int64_t count = std::min(a.page_size - offset, end - position);
    const float* at = a.pool + (pages[position / a.page_size] * a.page_size + offset) * token_width;
    for (int64_t i = 0; i < count; ++i) body(position + i, at + i * token_width);
    position += count;
  }
}

template <int kVectors>  // of a head; 0: any number, read from the arguments
void attend(const AttentionArgs& a, float* scratch, int64_t scratch_width, int64_t begin, int64_t end) {
  const int64_t group = a.num_heads / a.num_kv_heads, dim = a.head_dim;
  const int64_t vectors = kVectors ? kVectors : dim / kLanes;
  for (int64_t item = begin; item < end; ++item) {
    const int64_t token = item / a.num_kv_heads, kv_head = item % a.num_kv_heads;
    const int64_t last = a.positions[token] + 1;
    const int64_t first = a.window > 0 ? std::max<int64_t>(0, last - a.window) : 0;
    const int64_t num_keys = last - first;
    const int64_t* pages = a.pages + a.page_starts[token];
    const float* q = a.queries + token * a.query_stride + kv_head * group * dim;
    float* out = a.out + (token * a.num_heads + kv_head * group) * dim;
    each_key(a, pages, first, last, [&](int64_t position, const float* token_at) {
      const float* key = token_at + kv_head * dim;
      for (int64_t g = 0; g < group; ++g) {
        V sum = V::zero();
        for (int64_t v = 0; v < vectors; ++v)
          sum = V::fma(V::load(q + g * dim + v * kLanes), V::load(key + v * kLanes), sum);
        float score = sum.sum() * a.scale;
        if (a.softcap > 0.0f) score = a.softcap * std::tanh(score / a.softcap);
        scratch[g * scratch_width + position - first] = score;
      }
    });
    for (int64_t g = 0; g < group; ++g) {
      float* scores = scratch + g * scratch_width;
      float most = scores[0];
      for (int64_t i = 1; i < num_keys; ++i) most = scores[i] > most ? scores[i] : most;
      for (int64_t i = num_keys; i % kLanes; ++i) scores[i] = -INFINITY;
      V total = V::zero();
      for (int64_t i = 0; i < num_keys; i += kLanes) {
        const V e = exponential(V::sub(V::load(scores + i), V::set(most)));
        e.store(scores + i);
        total = V::add(total, e);
      }
      const V factor = V::set(1.0f / total.sum());
      for (int64_t i = 0; i < num_keys; i += kLanes) V::mul(V::load(scores + i), factor).store(scores + i);
    }
    for (int64_t g = 0; g < group; ++g)
      for (int64_t v = 0; v < vectors; ++v) V::zero().store(out + g * dim + v * kLanes);
    for (int64_t g = 0; g < group; ++g) {
      const float* weights = scratch + g * scratch_width;
      if constexpr (kVectors > 0) {
        V sums[kVectors];
        for (int v = 0; v < kVectors; ++v) sums[v] = V::zero();
        each_key(a, pages, first, last, [&](int64_t position, const float* token_at) {
          const float* value = token_at + (a.num_kv_heads + kv_head) * dim;
          const V weight = V::set(weights[position - first]);
          for (int v = 0; v < kVectors; ++v) sums[v] = V::fma(weight, V::load(value + v * kLanes), sums[v]);
        });
        for (int v = 0; v < kVectors; ++v) sums[v].store(out + g * dim + v * kLanes);
      } else {
        each_key(a, pages, first, last, [&](int64_t position, const float* token_at) {
          const float* value = token_at + (a.num_kv_heads + kv_head) * dim;
          const V weight = V::set(weights[position - first]);
          for (int64_t v = 0; v < vectors; ++v) {
            float* at = out + g * dim + v * kLanes;
            V::fma(weight, V::load(value + v * kLanes), V::load(at)).store(at);
          }
        });
      }
    }
  }
}

void attention(const AttentionArgs& a, float* scratch, int64_t scratch_width, int64_t begin, int64_t end) {
  switch (a.head_dim) {
    case 64: return attend<4>(a, scratch, scratch_width, begin, end);
    case 128: return attend<8>(a, scratch, scratch_width, begin, end);
    default: return attend<0>(a, scratch, scratch_width, begin, end);
  }
}
