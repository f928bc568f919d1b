// What the instruction sets share: how packed weights lie in memory, and the functions each set provides.
//
// A panel holds 16 outputs side by side, so that one vector register takes one input's weights of 16 outputs and no
// sum is ever taken across lanes. Every output of every row is one chain of fused multiply-adds over the inputs in
// order, whatever other rows, panels or threads do: a row's result depends on the row alone, to the bit.
#pragma once

#include <cstdint>

namespace dspark {

constexpr int64_t kLanes = 16;   // outputs of a panel
constexpr int64_t kBlock = 32;   // inputs that share a scale in the block formats

enum class Format : int64_t {
  kFloat32 = 0,   // [panel][input][lane] float
  kFloat16 = 1,   // [panel][input][lane] half
  kBFloat16 = 2,  // [panel][input][lane] bfloat16
  kInt8 = 3,      // [panel][input][lane] int8; a float scale per output
  kQ8_0 = 4,      // [panel][block]{half scale[lane], int8 [input][lane]}
  kQ4_0 = 5,      // [panel][block]{half scale[lane], uint32 [input / 8][lane], lowest nibble first}: (q - 8) * scale
  kQ4_1 = 6,      // the same with half min[lane] after the scales: q * scale + min
};

// Bytes of one panel.
inline int64_t panel_bytes(Format format, int64_t num_inputs) {
  const int64_t blocks = num_inputs / kBlock;
  switch (format) {
    case Format::kFloat32: return num_inputs * kLanes * 4;
    case Format::kFloat16:
    case Format::kBFloat16: return num_inputs * kLanes * 2;
    case Format::kInt8: return num_inputs * kLanes;
    case Format::kQ8_0: return blocks * kLanes * (2 + kBlock);
    case Format::kQ4_0: return blocks * kLanes * (2 + kBlock / 2);
    case Format::kQ4_1: return blocks * kLanes * (4 + kBlock / 2);
  }
  return 0;
}

struct LinearArgs {
  Format format;
  const uint8_t* weights;   // panels
  const float* scales;      // [16 * panels], kInt8 only
  const float* bias;        // [num_outputs] or null
  const float* x;           // [num_rows][num_inputs]
  float* y;                 // [num_rows][num_outputs]
  bool adds;                // y += the product, else y = it
  int64_t num_rows;
  int64_t num_inputs;
  int64_t num_outputs;
};

struct AttentionArgs {
  const float* queries;     // [tokens][query_stride], heads side by side
  int64_t query_stride;
  const float* pool;        // [pages][page_size][2][num_kv_heads][head_dim]
  float* out;               // [tokens][num_heads * head_dim]
  const int64_t* pages;     // page tables of all rows, one after the other
  const int64_t* page_starts;  // [tokens] where the table of a token's row begins in `pages`
  const int64_t* positions;    // [tokens]
  int64_t num_tokens;
  int64_t page_size;
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_dim;
  int64_t window;           // keys a token sees, 0: all
  float scale;
  float softcap;            // 0: none
};

// One instruction set. Each function does a part of the work in the calling thread.
struct Kernels {
  const char* name;
  // Panels [begin, end) of a product.
  void (*linear)(const LinearArgs&, int64_t begin, int64_t end);
  // Rows `ids` [n] of packed weights, as floats [n][num_inputs].
  void (*unpack_rows)(const LinearArgs&, const int64_t* ids, int64_t n, float* out);
  // y[row] = x[row] * weight / rms(x[row]) for rows [begin, end).
  void (*rms_norm)(const float* x, const float* weight, float* y, int64_t width, float eps, int64_t begin, int64_t end);
  // y[row] = silu(x[row][:width]) * x[row][width:] for rows [begin, end).
  void (*silu_mul)(const float* x, float* y, int64_t width, int64_t begin, int64_t end);
  // Pairs (token, key head) [begin, end); `scratch` has room for `num_heads / num_kv_heads` rows of the longest context.
  void (*attention)(const AttentionArgs&, float* scratch, int64_t scratch_width, int64_t begin, int64_t end);
};

const Kernels& avx512_kernels();
const Kernels& avx2_kernels();

}  // namespace dspark
