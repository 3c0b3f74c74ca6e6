/* What stands around the aclnn operators in libopapi.so. */
#include <stdlib.h>

#include "stub.h"

#define MAKE_AND_RETURN(name) \
    void *name(void) { return malloc(16); }
#define RELEASE(name) \
    long name(void) { return CANN_OK; }

MAKE_AND_RETURN(aclCreateTensor) MAKE_AND_RETURN(aclCreateIntArray) MAKE_AND_RETURN(aclCreateTensorList) MAKE_AND_RETURN(aclCreateFloatArray) MAKE_AND_RETURN(aclCreateBoolArray)
MAKE_AND_RETURN(aclCreateScalar) MAKE_AND_RETURN(aclCreateScalarList)
RELEASE(aclDestroyTensor) RELEASE(aclDestroyTensorList) RELEASE(aclDestroyIntArray) RELEASE(aclDestroyFloatArray)
RELEASE(aclDestroyBoolArray) RELEASE(aclDestroyScalar) RELEASE(aclDestroyScalarList)
RELEASE(aclDestroyAclOpExecutor)
RELEASE(InitHugeMemThreadLocal) RELEASE(UnInitHugeMemThreadLocal) RELEASE(ReleaseHugeMem)
