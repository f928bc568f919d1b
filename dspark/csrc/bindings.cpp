// The kernels as torch operators (torch.ops.dspark): checks, threads, and which instruction set runs.
#include <Python.h>

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-parameter"  // torch's headers
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>
#pragma GCC diagnostic pop

#include <algorithm>
#include <atomic>
#include <string>
#include <vector>

#include "kernels.h"

namespace dspark {
namespace {

using at::Tensor;

bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"); }

bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

std::atomic<const Kernels*> chosen{nullptr};

const Kernels& kernels() {
  const Kernels* known = chosen.load(std::memory_order_acquire);
  if (known == nullptr) {
    TORCH_CHECK(has_avx2(), "this CPU has no AVX2 with FMA and F16C; use the torch path");
    known = has_avx512() ? &avx512_kernels() : &avx2_kernels();
    chosen.store(known, std::memory_order_release);
  }
  return *known;
}

// The instruction set in use; "" where there is none for this CPU.
std::string instruction_set() { return has_avx2() ? kernels().name : ""; }

// For tests: use another instruction set that this CPU has, from now on.
void use_instruction_set(const std::string& name) {
  const Kernels* wanted = name == "AVX-512" && has_avx512() ? &avx512_kernels()
                          : name == "AVX2" && has_avx2()    ? &avx2_kernels()
                                                            : nullptr;
  TORCH_CHECK(wanted != nullptr, "this CPU or this build has no ", name);
  chosen.store(wanted, std::memory_order_release);
}

void check_floats(const Tensor& t, const char* name) {
  TORCH_CHECK(t.device().is_cpu() && t.scalar_type() == at::kFloat && t.is_contiguous(), name,
              " must be contiguous float32 on the CPU, not ", t.toString(), " ", t.sizes());
}

int64_t panel_count(int64_t num_outputs) { return (num_outputs + kLanes - 1) / kLanes; }

void check_pool(const Tensor& pool) {
  check_floats(pool, "pool");
  TORCH_CHECK(pool.dim() == 5 && pool.size(2) == 2, "pool must be [pages, page_size, 2, KVH, Dh], not ", pool.sizes());
}

LinearArgs weight_args(const Tensor& packed, const std::optional<Tensor>& scales, int64_t format, int64_t num_inputs,
                       int64_t num_outputs) {
  TORCH_CHECK(format >= 0 && format <= static_cast<int64_t>(Format::kQ4_1), "no format ", format);
  LinearArgs a{};
  a.format = static_cast<Format>(format);
  const int64_t num_panels = panel_count(num_outputs);
  TORCH_CHECK(num_inputs > 0 && num_outputs > 0, "empty weights ", num_outputs, " x ", num_inputs);
  TORCH_CHECK(format < static_cast<int64_t>(Format::kQ8_0) || num_inputs % kBlock == 0, "block formats take inputs in ",
              kBlock, "s, not ", num_inputs);
  const int64_t bytes = num_panels * panel_bytes(a.format, num_inputs);
  TORCH_CHECK(packed.device().is_cpu() && packed.is_contiguous() && static_cast<int64_t>(packed.nbytes()) == bytes,
              "packed weights of ", num_outputs, " x ", num_inputs, " take ", bytes, " bytes, not ", packed.nbytes());
  TORCH_CHECK(scales.has_value() == (a.format == Format::kInt8), "scales belong to int8, and only there");
  if (scales) {
    check_floats(*scales, "scales");
    TORCH_CHECK(scales->numel() == num_panels * kLanes, "scales must be ", num_panels * kLanes, ", not ", scales->numel());
    a.scales = scales->const_data_ptr<float>();
  }
  a.weights = static_cast<const uint8_t*>(packed.const_data_ptr());
  a.num_inputs = num_inputs;
  a.num_outputs = num_outputs;
  return a;
}

void run_linear(LinearArgs& a, const Tensor& x, const std::optional<Tensor>& bias, Tensor& y, bool adds) {
  if (bias) {
    check_floats(*bias, "bias");
    TORCH_CHECK(bias->numel() == a.num_outputs, "bias must be ", a.num_outputs, ", not ", bias->numel());
    a.bias = bias->const_data_ptr<float>();
  }
  a.x = x.const_data_ptr<float>();
  a.y = y.data_ptr<float>();
  a.adds = adds;
  a.num_rows = x.size(0);
  if (a.num_rows == 0) return;
  const Kernels& k = kernels();
  const int64_t num_panels = panel_count(a.num_outputs);
  // Panels go to threads in pairs; what a thread gets is one stretch of memory.
  at::parallel_for(0, (num_panels + 1) / 2, 1, [&](int64_t begin, int64_t end) {
    k.linear(a, begin * 2, std::min(end * 2, num_panels));
  });
}

// x [T, in] float32 times packed weights -> [T, num_outputs].
Tensor linear(const Tensor& x, const Tensor& packed, const std::optional<Tensor>& scales,
              const std::optional<Tensor>& bias, int64_t format, int64_t num_outputs) {
  check_floats(x, "x");
  TORCH_CHECK(x.dim() == 2, "x must have two dimensions, not ", x.sizes());
  LinearArgs a = weight_args(packed, scales, format, x.size(1), num_outputs);
  Tensor y = at::empty({x.size(0), num_outputs}, x.options());
  run_linear(a, x, bias, y, false);
  return y;
}

// The same, added to y [T, num_outputs] in place.
void linear_add(Tensor y, const Tensor& x, const Tensor& packed, const std::optional<Tensor>& scales,
                const std::optional<Tensor>& bias, int64_t format) {
  check_floats(x, "x");
  check_floats(y, "y");
  TORCH_CHECK(x.dim() == 2 && y.dim() == 2 && x.size(0) == y.size(0), "x ", x.sizes(), " and y ", y.sizes(), " do not fit");
  LinearArgs a = weight_args(packed, scales, format, x.size(1), y.size(1));
  run_linear(a, x, bias, y, true);
}

// Rows `ids` [n] of packed weights -> [n, num_inputs] float32.
Tensor unpack_rows(const Tensor& packed, const std::optional<Tensor>& scales, int64_t format, int64_t num_inputs,
                   int64_t num_outputs, const Tensor& ids) {
  LinearArgs a = weight_args(packed, scales, format, num_inputs, num_outputs);
  TORCH_CHECK(ids.device().is_cpu() && ids.scalar_type() == at::kLong && ids.dim() == 1 && ids.is_contiguous(),
              "ids must be one contiguous dimension of int64");
  const int64_t* id = ids.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < ids.numel(); ++i)
    TORCH_CHECK_INDEX(id[i] >= 0 && id[i] < num_outputs, "row ", id[i], " of ", num_outputs);
  Tensor rows = at::empty({ids.numel(), num_inputs}, at::kFloat);
  float* out = rows.data_ptr<float>();
  const Kernels& k = kernels();
  at::parallel_for(0, ids.numel(), 8, [&](int64_t begin, int64_t end) {
    k.unpack_rows(a, id + begin, end - begin, out + begin * num_inputs);
  });
  return rows;
}

Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  check_floats(x, "x");
  check_floats(weight, "weight");
  const int64_t width = x.size(-1);
  TORCH_CHECK(weight.numel() == width && width > 0, "weight must be ", width, ", not ", weight.numel());
  Tensor y = at::empty_like(x);
  const Kernels& k = kernels();
  const float* in = x.const_data_ptr<float>();
  const float* w = weight.const_data_ptr<float>();
  float* out = y.data_ptr<float>();
  at::parallel_for(0, x.numel() / width, 32, [&](int64_t begin, int64_t end) {
    k.rms_norm(in, w, out, width, static_cast<float>(eps), begin, end);
  });
  return y;
}

