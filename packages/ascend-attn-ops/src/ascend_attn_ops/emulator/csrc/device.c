/* Devices, contexts, SoC properties, versions and limits. */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "acl/acl.h"
#include "emulator.h"
#include "soc.h" /* generated for each build: EMULATOR_SOC_NAME and figures */

static uint32_t device_count = 1;
static uint64_t memory_bytes = EMULATOR_MEMORY_BYTES;
static char cann_version[64] = EMULATOR_CANN_VERSION;
static __thread int current_device = -1;
static char contexts[MAX_DEVICES]; /* only the addresses matter */

int emulator_configure(uint32_t devices, uint64_t memory, const char *cann)
{
    if (devices == 0 || devices > MAX_DEVICES) {
        return emulator_refuse(ACL_ERROR_INVALID_PARAM, "devices: found %u, allowed: 1 to %d",
                               devices, MAX_DEVICES);
    }
    device_count = devices;
    memory_bytes = memory;
    snprintf(cann_version, sizeof cann_version, "%s", cann);
    return ACL_SUCCESS;
}

int emulator_current_device(void) { return current_device < 0 ? 0 : current_device; }
uint64_t emulator_device_memory(void) { return memory_bytes; }

static aclError check_device(int32_t device)
{
    if (device >= 0 && (uint32_t)device < device_count) {
        return ACL_SUCCESS;
    }
    return emulator_refuse(ACL_ERROR_RT_INVALID_DEVICEID,
                           "device id: found %d, allowed: 0 to %u", device, device_count - 1);
}

aclError aclInit(UNUSED const char *path) { return ACL_SUCCESS; }
aclError aclFinalize(void) { return ACL_SUCCESS; }

aclError aclrtGetDeviceCount(uint32_t *count)
{
    *count = device_count;
    return ACL_SUCCESS;
}

aclError aclrtSetDevice(int32_t device)
{
    aclError error = check_device(device);
    if (error == ACL_SUCCESS) {
        current_device = device;
    }
    return error;
}

aclError aclrtResetDevice(int32_t device) { return check_device(device); }
aclError aclrtResetDeviceForce(int32_t device) { return check_device(device); }

static aclError require_context(void)
{
    if (current_device >= 0) {
        return ACL_SUCCESS;
    }
    return emulator_refuse(ACL_ERROR_RT_CONTEXT_NULL, "this thread has not set a device");
}

aclError aclrtGetDevice(int32_t *device)
{
    aclError error = require_context();
    if (error == ACL_SUCCESS) {
        *device = current_device;
    }
    return error;
}

aclError aclrtGetCurrentContext(aclrtContext *context)
{
    aclError error = require_context();
    if (error == ACL_SUCCESS) {
        *context = &contexts[current_device];
    }
    return error;
}

aclError aclrtSetCurrentContext(aclrtContext context)
{
    ptrdiff_t index = (char *)context - contexts;
    if (index < 0 || index >= MAX_DEVICES) {
        return emulator_refuse(ACL_ERROR_INVALID_PARAM, "context %p is unknown", context);
    }
    current_device = (int)index;
    return ACL_SUCCESS;
}

aclError aclrtCreateContext(aclrtContext *context, int32_t device)
{
    aclError error = aclrtSetDevice(device);
    if (error == ACL_SUCCESS) {
        *context = &contexts[device];
    }
    return error;
}

aclError aclrtDestroyContext(UNUSED aclrtContext context) { return ACL_SUCCESS; }

aclError aclrtGetPrimaryCtxState(int32_t device, uint32_t *flags, int32_t *active)
{
    if (flags != NULL) {
        *flags = 0;
    }
    *active = 1;
    return check_device(device);
}

aclError aclrtGetLogicDevIdByUserDevId(const int32_t user, int32_t *const logical)
{
    *logical = user;
    return check_device(user);
}

const char *aclrtGetSocName(void) { return EMULATOR_SOC_NAME; }

aclError aclrtGetDeviceInfo(uint32_t device, aclrtDevAttr attribute, int64_t *value)
{
    switch (attribute) {
    case ACL_DEV_ATTR_AICPU_CORE_NUM: *value = EMULATOR_AI_CPUS; break;
    case ACL_DEV_ATTR_AICORE_CORE_NUM:
    case ACL_DEV_ATTR_CUBE_CORE_NUM: *value = EMULATOR_CUBE_CORES; break;
    case ACL_DEV_ATTR_VECTOR_CORE_NUM: *value = EMULATOR_VECTOR_CORES; break;
    case ACL_DEV_ATTR_UBUF_PER_VECTOR_CORE: *value = EMULATOR_UB_BYTES; break;
    case ACL_DEV_ATTR_TOTAL_GLOBAL_MEM_SIZE: *value = (int64_t)memory_bytes; break;
    case ACL_DEV_ATTR_L2_CACHE_SIZE: *value = EMULATOR_L2_BYTES; break;
    case ACL_DEV_ATTR_NPU_ARCH: *value = EMULATOR_NPU_ARCH; break;
    default: *value = 0; break; /* not virtual, one server, first chip */
    }
    return check_device((int32_t)device);
}

aclError aclGetDeviceCapability(uint32_t device, aclDeviceInfo info, int64_t *value)
{
    switch (info) {
    case ACL_DEVICE_INFO_AI_CORE_NUM: *value = EMULATOR_CUBE_CORES; break;
    case ACL_DEVICE_INFO_VECTOR_CORE_NUM: *value = EMULATOR_VECTOR_CORES; break;
    case ACL_DEVICE_INFO_L2_SIZE: *value = EMULATOR_L2_BYTES; break;
    default:
        return emulator_refuse(ACL_ERROR_INVALID_PARAM, "device capability %d", (int)info);
    }
    return check_device((int32_t)device);
}

