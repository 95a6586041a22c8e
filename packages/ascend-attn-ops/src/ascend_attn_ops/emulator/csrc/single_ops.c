/* The older interface, through which torch_npu runs operators that have no aclnn form (GE single
 * operators). Those that only change a layout are emulated, for npu_format_cast; others fail with
 * their name. Attributes, dumps and profiles do nothing. */
#include <stdlib.h>
#include <string.h>

#include "acl/acl.h"
#include "acl/acl_op_compiler.h"
#include "emulator.h"

enum { MAX_RANK = 16, NZ_ROWS = 16, NZ_BYTES = 32 };

struct aclTensorDesc {
    aclDataType type;
    aclFormat storage_format;
    int rank;
    int64_t dims[MAX_RANK];
};

struct aclDataBuffer {
    void *data;
    size_t size;
};

static char attributes; /* only its address matters: attributes change nothing here */

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

aclTensorDesc *aclCreateTensorDesc(aclDataType type, int rank, const int64_t *dims,
                                   aclFormat format)
{
    aclTensorDesc *desc = rank > MAX_RANK ? NULL : calloc(1, sizeof *desc);
    if (desc == NULL) {
        emulator_set_error("aclCreateTensorDesc: rank %d, allowed: 0 to %d", rank, MAX_RANK);
        return NULL;
    }
    desc->type = type;
    desc->storage_format = format;
    desc->rank = rank;
    if (rank > 0) {
        memcpy(desc->dims, dims, sizeof *dims * (size_t)rank);
    }
    return desc;
}

void aclDestroyTensorDesc(const aclTensorDesc *desc) { free((void *)desc); }
void aclSetTensorDescName(UNUSED aclTensorDesc *desc, UNUSED const char *name) {}

aclError aclSetTensorFormat(aclTensorDesc *desc, aclFormat format)
{
    desc->storage_format = format;
    return ACL_SUCCESS;
}

aclError aclSetTensorPlaceMent(UNUSED aclTensorDesc *desc, UNUSED aclMemType type)
{
    return ACL_SUCCESS;
}

/* The shape of the storage; the conversions follow from the logical one. */
aclError aclSetTensorShape(UNUSED aclTensorDesc *desc, UNUSED int rank, UNUSED const int64_t *dims)
{
    return ACL_SUCCESS;
}

aclDataBuffer *aclCreateDataBuffer(void *data, size_t size)
{
    aclDataBuffer *buffer = malloc(sizeof *buffer);
    if (buffer != NULL) {
        *buffer = (aclDataBuffer){data, size};
    }
    return buffer;
}

aclError aclDestroyDataBuffer(const aclDataBuffer *buffer)
{
    free((void *)buffer);
    return ACL_SUCCESS;
}

/* A copy between two layouts of a matrix, or of a stack of them. */
struct conversion {
    const char *source;
    char *target;
    size_t size, width; /* bytes of the target, of an element */
    int64_t stack, rows, columns;
    bool from_nz, to_nz;
};

static size_t element_width(aclDataType type)
{
    switch (type) {
    case ACL_DOUBLE:
    case ACL_INT64:
    case ACL_UINT64: return 8;
    case ACL_FLOAT:
    case ACL_INT32:
    case ACL_UINT32: return 4;
    case ACL_FLOAT16:
    case ACL_BF16:
    case ACL_INT16:
    case ACL_UINT16: return 2;
    default: return 1;
    }
}

/* Place of element (s, i, j): row by row, or in pieces of 16 rows by 32 bytes. */
static size_t place(const struct conversion *c, bool nz, int64_t s, int64_t i, int64_t j)
{
    if (!nz) {
        return (size_t)((s * c->rows + i) * c->columns + j);
    }
    int64_t wide = c->width == 1 ? NZ_BYTES : NZ_ROWS;
    int64_t blocks = (c->rows + NZ_ROWS - 1) / NZ_ROWS, pieces = (c->columns + wide - 1) / wide;
    int64_t piece = (s * pieces + j / wide) * blocks + i / NZ_ROWS;
    return (size_t)((piece * NZ_ROWS + i % NZ_ROWS) * wide + j % wide);
}

