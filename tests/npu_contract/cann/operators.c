/* What stands around the aclnn operators in libopapi.so. The trace shows, before each `call`, what it was handed:
 *     tensor <aclDataType> <sizes, comma-separated>
 *     ints <values, comma-separated>
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "stub.h"

static void note_numbers(const char *start, const int64_t *values, uint64_t count) {
    char line[2048];
    int used = snprintf(line, sizeof line, "%s", start);
    for (uint64_t i = 0; i < count && used < (int)sizeof line - 32; i++)
        used += snprintf(line + used, sizeof line - used, "%s%ld", i ? "," : " ", (long)values[i]);
    cann_stub_note(line);
}

void *aclCreateTensor(const int64_t *sizes, uint64_t dimensions, int type, const int64_t *strides, int64_t offset,
                      int format, const int64_t *storage, uint64_t storage_dimensions, void *data) {
    char start[64];
    snprintf(start, sizeof start, "tensor %d", type);
    note_numbers(start, sizes, dimensions);
    return malloc(16);
}

void *aclCreateIntArray(const int64_t *values, uint64_t count) {
    note_numbers("ints", values, count);
    return malloc(16);
}

#define MAKE_AND_RETURN(name) \
    void *name(void) { return malloc(16); }
#define RELEASE(name) \
    long name(void) { return CANN_OK; }

MAKE_AND_RETURN(aclCreateTensorList) MAKE_AND_RETURN(aclCreateFloatArray) MAKE_AND_RETURN(aclCreateBoolArray)
MAKE_AND_RETURN(aclCreateScalar) MAKE_AND_RETURN(aclCreateScalarList)
RELEASE(aclDestroyTensor) RELEASE(aclDestroyTensorList) RELEASE(aclDestroyIntArray) RELEASE(aclDestroyFloatArray)
RELEASE(aclDestroyBoolArray) RELEASE(aclDestroyScalar) RELEASE(aclDestroyScalarList)
RELEASE(aclDestroyAclOpExecutor)
RELEASE(InitHugeMemThreadLocal) RELEASE(UnInitHugeMemThreadLocal) RELEASE(ReleaseHugeMem)
