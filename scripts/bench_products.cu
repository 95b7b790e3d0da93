// Measures the rate of a layer's matmuls when they run without a pause, for each of cuBLASLt's first kernels. This bounds the time of a
// step's matmuls on a GPU at its power limit. Shapes: one layer of Llama 3.1 8B, 16,384 tokens, bf16.
//
//     nvcc -O2 -arch=sm_90a scripts/bench_products.cu -o bench_products -lcublasLt -lnvidia-ml
//     ./bench_products SECONDS_A_KERNEL KERNELS_A_PRODUCT

#include <cublasLt.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <nvml.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <vector>

#define CHECK(call)                                                   \
  do {                                                                \
    auto status_of_call = (call);                                     \
    if (status_of_call) {                                             \
      printf("%s: status %d\n", #call, (int)status_of_call);          \
      exit(1);                                                        \
    }                                                                 \
  } while (0)

// Normally distributed values: power depends on the number of bits that change.
__global__ void fill(__nv_bfloat16* p, size_t n, float scale, unsigned seed) {
  for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) {
    unsigned x = (unsigned)(i * 2654435761u) ^ seed;
    x ^= x >> 16;
    x *= 0x7feb352d;
    x ^= x >> 15;
    x *= 0x846ca68b;
    x ^= x >> 16;
    unsigned y = x * 747796405u + 2891336453u;
    y ^= y >> 17;
    float u = (x + 1.f) / 4294967808.f, v = y / 4294967296.f;
    p[i] = __float2bfloat16(scale * sqrtf(-2 * logf(u)) * cosf(6.2831853f * v));
  }
}

static double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

enum Kind { FORWARD, INPUT, WEIGHT };  // of x [tokens, in] and w [in, out]: x w, dy w^T, x^T dy

struct Product {
  const char* name;
  int tokens, in, out;
  Kind kind;
  bool in_float32;
};

