/* Creation and destruction of the handles that aclnn operators take. */
#include <stdlib.h>
#include <string.h>

#include "opapi.h"

/* Declared by CANN's aclnn/acl_meta.h, which the wheel does not ship; the forms are those of
 * op_api_common_base.h, which it does. */
aclTensor *aclCreateTensor(const int64_t *dims, uint64_t rank, aclDataType dtype,
                           const int64_t *strides, int64_t offset, aclFormat format,
                           const int64_t *storage_dims, uint64_t storage_rank, void *data);
aclScalar *aclCreateScalar(void *value, aclDataType dtype);
struct array *aclCreateIntArray(const int64_t *values, uint64_t size);
struct array *aclCreateFloatArray(const float *values, uint64_t size);
struct array *aclCreateBoolArray(const bool *values, uint64_t size);
struct array *aclCreateTensorList(const aclTensor *const *values, uint64_t size);
struct array *aclCreateScalarList(const aclScalar *const *values, uint64_t size);
int aclDestroyTensor(const aclTensor *tensor);
int aclDestroyScalar(const aclScalar *scalar);
int aclDestroyIntArray(const struct array *array);
int aclDestroyFloatArray(const struct array *array);
int aclDestroyBoolArray(const struct array *array);
int aclDestroyTensorList(const struct array *array);
int aclDestroyScalarList(const struct array *array);
int aclGetViewShape(const aclTensor *tensor, int64_t **dims, uint64_t *rank);
int aclnnNpuFormatCastCalculateSizeAndFormat(const aclTensor *source, int target_format,
                                             int additional_dtype, int64_t **dims, uint64_t *rank,
                                             int *actual_format);

static void *keep(void *handle, enum handle_kind kind)
{
    if (handle != NULL && !emulator_add_handle(handle, kind)) {
        free(handle);
        handle = NULL;
    }
    if (handle == NULL) {
        emulator_set_error("the host is out of memory");
    }
    return handle;
}

static int destroy(const void *handle, enum handle_kind kind)
{
    if (handle == NULL) {
        return ACL_SUCCESS;
    }
    if (!emulator_remove_handle(handle, kind)) {
        return emulator_refuse(ACLNN_INVALID, "destroy of %p: no such handle, or destroyed twice",
                               handle);
    }
    free((void *)handle);
    return ACL_SUCCESS;
}

aclTensor *aclCreateTensor(const int64_t *dims, uint64_t rank, aclDataType dtype,
                           const int64_t *strides, int64_t offset, aclFormat format,
                           const int64_t *storage_dims, uint64_t storage_rank, void *data)
{
    if (rank > MAX_RANK || storage_rank > MAX_RANK || (dims == NULL && rank != 0)) {
        emulator_set_error("aclCreateTensor: rank %llu, allowed: 0 to %d with dimensions",
                           (unsigned long long)rank, MAX_RANK);
        return NULL;
    }
    aclTensor *tensor = keep(calloc(1, sizeof *tensor), HANDLE_TENSOR);
    if (tensor == NULL) {
        return NULL;
    }
    tensor->dtype = (int32_t)dtype;
    tensor->format = (int32_t)format;
    tensor->rank = (int32_t)rank;
    tensor->storage_rank = (int32_t)storage_rank;
    tensor->offset = offset;
    tensor->data = data;
    int64_t step = 1;
    for (uint64_t i = rank; i-- > 0;) {
        tensor->dims[i] = dims[i];
        tensor->strides[i] = strides != NULL ? strides[i] : step;
        step *= dims[i];
    }
    for (uint64_t i = 0; storage_dims != NULL && i < storage_rank; i++) {
        tensor->storage_dims[i] = storage_dims[i];
    }
    return tensor;
}

int aclDestroyTensor(const aclTensor *tensor) { return destroy(tensor, HANDLE_TENSOR); }

