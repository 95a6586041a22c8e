/* The older interfaces, through which torch_npu runs operators without an aclnn form (GE single
 * operators), dumps and profiles. They are not emulated: operators fail with their name, what only
 * observes does nothing. */
#include "acl/acl.h"
#include "acl/acl_op_compiler.h"
#include "emulator.h"

/* Only the addresses matter: they are handed back to the functions below. */
static char attributes, description, buffer;

aclopAttr *aclopCreateAttr(void) { return (aclopAttr *)&attributes; }
void aclopDestroyAttr(UNUSED const aclopAttr *attr) {}

#define ATTRIBUTE(kind, ...)                                                                       \
    aclError aclopSetAttr##kind(UNUSED aclopAttr *attr, UNUSED const char *name, __VA_ARGS__)      \
    {                                                                                              \
        return ACL_SUCCESS;                                                                        \
    }
ATTRIBUTE(Bool, UNUSED uint8_t value)
ATTRIBUTE(DataType, UNUSED aclDataType value)
ATTRIBUTE(Float, UNUSED float value)
ATTRIBUTE(Int, UNUSED int64_t value)
ATTRIBUTE(String, UNUSED const char *value)
ATTRIBUTE(ListBool, UNUSED int count, UNUSED const uint8_t *values)
ATTRIBUTE(ListFloat, UNUSED int count, UNUSED const float *values)
ATTRIBUTE(ListInt, UNUSED int count, UNUSED const int64_t *values)
ATTRIBUTE(ListListInt, UNUSED int count, UNUSED const int *counts,
          UNUSED const int64_t *const values[])

aclTensorDesc *aclCreateTensorDesc(UNUSED aclDataType type, UNUSED int rank,
                                   UNUSED const int64_t *dims, UNUSED aclFormat format)
{
    return (aclTensorDesc *)&description;
}

void aclDestroyTensorDesc(UNUSED const aclTensorDesc *desc) {}

aclDataBuffer *aclCreateDataBuffer(UNUSED void *data, UNUSED size_t size)
{
    return (aclDataBuffer *)&buffer;
}

aclError aclDestroyDataBuffer(UNUSED const aclDataBuffer *data) { return ACL_SUCCESS; }
void aclSetTensorDescName(UNUSED aclTensorDesc *desc, UNUSED const char *name) {}

aclError aclSetTensorFormat(UNUSED aclTensorDesc *desc, UNUSED aclFormat format)
{
    return ACL_SUCCESS;
}

aclError aclSetTensorPlaceMent(UNUSED aclTensorDesc *desc, UNUSED aclMemType type)
{
    return ACL_SUCCESS;
}

aclError aclSetTensorShape(UNUSED aclTensorDesc *desc, UNUSED int rank, UNUSED const int64_t *dims)
{
    return ACL_SUCCESS;
}

static aclError not_emulated(const char *type)
{
    return emulator_refuse(ACL_ERROR_RT_FEATURE_NOT_SUPPORT,
                           "operator %s has no aclnn form; the emulator runs aclnn operators only",
                           type);
}

aclError aclopCompileAndExecute(const char *type, UNUSED int inputs,
                                UNUSED const aclTensorDesc *const input_descs[],
                                UNUSED const aclDataBuffer *const input_buffers[],
                                UNUSED int outputs,
                                UNUSED const aclTensorDesc *const output_descs[],
                                UNUSED aclDataBuffer *const output_buffers[],
                                UNUSED const aclopAttr *attr, UNUSED aclopEngineType engine,
                                UNUSED aclopCompileType compile, UNUSED const char *path,
                                UNUSED aclrtStream stream)
{
    return not_emulated(type);
}

aclError aclopCompileAndExecuteV2(const char *type, UNUSED int inputs,
                                  UNUSED aclTensorDesc *input_descs[],
                                  UNUSED aclDataBuffer *input_buffers[], UNUSED int outputs,
                                  UNUSED aclTensorDesc *output_descs[],
                                  UNUSED aclDataBuffer *output_buffers[], UNUSED aclopAttr *attr,
                                  UNUSED aclopEngineType engine, UNUSED aclopCompileType compile,
                                  UNUSED const char *path, UNUSED aclrtStream stream)
{
    return not_emulated(type);
}

aclError aclSetCompileopt(UNUSED aclCompileOpt option, UNUSED const char *value)
{
    return ACL_SUCCESS;
}

size_t aclGetCompileoptSize(UNUSED aclCompileOpt option) { return 1; }

aclError aclGetCompileopt(UNUSED aclCompileOpt option, char *value, size_t length)
{
    if (length > 0) {
        value[0] = '\0';
    }
    return ACL_SUCCESS;
}

aclError aclmdlInitDump(void) { return ACL_SUCCESS; }
aclError aclmdlSetDump(UNUSED const char *path) { return ACL_SUCCESS; }
aclError aclmdlFinalizeDump(void) { return ACL_SUCCESS; }

/* The profiler's entry points; no public header declares them. */
int32_t MsprofRegisterCallback(uint32_t module, void *handle);
int32_t MsprofReportApi(uint32_t aging, const void *api);
int32_t MsprofReportCompactInfo(uint32_t aging, const void *data, uint32_t length);
int32_t MsprofReportAdditionalInfo(uint32_t aging, const void *data, uint32_t length);
uint64_t MsprofGetHashId(const char *text, size_t length);
uint64_t MsprofSysCycleTime(void);

int32_t MsprofRegisterCallback(UNUSED uint32_t module, UNUSED void *handle) { return 0; }
int32_t MsprofReportApi(UNUSED uint32_t aging, UNUSED const void *api) { return 0; }

int32_t MsprofReportCompactInfo(UNUSED uint32_t aging, UNUSED const void *data,
                                UNUSED uint32_t length)
{
    return 0;
}

int32_t MsprofReportAdditionalInfo(UNUSED uint32_t aging, UNUSED const void *data,
                                   UNUSED uint32_t length)
{
    return 0;
}

uint64_t MsprofGetHashId(UNUSED const char *text, UNUSED size_t length) { return 0; }
uint64_t MsprofSysCycleTime(void) { return 0; }