static int run_conversion(void *argument)
{
    const struct conversion *c = argument;
    if (c->to_nz) {
        memset(c->target, 0, c->size);
    }
    for (int64_t s = 0; s < c->stack; s++) {
        for (int64_t i = 0; i < c->rows; i++) {
            for (int64_t j = 0; j < c->columns; j++) {
                memcpy(c->target + place(c, c->to_nz, s, i, j) * c->width,
                       c->source + place(c, c->from_nz, s, i, j) * c->width, c->width);
            }
        }
    }
    return ACL_SUCCESS;
}

static bool plain(aclFormat format)
{
    return format == ACL_FORMAT_ND || format == ACL_FORMAT_NCHW || format == ACL_FORMAT_NHWC ||
           format == ACL_FORMAT_NCDHW || format == ACL_FORMAT_NCL;
}

static aclError convert(const char *type, const aclTensorDesc *from, const aclDataBuffer *source,
                        const aclTensorDesc *to, const aclDataBuffer *target, aclrtStream stream)
{
    bool from_nz = from->storage_format == ACL_FORMAT_FRACTAL_NZ;
    bool to_nz = to->storage_format == ACL_FORMAT_FRACTAL_NZ;
    if ((!from_nz && !plain(from->storage_format)) || (!to_nz && !plain(to->storage_format))) {
        return emulator_refuse(ACL_ERROR_RT_FEATURE_NOT_SUPPORT,
                               "%s from format %d to %d is not emulated, only plain and FRACTAL_NZ",
                               type, (int)from->storage_format, (int)to->storage_format);
    }
    struct conversion *c = malloc(sizeof *c);
    if (c == NULL) {
        return emulator_refuse(ACL_ERROR_BAD_ALLOC, "the host is out of memory");
    }
    int rank = from->rank;
    *c = (struct conversion){source->data, target->data, target->size, element_width(from->type),
                             1, rank > 1 ? from->dims[rank - 2] : 1,
                             rank > 0 ? from->dims[rank - 1] : 1, from_nz, to_nz};
    for (int i = 0; i < rank - 2; i++) {
        c->stack *= from->dims[i];
    }
    emulator_count(COUNT_launches, 1);
    return emulator_submit(stream, (struct emulator_task){run_conversion, free, c});
}

static aclError run_operator(const char *type, int inputs, aclTensorDesc *const *input_descs,
                             aclDataBuffer *const *input_buffers, int outputs,
                             aclTensorDesc *const *output_descs,
                             aclDataBuffer *const *output_buffers, aclrtStream stream)
{
    bool layout = strcmp(type, "Identity") == 0 || strcmp(type, "TransData") == 0;
    if (!layout || inputs < 1 || outputs != 1) {
        return emulator_refuse(
            ACL_ERROR_RT_FEATURE_NOT_SUPPORT,
            "operator %s has no aclnn form; of those only layout changes are emulated", type);
    }
    return convert(type, input_descs[0], input_buffers[0], output_descs[0], output_buffers[0],
                   stream);
}

aclError aclopCompileAndExecute(const char *type, int inputs,
                                const aclTensorDesc *const input_descs[],
                                const aclDataBuffer *const input_buffers[], int outputs,
                                const aclTensorDesc *const output_descs[],
                                aclDataBuffer *const output_buffers[],
                                UNUSED const aclopAttr *attr, UNUSED aclopEngineType engine,
                                UNUSED aclopCompileType compile, UNUSED const char *path,
                                aclrtStream stream)
{
    return run_operator(type, inputs, (aclTensorDesc *const *)input_descs,
                        (aclDataBuffer *const *)input_buffers, outputs,
                        (aclTensorDesc *const *)output_descs, output_buffers, stream);
}

aclError aclopCompileAndExecuteV2(const char *type, int inputs, aclTensorDesc *input_descs[],
                                  aclDataBuffer *input_buffers[], int outputs,
                                  aclTensorDesc *output_descs[], aclDataBuffer *output_buffers[],
                                  UNUSED aclopAttr *attr, UNUSED aclopEngineType engine,
                                  UNUSED aclopCompileType compile, UNUSED const char *path,
                                  aclrtStream stream)
{
    return run_operator(type, inputs, input_descs, input_buffers, outputs, output_descs,
                        output_buffers, stream);
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

/* HCCL is not emulated, but torch_npu passes it settings when it starts. */
int HcclSetConfig(int option, int value);
int HcclSetConfig(UNUSED int option, UNUSED int value) { return 0; }

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