static size_t scalar_size(aclDataType dtype)
{
    switch (dtype) {
    case ACL_DOUBLE:
    case ACL_INT64:
    case ACL_UINT64:
    case ACL_COMPLEX64: return 8;
    case ACL_COMPLEX128: return 16;
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

aclScalar *aclCreateScalar(void *value, aclDataType dtype)
{
    aclScalar *scalar = value == NULL ? NULL : keep(calloc(1, sizeof *scalar), HANDLE_SCALAR);
    if (scalar != NULL) {
        scalar->dtype = (int32_t)dtype;
        memcpy(scalar->value, value, scalar_size(dtype));
    }
    return scalar;
}

int aclDestroyScalar(const aclScalar *scalar) { return destroy(scalar, HANDLE_SCALAR); }

/* One block: the record and its values behind it, so that one free ends both. */
static struct array *create_array(const void *values, uint64_t size, size_t width,
                                  enum handle_kind kind)
{
    struct array *array = keep(malloc(sizeof *array + size * width), kind);
    if (array != NULL) {
        array->size = size;
        array->values = array + 1;
        if (size != 0) {
            memcpy(array->values, values, size * width);
        }
    }
    return array;
}

struct array *aclCreateIntArray(const int64_t *values, uint64_t size)
{
    return create_array(values, size, sizeof *values, HANDLE_INT_ARRAY);
}

struct array *aclCreateFloatArray(const float *values, uint64_t size)
{
    return create_array(values, size, sizeof *values, HANDLE_FLOAT_ARRAY);
}

struct array *aclCreateBoolArray(const bool *values, uint64_t size)
{
    return create_array(values, size, sizeof *values, HANDLE_BOOL_ARRAY);
}

struct array *aclCreateTensorList(const aclTensor *const *values, uint64_t size)
{
    return create_array(values, size, sizeof *values, HANDLE_TENSOR_LIST);
}

struct array *aclCreateScalarList(const aclScalar *const *values, uint64_t size)
{
    return create_array(values, size, sizeof *values, HANDLE_SCALAR_LIST);
}

int aclDestroyIntArray(const struct array *array) { return destroy(array, HANDLE_INT_ARRAY); }
int aclDestroyFloatArray(const struct array *array) { return destroy(array, HANDLE_FLOAT_ARRAY); }
int aclDestroyBoolArray(const struct array *array) { return destroy(array, HANDLE_BOOL_ARRAY); }

/* A list owns its members, as in CANN. */
static int destroy_list(const struct array *array, enum handle_kind list, enum handle_kind member)
{
    if (emulator_handle_kind(array) == list) {
        for (uint64_t i = 0; i < array->size; i++) {
            destroy(((void **)array->values)[i], member);
        }
    }
    return destroy(array, list);
}

int aclDestroyTensorList(const struct array *array)
{
    return destroy_list(array, HANDLE_TENSOR_LIST, HANDLE_TENSOR);
}

int aclDestroyScalarList(const struct array *array)
{
    return destroy_list(array, HANDLE_SCALAR_LIST, HANDLE_SCALAR);
}

int aclGetViewShape(const aclTensor *tensor, int64_t **dims, uint64_t *rank)
{
    if (emulator_handle_kind(tensor) != HANDLE_TENSOR) {
        return emulator_refuse(ACLNN_NULL_POINTER, "aclGetViewShape: no such tensor");
    }
    *rank = (uint64_t)tensor->rank;
    *dims = malloc(sizeof **dims * (*rank + 1)); /* the caller deletes it */
    if (*dims == NULL) {
        return emulator_refuse(ACLNN_INNER, "the host is out of memory");
    }
    memcpy(*dims, tensor->dims, sizeof **dims * *rank);
    return ACL_SUCCESS;
}

/* The storage that aclnnNpuFormatCast will write: its shape and format. */
int aclnnNpuFormatCastCalculateSizeAndFormat(const aclTensor *source, int target_format,
                                             UNUSED int additional_dtype, int64_t **dims,
                                             uint64_t *rank, int *actual_format)
{
    bool to_nz = target_format == ACL_FORMAT_FRACTAL_NZ;
    if (emulator_handle_kind(source) != HANDLE_TENSOR || (to_nz && source->rank < 2)) {
        return emulator_refuse(ACLNN_INVALID, "format cast: no such tensor, or not a matrix");
    }
    int last = source->rank;
    *rank = (uint64_t)last + (to_nz ? 2 : 0);
    *dims = malloc(sizeof **dims * (*rank + 1)); /* the caller deletes it */
    *actual_format = target_format;
    if (*dims == NULL) {
        return emulator_refuse(ACLNN_INNER, "the host is out of memory");
    }
    memcpy(*dims, source->dims, sizeof **dims * (size_t)last);
    if (to_nz) {
        int64_t rows = source->dims[last - 2], columns = source->dims[last - 1];
        int64_t wide = scalar_size((aclDataType)source->dtype) == 1 ? 32 : 16;
        (*dims)[last - 2] = (columns + wide - 1) / wide;
        (*dims)[last - 1] = (rows + 15) / 16;
        (*dims)[last] = 16;
        (*dims)[last + 1] = wide;
    }
    return ACL_SUCCESS;
}
