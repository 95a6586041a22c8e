/* The handles of libopapi.so. Python reads them through ctypes structures of the same layout
 * (emulator/abi.py); emulator_handle_size() lets it check that. */
#ifndef ASCEND_EMULATOR_OPAPI_H
#define ASCEND_EMULATOR_OPAPI_H

#include "acl/acl.h"
#include "emulator.h"

#define MAX_RANK 16

/* Codes of aclnn calls (CANN document "aclnn return codes"). */
#define ACLNN_NULL_POINTER 161001
#define ACLNN_INVALID 161002
#define ACLNN_INNER 561000
#define ACLNN_NOT_EMULATED 561103

enum handle_kind {
    HANDLE_NONE,
    HANDLE_TENSOR,
    HANDLE_SCALAR,
    HANDLE_INT_ARRAY,
    HANDLE_FLOAT_ARRAY,
    HANDLE_BOOL_ARRAY,
    HANDLE_TENSOR_LIST,
    HANDLE_SCALAR_LIST,
    HANDLE_EXECUTOR,
    HANDLE_KINDS
};

struct aclTensor {
    int32_t dtype, format;
    int32_t rank, storage_rank;
    int64_t dims[MAX_RANK], strides[MAX_RANK], storage_dims[MAX_RANK];
    int64_t offset;
    void *data;
};

struct aclScalar {
    int32_t dtype, unused;
    unsigned char value[16];
};

/* aclIntArray, aclFloatArray, aclBoolArray, aclTensorList and aclScalarList. */
struct array {
    uint64_t size;
    void *values;
};

typedef struct aclTensor aclTensor;
typedef struct aclScalar aclScalar;
typedef struct aclOpExecutor aclOpExecutor;

/* The set of handles that exist: every handle that a caller passes is looked up here. */
bool emulator_add_handle(const void *handle, enum handle_kind kind);
bool emulator_remove_handle(const void *handle, enum handle_kind kind);
enum handle_kind emulator_handle_kind(const void *handle);
uint64_t emulator_live_handles(int kind);
uint64_t emulator_handle_size(int kind);

extern const char *const emulator_operator_names[];
extern const int emulator_operator_count;
extern void *emulator_slots[];

/* Text of the arguments of a call that nobody knows the signature of (dump mode). */
void emulator_describe(char *text, size_t room, const uint64_t *registers, const uint64_t *stack);

#endif