// silu of the first half of each row times its second half: [T, 2 * width] -> [T, width].
Tensor silu_mul(const Tensor& x) {
  check_floats(x, "x");
  TORCH_CHECK(x.dim() == 2 && x.size(1) % 2 == 0, "x must be rows of two halves, not ", x.sizes());
  const int64_t width = x.size(1) / 2;
  Tensor y = at::empty({x.size(0), width}, x.options());
  const Kernels& k = kernels();
  const float* in = x.const_data_ptr<float>();
  float* out = y.data_ptr<float>();
  at::parallel_for(0, x.size(0), 8, [&](int64_t begin, int64_t end) { k.silu_mul(in, out, width, begin, end); });
  return y;
}

// Rotates queries and keys in qkv [T, (H + 2 * KVH) * Dh] in place, pairs (2i, 2i + 1) by phases [T, Dh] of (cos, sin),
// and writes keys and values to the slots [T] of pool [pages, page_size, 2, KVH, Dh].
void rotate_and_store(Tensor qkv, const Tensor& phases, Tensor pool, const Tensor& slots, int64_t num_heads) {
  check_floats(qkv, "qkv");
  check_floats(phases, "phases");
  check_pool(pool);
  const int64_t num_kv_heads = pool.size(3), dim = pool.size(4), num_tokens = qkv.size(0);
  const int64_t width = (num_heads + 2 * num_kv_heads) * dim, num_slots = pool.size(0) * pool.size(1);
  TORCH_CHECK(qkv.dim() == 2 && qkv.size(1) == width, "qkv must be ", width, " wide, not ", qkv.sizes());
  TORCH_CHECK(phases.numel() == num_tokens * dim, "phases must be ", num_tokens, " x ", dim, ", not ", phases.sizes());
  TORCH_CHECK(slots.scalar_type() == at::kLong && slots.is_contiguous() && slots.numel() == num_tokens,
              "slots must be ", num_tokens, " int64, not ", slots.sizes());
  float* x = qkv.data_ptr<float>();
  float* to = pool.data_ptr<float>();
  const float* phase = phases.const_data_ptr<float>();
  const int64_t* slot = slots.const_data_ptr<int64_t>();
  for (int64_t t = 0; t < num_tokens; ++t)
    TORCH_CHECK_INDEX(slot[t] >= 0 && slot[t] < num_slots, "slot ", slot[t], " of ", num_slots);
  at::parallel_for(0, num_tokens, 16, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      float* row = x + t * width;
      const float* p = phase + t * dim;
      for (int64_t h = 0; h < num_heads + num_kv_heads; ++h) {
        float* head = row + h * dim;
        for (int64_t i = 0; i < dim; i += 2) {
          const float re = head[i], im = head[i + 1];
          head[i] = re * p[i] - im * p[i + 1];
          head[i + 1] = re * p[i + 1] + im * p[i];
        }
      }
      const float* keys = row + num_heads * dim;  // values follow them, as in the pool
      std::copy(keys, keys + 2 * num_kv_heads * dim, to + slot[t] * 2 * num_kv_heads * dim);
    }
  });
}

