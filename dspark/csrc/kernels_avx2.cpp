// AVX2 with FMA and F16C: a vector is two registers.
#include <immintrin.h>

#include <algorithm>
#include <cmath>

#include "kernels.h"

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")

namespace dspark {
namespace avx2 {

struct V {
  __m256 a, b;
  static V zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
  static V set(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
  static V load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
  static __m128i eight(const uint16_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
  static V load_half(const uint16_t* p) { return {_mm256_cvtph_ps(eight(p)), _mm256_cvtph_ps(eight(p + 8))}; }
  static __m256 widened(const uint16_t* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(eight(p)), 16));
  }
  static V load_bfloat16(const uint16_t* p) { return {widened(p), widened(p + 8)}; }
  static __m256 bytes(const int8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
  }
  static V load_int8(const int8_t* p) { return {bytes(p), bytes(p + 8)}; }
  static __m256 quarters(const uint32_t* p, int shift) {
    const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(words, shift), _mm256_set1_epi32(15)));
  }
  static V nibbles(const uint32_t* p, int shift) { return {quarters(p, shift), quarters(p + 8, shift)}; }
  static V add(V x, V y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
  static V sub(V x, V y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
  static V mul(V x, V y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
  static V div(V x, V y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
  static V fma(V x, V y, V z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
  static V round(V x) {
    constexpr int kMode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(x.a, kMode), _mm256_round_ps(x.b, kMode)};
  }
  static __m256 scaled(__m256 p, __m256 n, __m256 x) {
    // In two steps, for 2^128 and 2^-127 have no exponent of their own.
    const __m256i whole = _mm256_cvtps_epi32(n);
    const __m256i half = _mm256_srai_epi32(whole, 1);
    const __m256i bias = _mm256_set1_epi32(127);
    const __m256 one = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, bias), 23));
    const __m256 other =
        _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_sub_epi32(whole, half), bias), 23));
    const __m256 product = _mm256_mul_ps(_mm256_mul_ps(p, one), other);
    const __m256 low = _mm256_cmp_ps(x, _mm256_set1_ps(-87.0f), _CMP_LT_OQ);
    const __m256 high = _mm256_cmp_ps(x, _mm256_set1_ps(88.0f), _CMP_GT_OQ);
    return _mm256_blendv_ps(_mm256_andnot_ps(low, product), _mm256_set1_ps(INFINITY), high);
  }
  static V scale_by_power(V p, V n, V x) { return {scaled(p.a, n.a, x.a), scaled(p.b, n.b, x.b)}; }
  void store(float* p) const {
    _mm256_storeu_ps(p, a);
    _mm256_storeu_ps(p + 8, b);
  }
  float sum() const {
    const __m256 h = _mm256_add_ps(a, b);
    const __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    const __m128 d = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(d, _mm_shuffle_ps(d, d, 1)));
  }
};

constexpr int kMaxRows = 6;
constexpr int kPanels = 1;
#include "kernels.inl"

}  // namespace avx2

const Kernels& avx2_kernels() {
  static const Kernels kernels{"AVX2",         avx2::linear,   avx2::unpack_rows,
                               avx2::rms_norm, avx2::silu_mul, avx2::attention};
  return kernels;
}

}  // namespace dspark

#pragma GCC pop_options
