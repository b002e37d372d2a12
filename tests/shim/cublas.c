// The functions of cuBLAS that are called by address, as cublas_api.h declares them; what they do is Python's business.
#include <stddef.h>

typedef int (*tgh_create)(void** handle);
typedef int (*tgh_destroy)(void* handle);
typedef int (*tgh_stream)(void* handle, void* stream);
typedef int (*tgh_workspace)(void* handle, void* workspace, size_t size);
typedef int (*tgh_mode)(void* handle, int mode);
typedef int (*tgh_multiply)(void* handle, int transa, int transb, int m, int n, int k, const void* alpha, const void* a,
                            int atype, int lda, long long stride_a, const void* b, int btype, int ldb,
                            long long stride_b, const void* beta, void* c, int ctype, int ldc, long long stride_c,
                            int count, int compute, int algorithm);

static tgh_create create;
static tgh_destroy destroy;
static tgh_stream set_stream;
static tgh_workspace set_workspace;
static tgh_mode set_mode;
static tgh_multiply multiply;

void tgh_cublas(tgh_create one, tgh_destroy two, tgh_stream three, tgh_workspace four, tgh_mode five,
                tgh_multiply six) {
    create = one;
    destroy = two;
    set_stream = three;
    set_workspace = four;
    set_mode = five;
    multiply = six;
}

int cublasCreate_v2(void** handle) { return create(handle); }
int cublasDestroy_v2(void* handle) { return destroy(handle); }
int cublasSetStream_v2(void* handle, void* stream) { return set_stream(handle, stream); }
int cublasSetWorkspace_v2(void* handle, void* workspace, size_t size) { return set_workspace(handle, workspace, size); }
int cublasSetMathMode(void* handle, int mode) { return set_mode(handle, mode); }
int cublasGemmStridedBatchedEx(void* handle, int transa, int transb, int m, int n, int k, const void* alpha,
                               const void* a, int atype, int lda, long long stride_a, const void* b, int btype, int ldb,
                               long long stride_b, const void* beta, void* c, int ctype, int ldc, long long stride_c,
                               int count, int compute, int algorithm) {
    return multiply(handle, transa, transb, m, n, k, alpha, a, atype, lda, stride_a, b, btype, ldb, stride_b, beta, c,
                    ctype, ldc, stride_c, count, compute, algorithm);
}