// Attends the queries in qkv [T, (H + 2 * KVH) * Dh] to pool; returns [T, H * Dh]. `page_starts` [T] says where the
// table of a token's row begins in `pages`; a token sees the keys up to its position, the last `window` of them.
Tensor attention(const Tensor& qkv, const Tensor& pool, const Tensor& pages, const Tensor& page_starts,
                 const Tensor& positions, int64_t num_heads, int64_t window, double scale, double softcap) {
  check_floats(qkv, "qkv");
  check_pool(pool);
  for (const Tensor* t : {&pages, &page_starts, &positions})
    TORCH_CHECK(t->scalar_type() == at::kLong && t->is_contiguous() && t->dim() == 1, "page tables must be int64");
  AttentionArgs a{};
  a.num_tokens = qkv.size(0);
  a.page_size = pool.size(1);
  a.num_kv_heads = pool.size(3);
  a.head_dim = pool.size(4);
  a.num_heads = num_heads;
  TORCH_CHECK(a.head_dim % kLanes == 0 && num_heads % a.num_kv_heads == 0, "heads of ", a.head_dim, ", ", num_heads,
              " over ", a.num_kv_heads);
  a.query_stride = qkv.size(1);
  TORCH_CHECK(a.query_stride >= num_heads * a.head_dim, "qkv is too narrow: ", qkv.sizes());
  TORCH_CHECK(page_starts.numel() == a.num_tokens && positions.numel() == a.num_tokens, "one start and position a token");
  a.queries = qkv.const_data_ptr<float>();
  a.pool = pool.const_data_ptr<float>();
  a.pages = pages.const_data_ptr<int64_t>();
  a.page_starts = page_starts.const_data_ptr<int64_t>();
  a.positions = positions.const_data_ptr<int64_t>();
  a.window = window;
  a.scale = static_cast<float>(scale);
  a.softcap = static_cast<float>(softcap);
  int64_t longest = 0;
  for (int64_t t = 0; t < a.num_tokens; ++t) {
    const int64_t last = a.page_starts[t] + a.positions[t] / a.page_size;
    TORCH_CHECK_INDEX(a.page_starts[t] >= 0 && a.positions[t] >= 0 && last < pages.numel(), "token ", t, " has no page");
    longest = std::max(longest, a.positions[t] + 1);
  }
  for (int64_t i = 0; i < pages.numel(); ++i)
    TORCH_CHECK_INDEX(a.pages[i] >= 0 && a.pages[i] < pool.size(0), "page ", a.pages[i], " of ", pool.size(0));
  Tensor out = at::empty({a.num_tokens, num_heads * a.head_dim}, qkv.options());
  a.out = out.data_ptr<float>();
  if (window > 0) longest = std::min(longest, window);
  const int64_t width = (longest + kLanes - 1) / kLanes * kLanes, group = num_heads / a.num_kv_heads;
  const Kernels& k = kernels();
  at::parallel_for(0, a.num_tokens * a.num_kv_heads, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> scratch(static_cast<size_t>(width * group));
    k.attention(a, scratch.data(), width, begin, end);
  });
  return out;
}

}  // namespace