int main(int argc, char** argv) {
  double seconds = argc > 1 ? atof(argv[1]) : 0.5;
  int kernels = argc > 2 ? atoi(argv[2]) : 8;
  CHECK(nvmlInit());
  nvmlDevice_t device;
  CHECK(nvmlDeviceGetHandleByIndex(0, &device));
  size_t most = (size_t)16384 * 14336, workspace = 64 << 20;
  __nv_bfloat16 *a, *b;
  void *c, *space;
  CHECK(cudaMalloc(&a, most * 2));
  CHECK(cudaMalloc(&b, most * 2));
  CHECK(cudaMalloc(&c, most * 4));
  CHECK(cudaMalloc(&space, workspace));
  fill<<<4096, 256>>>(a, most, 1.f, 1);
  fill<<<4096, 256>>>(b, most, 0.02f, 77);
  CHECK(cudaDeviceSynchronize());
  cublasLtHandle_t handle;
  CHECK(cublasLtCreate(&handle));
  std::vector<Product> products = {
      {"up fwd", 16384, 4096, 14336, FORWARD, false},   {"up dx", 16384, 4096, 14336, INPUT, false},
      {"up dw", 16384, 4096, 14336, WEIGHT, false},     {"up dw f32", 16384, 4096, 14336, WEIGHT, true},
      {"down fwd", 16384, 14336, 4096, FORWARD, false}, {"down dx", 16384, 14336, 4096, INPUT, false},
      {"down dw", 16384, 14336, 4096, WEIGHT, false},   {"o fwd", 16384, 4096, 4096, FORWARD, false},
      {"o dx", 16384, 4096, 4096, INPUT, false},        {"o dw", 16384, 4096, 4096, WEIGHT, false},
  };
  for (auto& p : products) {
    // Row-major C[m, n] = A[m, k] B[k, n] is column-major C^T[n, m] = B^T A^T, the layout of cuBLAS.
    int m, n, k, lda, ldb;
    cublasOperation_t ta = CUBLAS_OP_N, tb = CUBLAS_OP_N;
    if (p.kind == FORWARD) {
      m = p.tokens, n = p.out, k = p.in, lda = p.in, ldb = p.out;
    } else if (p.kind == INPUT) {
      m = p.tokens, n = p.in, k = p.out, lda = p.out, ldb = p.out, tb = CUBLAS_OP_T;
    } else {
      m = p.in, n = p.out, k = p.tokens, lda = p.in, ldb = p.out, ta = CUBLAS_OP_T;
    }
    cublasLtMatmulDesc_t what;
    CHECK(cublasLtMatmulDescCreate(&what, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    CHECK(cublasLtMatmulDescSetAttribute(what, CUBLASLT_MATMUL_DESC_TRANSA, &tb, sizeof tb));
    CHECK(cublasLtMatmulDescSetAttribute(what, CUBLASLT_MATMUL_DESC_TRANSB, &ta, sizeof ta));
    cublasLtMatrixLayout_t first, second, result;
    CHECK(cublasLtMatrixLayoutCreate(&first, CUDA_R_16BF, tb == CUBLAS_OP_N ? n : k, tb == CUBLAS_OP_N ? k : n, ldb));
    CHECK(cublasLtMatrixLayoutCreate(&second, CUDA_R_16BF, ta == CUBLAS_OP_N ? k : m, ta == CUBLAS_OP_N ? m : k, lda));
    CHECK(cublasLtMatrixLayoutCreate(&result, p.in_float32 ? CUDA_R_32F : CUDA_R_16BF, n, m, n));
    cublasLtMatmulPreference_t wish;
    CHECK(cublasLtMatmulPreferenceCreate(&wish));
    CHECK(cublasLtMatmulPreferenceSetAttribute(wish, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace, sizeof workspace));
    std::vector<cublasLtMatmulHeuristicResult_t> found(kernels);
    int count = 0;
    CHECK(cublasLtMatmulAlgoGetHeuristic(handle, what, first, second, result, result, wish, kernels, found.data(), &count));
    double operations = 2.0 * m * n * (double)k;
    for (int i = 0; i < count; i++) {
      float one = 1, zero = 0;
      auto run = [&] {
        return cublasLtMatmul(handle, what, &one, b, first, a, second, &zero, c, result, c, result, &found[i].algo, space, workspace, 0);
      };
      if (run()) {
        printf("%-10s algo %d fails\n", p.name, i);
        continue;
      }
      CHECK(cudaDeviceSynchronize());
      unsigned clock = 0;
      auto rate = [&](double duration) {  // TFLOP/s over that many seconds
        int batch = (int)(0.02 / (operations / 7e14)) + 1, done = 0;
        double began = now();
        while (now() - began < duration) {
          for (int j = 0; j < batch; j++) run();
          done += batch;
          cudaDeviceSynchronize();
        }
        double took = now() - began;
        nvmlDeviceGetClockInfo(device, NVML_CLOCK_SM, &clock);
        return done * operations / took * 1e-12;
      };
      rate(0.4 * seconds);  // until the clock settles
      double reached = rate(seconds);
      int tile = 0, stages = 0;
      unsigned short cluster = 0;
      size_t written;
      cublasLtMatmulAlgoConfigGetAttribute(&found[i].algo, CUBLASLT_ALGO_CONFIG_TILE_ID, &tile, sizeof tile, &written);
      cublasLtMatmulAlgoConfigGetAttribute(&found[i].algo, CUBLASLT_ALGO_CONFIG_STAGES_ID, &stages, sizeof stages, &written);
      cublasLtMatmulAlgoConfigGetAttribute(&found[i].algo, CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID, &cluster, sizeof cluster, &written);
      printf("%-10s algo %d tile %4d stages %3d cluster %2d   %5.1f TFLOP/s  %u MHz\n", p.name, i, tile, stages, cluster, reached, clock);
      fflush(stdout);
    }
  }
}
