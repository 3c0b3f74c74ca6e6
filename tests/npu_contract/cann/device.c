/* The device that torch_npu finds: one that refuses memory, or one whose memory is the host's.
 *
 * CANN_STUB_MODE     fake | host
 * CANN_STUB_DEVICES  how many devices there are (1)
 * CANN_STUB_SOC      the chip's name (Ascend910B3)
 * CANN_STUB_CANN     the version of CANN reported (9.0.0)
 * CANN_STUB_LOG      if set, every refused call, and every launch, on stderr
 *
 * Only functions that torch_npu insists on are here; everything else refuses (see stubs.py).
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "stub.h"

static const char *setting(const char *name, const char *otherwise) {
    const char *value = getenv(name);
    return value && *value ? value : otherwise;
}

static int in_mode(const char *mode) { return strcmp(setting("CANN_STUB_MODE", "fake"), mode) == 0; }

static uint32_t devices(void) {
    return (uint32_t)atoi(setting("CANN_STUB_DEVICES", "1"));
}

/* Through torch_npu's queue an operator that fails is silent, and what it left would pass for a result. */
static int is_host(void) { return in_mode("host") && strcmp(setting("TASK_QUEUE_ENABLE", "1"), "0") == 0; }

long cann_stub_if_host(void) { return is_host() ? CANN_OK : CANN_REFUSED; }

void cann_stub_said(const char *name) {
    if (getenv("CANN_STUB_LOG")) fprintf(stderr, "[cann stub] %s\n", name);
}

/* ---- small forms of answers ---- */

#define ACCEPT(name) \
    long name(void) { return CANN_OK; }
#define IF_HOST(name) \
    long name(void) { return cann_stub_if_host(); }
/* A handle that nobody looks into, but whose address tells it from others. */
#define MAKE(name) \
    long name(void **handle) { *handle = malloc(16); return CANN_OK; }
#define MAKE_AND_RETURN(name) \
    void *name(void) { return malloc(16); }
/* For queries about work: it is always done. */
#define ANSWER_SECOND(name, value) \
    long name(void *what, int32_t *answer) { if (answer) *answer = value; return CANN_OK; }

/* ---- start and discovery ---- */

ACCEPT(aclInit) ACCEPT(aclFinalize) ACCEPT(aclAppLog)
ACCEPT(aclmdlInitDump) ACCEPT(aclmdlSetDump) ACCEPT(aclmdlFinalizeDump)

static __thread int32_t current = -1;

long aclrtGetDeviceCount(uint32_t *count) { *count = devices(); return CANN_OK; }
long aclrtSetDevice(int32_t device) {
    if (device < 0 || (uint32_t)device >= devices()) return CANN_NO_DEVICE;
    current = device;
    return CANN_OK;
}
long aclrtGetDevice(int32_t *device) {
    if (current < 0) return CANN_NO_CONTEXT;
    *device = current;
    return CANN_OK;
}
ACCEPT(aclrtResetDevice)
long aclrtGetCurrentContext(void **context) { static char one; *context = &one; return CANN_OK; }
ACCEPT(aclrtSetCurrentContext)
const char *aclrtGetSocName(void) { return setting("CANN_STUB_SOC", "Ascend910B3"); }
const char *aclGetRecentErrMsg(void) { return "stub CANN: there is no NPU on this machine"; }
long aclrtGetMemInfo(int kind, size_t *unused, size_t *total) {
    if (unused) *unused = (size_t)64 << 30;
    if (total) *total = (size_t)64 << 30;
    return CANN_OK;
}
long aclGetDeviceCapability(uint32_t device, int kind, int64_t *value) { if (value) *value = 24; return CANN_OK; }
long aclrtGetDeviceInfo(uint32_t device, int kind, int64_t *value) { if (value) *value = 24; return CANN_OK; }
long aclsysGetCANNVersion(int package, char *version) {
    if (version) strcpy(version, setting("CANN_STUB_CANN", "9.0.0"));
    return CANN_OK;
}
long aclsysGetVersionStr(const char *package, char *version) {
    if (version) strcpy(version, setting("CANN_STUB_CANN", "9.0.0"));
    return CANN_OK;
}

/* ---- options ---- */

ACCEPT(aclrtSetDeviceSatMode) ACCEPT(aclrtSetOpExecuteTimeOut) ACCEPT(aclrtSetOpWaitTimeout)
ACCEPT(aclSetCompileopt)
long aclGetCompileopt(int option, char *value, size_t length) { if (value && length) *value = 0; return CANN_OK; }
size_t aclGetCompileoptSize(int option) { return 1; }
long aclrtGetSysParamOpt(int option, int64_t *value) { if (value) *value = 0; return CANN_OK; }
ACCEPT(aclrtSetSysParamOpt) ACCEPT(aclrtCtxSetSysParamOpt)

/* ---- streams and events: handles, and work that is always done ---- */

MAKE(aclrtCreateStream) MAKE(aclrtCreateStreamWithConfig)
ACCEPT(aclrtDestroyStream) ACCEPT(aclrtDestroyStreamForce)
ACCEPT(aclrtSynchronizeStream) ACCEPT(aclrtSynchronizeStreamWithTimeout)
ACCEPT(aclrtSynchronizeDevice) ACCEPT(aclrtSynchronizeDeviceWithTimeout)
MAKE(aclrtCreateEventWithFlag) MAKE(aclrtCreateEventExWithFlag)
ACCEPT(aclrtDestroyEvent) ACCEPT(aclrtRecordEvent) ACCEPT(aclrtResetEvent) ACCEPT(aclrtStreamWaitEvent)
ACCEPT(aclrtSynchronizeEvent) ACCEPT(aclrtProcessReport)
long aclrtEventElapsedTime(float *milliseconds, void *start, void *end) { *milliseconds = 0; return CANN_OK; }
ANSWER_SECOND(aclrtStreamQuery, 0)
ANSWER_SECOND(aclrtQueryEventStatus, 1)
ANSWER_SECOND(aclQueryEventRecordedStatus, 1)
ANSWER_SECOND(aclrtQueryEventWaitStatus, 1)