aclError aclrtDeviceCanAccessPeer(int32_t *can, int32_t device, int32_t peer)
{
    *can = device != peer;
    return ACL_SUCCESS;
}

aclError aclrtDeviceEnablePeerAccess(int32_t peer, UNUSED uint32_t flags)
{
    return check_device(peer);
}

aclError aclrtDeviceGetBareTgid(int32_t *process)
{
    *process = getpid();
    return ACL_SUCCESS;
}

/* Core limits: what torch.npu.set_device_limit and set_stream_limit change. */
static uint32_t limits[2] = {EMULATOR_CUBE_CORES, EMULATOR_VECTOR_CORES};
static const uint32_t all_cores[2] = {EMULATOR_CUBE_CORES, EMULATOR_VECTOR_CORES};

static aclError set_limit(aclrtDevResLimitType type, uint32_t value)
{
    if ((unsigned)type > 1 || value == 0 || value > all_cores[type]) {
        return emulator_refuse(ACL_ERROR_INVALID_PARAM,
                               "core limit %d: found %u, allowed: 1 to the SoC's cores", (int)type,
                               value);
    }
    limits[type] = value;
    return ACL_SUCCESS;
}

static aclError get_limit(aclrtDevResLimitType type, uint32_t *value)
{
    if ((unsigned)type > 1) {
        return emulator_refuse(ACL_ERROR_INVALID_PARAM, "core limit %d is unknown", (int)type);
    }
    *value = limits[type];
    return ACL_SUCCESS;
}

aclError aclrtGetDeviceResLimit(UNUSED int32_t device, aclrtDevResLimitType type, uint32_t *value)
{
    return get_limit(type, value);
}

aclError aclrtSetDeviceResLimit(UNUSED int32_t device, aclrtDevResLimitType type, uint32_t value)
{
    return set_limit(type, value);
}

aclError aclrtResetDeviceResLimit(UNUSED int32_t device)
{
    memcpy(limits, all_cores, sizeof limits);
    return ACL_SUCCESS;
}

aclError aclrtGetResInCurrentThread(aclrtDevResLimitType type, uint32_t *value)
{
    return get_limit(type, value);
}

aclError aclrtGetStreamResLimit(UNUSED aclrtStream stream, aclrtDevResLimitType type,
                                uint32_t *value)
{
    return get_limit(type, value);
}

aclError aclrtSetStreamResLimit(UNUSED aclrtStream stream, aclrtDevResLimitType type,
                                uint32_t value)
{
    return set_limit(type, value);
}

aclError aclrtResetStreamResLimit(UNUSED aclrtStream stream)
{
    return aclrtResetDeviceResLimit(0);
}

aclError aclrtUseStreamResInCurrentThread(UNUSED aclrtStream stream) { return ACL_SUCCESS; }
aclError aclrtUnuseStreamResInCurrentThread(UNUSED aclrtStream stream) { return ACL_SUCCESS; }

/* Settings that change nothing here: one kind of arithmetic, no time-outs. */
aclError aclrtSetDeviceSatMode(UNUSED aclrtFloatOverflowMode mode) { return ACL_SUCCESS; }
aclError aclrtSetOpExecuteTimeOut(UNUSED uint32_t seconds) { return ACL_SUCCESS; }
aclError aclrtSetOpWaitTimeout(UNUSED uint32_t seconds) { return ACL_SUCCESS; }

static int64_t system_parameters[16];

static int64_t *system_parameter(aclSysParamOpt option)
{
    return (unsigned)option < 16 ? &system_parameters[option] : NULL;
}

static aclError get_parameter(aclSysParamOpt option, int64_t *value)
{
    int64_t *slot = system_parameter(option);
    if (slot == NULL) {
        return emulator_refuse(ACL_ERROR_INVALID_PARAM, "system parameter %d", (int)option);
    }
    *value = *slot;
    return ACL_SUCCESS;
}

static aclError set_parameter(aclSysParamOpt option, int64_t value)
{
    int64_t *slot = system_parameter(option);
    if (slot == NULL) {
        return emulator_refuse(ACL_ERROR_INVALID_PARAM, "system parameter %d", (int)option);
    }
    *slot = value;
    return ACL_SUCCESS;
}

aclError aclrtGetSysParamOpt(aclSysParamOpt option, int64_t *value)
{
    return get_parameter(option, value);
}

aclError aclrtCtxGetSysParamOpt(aclSysParamOpt option, int64_t *value)
{
    return get_parameter(option, value);
}

aclError aclrtSetSysParamOpt(aclSysParamOpt option, int64_t value)
{
    return set_parameter(option, value);
}

aclError aclrtCtxSetSysParamOpt(aclSysParamOpt option, int64_t value)
{
    return set_parameter(option, value);
}

aclError aclrtPeekAtLastError(UNUSED aclrtLastErrLevel level) { return ACL_SUCCESS; }
aclError aclrtGetLastError(UNUSED aclrtLastErrLevel level) { return ACL_SUCCESS; }

aclError aclsysGetCANNVersion(UNUSED aclCANNPackageName name, aclCANNPackageVersion *version)
{
    memset(version, 0, sizeof *version);
    snprintf(version->version, sizeof version->version, "%s", cann_version);
    return ACL_SUCCESS;
}

aclError aclsysGetVersionStr(UNUSED char *package, char *version)
{
    strcpy(version, cann_version); /* the caller's buffer has no stated size; ours is 64 */
    return ACL_SUCCESS;
}

void aclAppLog(UNUSED aclLogLevel level, UNUSED const char *function, UNUSED const char *file,
               UNUSED uint32_t line, UNUSED const char *format, ...)
{
}
