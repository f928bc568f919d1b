// AVX-512: a vector is one register.
#include <immintrin.h>

#include <algorithm>
#include <cmath>

#include "kernels.h"

// GCC 12 takes the undefined operands inside its own intrinsics for mistakes.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")

namespace dspark {
namespace avx512 {

struct V {
  __m512 r;
  static V zero() { return {_mm512_setzero_ps()}; }
  static V set(float x) { return {_mm512_set1_ps(x)}; }
  static V load(const float* p) { return {_mm512_loadu_ps(p)}; }
  static V load_half(const uint16_t* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
  }
  static V load_bfloat16(const uint16_t* p) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
  }
  static V load_int8(const int8_t* p) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
  }
  static V nibbles(const uint32_t* p, int shift) {  // a table look-up takes the lowest four bits alone
    const __m512 table = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return {_mm512_permutexvar_ps(_mm512_srli_epi32(_mm512_loadu_si512(p), shift), table)};
  }
  static V add(V a, V b) { return {_mm512_add_ps(a.r, b.r)}; }
  static V sub(V a, V b) { return {_mm512_sub_ps(a.r, b.r)}; }
  static V mul(V a, V b) { return {_mm512_mul_ps(a.r, b.r)}; }
  static V div(V a, V b) { return {_mm512_div_ps(a.r, b.r)}; }
  static V fma(V a, V b, V c) { return {_mm512_fmadd_ps(a.r, b.r, c.r)}; }
  static V round(V a) { return {_mm512_roundscale_ps(a.r, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
  // p * 2^n; 0 where the exponent x is too small for a float, infinite where it is too large.
  static V scale_by_power(V p, V n, V x) {
    const __m512 scaled = _mm512_scalef_ps(p.r, n.r);
    const __mmask16 low = _mm512_cmp_ps_mask(x.r, _mm512_set1_ps(-87.0f), _CMP_LT_OQ);
    const __mmask16 high = _mm512_cmp_ps_mask(x.r, _mm512_set1_ps(88.0f), _CMP_GT_OQ);
    return {_mm512_mask_mov_ps(_mm512_mask_mov_ps(scaled, low, _mm512_setzero_ps()), high, _mm512_set1_ps(INFINITY))};
  }
  void store(float* p) const { _mm512_storeu_ps(p, r); }
  float sum() const {  // halves, quarters ...: the same tree as with AVX2
    const __m256 h = _mm256_add_ps(_mm512_castps512_ps256(r), _mm512_extractf32x8_ps(r, 1));
    const __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    const __m128 d = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(d, _mm_shuffle_ps(d, d, 1)));
  }
};

constexpr int kMaxRows = 12;
constexpr int kPanels = 2;
#include "kernels.inl"

}  // namespace avx512

const Kernels& avx512_kernels() {
  static const Kernels kernels{"AVX-512",         avx512::linear,   avx512::unpack_rows,
                               avx512::rms_norm, avx512::silu_mul, avx512::attention};
  return kernels;
}

}  // namespace dspark

#pragma GCC pop_options