/* ---- memory ---- */

static long allocate(void **memory, size_t size, size_t alignment) {
    if (!is_host()) return CANN_REFUSED;
    if (posix_memalign(memory, alignment, size ? size : 512)) return CANN_NO_MEMORY;
    memset(*memory, 0, size);
    return CANN_OK;
}

long aclrtMalloc(void **memory, size_t size, int policy) { return allocate(memory, size, 512); }
long aclrtMallocAlign32(void **memory, size_t size, int policy) { return allocate(memory, size, 512); }
/* In whole pages: torch_npu rounds the address of what it registers up to one, and writes as many bytes from there. */
long aclrtMallocHost(void **memory, size_t size) { return allocate(memory, size, 4096); }
long aclrtFree(void *memory) { free(memory); return CANN_OK; }
long aclrtFreeHost(void *memory) { free(memory); return CANN_OK; }
long aclrtMemcpy(void *to, size_t room, const void *from, size_t size, int kind) {
    if (!is_host()) return CANN_REFUSED;
    memmove(to, from, size);
    return CANN_OK;
}
long aclrtMemcpyAsync(void *to, size_t room, const void *from, size_t size, int kind, void *stream) {
    return aclrtMemcpy(to, room, from, size, kind);
}
long aclrtMemset(void *memory, size_t room, int32_t value, size_t size) {
    if (!is_host()) return CANN_REFUSED;
    memset(memory, value, size);
    return CANN_OK;
}
long aclrtMemsetAsync(void *memory, size_t room, int32_t value, size_t size, void *stream) {
    return aclrtMemset(memory, room, value, size);
}
long aclrtHostRegister(void *memory, uint64_t size, int kind, void **device) {
    if (!is_host()) return CANN_REFUSED;
    if (device) *device = memory;
    return CANN_OK;
}
ACCEPT(aclrtHostUnregister)
IF_HOST(aclrtCmoAsync)

/* ---- operators of the older interface, compiled one by one ---- */

MAKE_AND_RETURN(aclCreateDataBuffer) MAKE_AND_RETURN(aclopCreateAttr) MAKE_AND_RETURN(aclCreateTensorDesc)
/* To clean up after a refusal must not fail again: that would end the process. */
ACCEPT(aclDestroyDataBuffer) ACCEPT(aclDestroyTensorDesc) ACCEPT(aclopDestroyAttr)
IF_HOST(aclSetTensorDescName) IF_HOST(aclSetTensorFormat) IF_HOST(aclSetTensorShape) IF_HOST(aclSetTensorPlaceMent)
IF_HOST(aclopSetAttrBool) IF_HOST(aclopSetAttrDataType) IF_HOST(aclopSetAttrFloat) IF_HOST(aclopSetAttrInt)
IF_HOST(aclopSetAttrString) IF_HOST(aclopSetAttrListBool) IF_HOST(aclopSetAttrListFloat)
IF_HOST(aclopSetAttrListInt) IF_HOST(aclopSetAttrListListInt)
IF_HOST(aclopCompileAndExecute)

/* ---- profiler ---- */

ACCEPT(MsprofRegisterCallback) ACCEPT(MsprofGetHashId) ACCEPT(MsprofSysCycleTime) ACCEPT(MsprofReportApi)
ACCEPT(MsprofReportCompactInfo) ACCEPT(MsprofReportAdditionalInfo)

/* ---- HCCL: groups exist, collectives move nothing ---- */

#define COLLECTIVE(name) CANN_CALL(Hccl##name)
COLLECTIVE(AllReduce) COLLECTIVE(AllGather) COLLECTIVE(AllGatherV) COLLECTIVE(ReduceScatter)
COLLECTIVE(ReduceScatterV) COLLECTIVE(Broadcast) COLLECTIVE(Reduce) COLLECTIVE(Scatter) COLLECTIVE(AlltoAll)
COLLECTIVE(AlltoAllV) COLLECTIVE(Send) COLLECTIVE(Recv) COLLECTIVE(BatchSendRecv)
IF_HOST(HcclGetRootInfo)
static long group(void **made) {
    if (is_host()) *made = malloc(16);
    return cann_stub_if_host();
}
long HcclCommInitRootInfo(uint32_t ranks, const void *root, uint32_t rank, void **made) { return group(made); }
long HcclCommInitRootInfoConfig(uint32_t ranks, const void *root, uint32_t rank, const void *config, void **made) {
    return group(made);
}
long HcclCommInitClusterInfoConfig(const char *file, uint32_t rank, const void *config, void **made) {
    return group(made);
}
ACCEPT(HcclSetConfig) ACCEPT(HcclCommDestroy) ACCEPT(HcclGetCommConfigCapability)
ANSWER_SECOND(HcclGetCommAsyncError, 0)
long HcclGetCommName(void *made, char *name) { if (name) strcpy(name, "stub_hccl_group"); return CANN_OK; }