TORCH_LIBRARY(dspark, m) {
  m.def("instruction_set() -> str", [] { return instruction_set(); });
  m.def("use_instruction_set(str name) -> ()", [](const std::string& name) { use_instruction_set(name); });
  m.def("linear(Tensor x, Tensor packed, Tensor? scales, Tensor? bias, int format, int num_outputs) -> Tensor");
  m.def("linear_add(Tensor(a!) y, Tensor x, Tensor packed, Tensor? scales, Tensor? bias, int format) -> ()");
  m.def("unpack_rows(Tensor packed, Tensor? scales, int format, int num_inputs, int num_outputs, Tensor ids) -> Tensor");
  m.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor");
  m.def("silu_mul(Tensor x) -> Tensor");
  m.def("rotate_and_store(Tensor(a!) qkv, Tensor phases, Tensor(b!) pool, Tensor slots, int num_heads) -> ()");
  m.def(
      "attention(Tensor qkv, Tensor pool, Tensor pages, Tensor page_starts, Tensor positions, int num_heads, "
      "int window, float scale, float softcap) -> Tensor");
}

TORCH_LIBRARY_IMPL(dspark, CPU, m) {
  m.impl("linear", &linear);
  m.impl("linear_add", &linear_add);
  m.impl("unpack_rows", &unpack_rows);
  m.impl("rms_norm", &rms_norm);
  m.impl("silu_mul", &silu_mul);
  m.impl("rotate_and_store", &rotate_and_store);
  m.impl("attention", &attention);
}

}  // namespace dspark

// `import dspark._kernels` registers the operators; the module itself is empty.
PyMODINIT_FUNC PyInit__kernels() {
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_kernels", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}
