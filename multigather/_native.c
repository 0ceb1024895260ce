/* The repeated call of a gather, from the check of its tensors to its outputs.

   What shortcut.py generates as Python, and what it falls back to: the order of the checks and
   what they mean are written there. Nothing of torch is included or linked. Its functions come as
   Python objects, the driver's launch and some functions of torch's stable C interface as
   addresses, see native.py.

   Nothing changes an object of this file, so any number of threads may use one: a launch's
   parameters are put together on the caller's stack. That is also why no type has a tp_clear, as
   tuples have none: what makes a cycle is an object outside that was changed later. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "gather_cpu.h"

/* cuLaunchKernel: function, grid, block, shared bytes, stream, parameters, extra. */
typedef int (*driver_launch)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                             unsigned, void *, void **, void **);
typedef int32_t (*tensor_address)(void *, void **);
typedef int32_t (*tensor_number)(void *, int64_t *);

/* What fits on the stack: all parameters on a driver before CUDA 12.1, and those of a Triton
   kernel with as many buffers as it takes. More is taken from the heap. */
enum { SMALL_BLOCK = 4096, SMALL_PARAMETERS = 512 };

static PyObject *name_data_ptr, *name_numel, *name_storage, *name_nbytes, *name_offset;

/* ---- tensors ------------------------------------------------------------------------------- */

/* Where an object of exactly this type holds its at::Tensor, which torch's stable C interface
   takes a pointer to. Without a type the tensors' methods are called, which costs a call with four
   buffers 1.2 microseconds, as much as all else of it but the allocations and the launch. */
static struct {
    PyTypeObject *type;
    Py_ssize_t offset;
    tensor_address address;
    tensor_number numel, storage_bytes, storage_offset;
} layout;

static void *held_tensor(PyObject *object)
{
    return Py_TYPE(object) == layout.type ? (char *)object + layout.offset : NULL;
}

static int address_of(PyObject *tensor, uint64_t *address)
{
    void *held = held_tensor(tensor), *data;
    if (held != NULL && layout.address(held, &data) == 0) {
        *address = (uint64_t)(uintptr_t)data;
        return 0;
    }
    PyObject *number = PyObject_CallMethodNoArgs(tensor, name_data_ptr);
    if (number == NULL)
        return -1;
    *address = PyLong_AsUnsignedLongLong(number);
    Py_DECREF(number);
    return *address == (uint64_t)-1 && PyErr_Occurred() ? -1 : 0;
}

static int number_from(PyObject *object, PyObject *method, int64_t *number)
{
    PyObject *answer = PyObject_CallMethodNoArgs(object, method);
    if (answer == NULL)
        return -1;
    *number = PyLong_AsLongLong(answer);
    Py_DECREF(answer);
    return *number == -1 && PyErr_Occurred() ? -1 : 0;
}

static int numel_of(PyObject *tensor, int64_t *numel)
{
    void *held = held_tensor(tensor);
    if (held != NULL && layout.numel(held, numel) == 0)
        return 0;
    return number_from(tensor, name_numel, numel);
}

/* Bytes of a tensor's storage, and the number of the element there that it begins with. */
static int storage_of(PyObject *tensor, int64_t *bytes, int64_t *offset)
{
    void *held = held_tensor(tensor);
    if (held != NULL && layout.storage_bytes(held, bytes) == 0 &&
        layout.storage_offset(held, offset) == 0)
        return 0;
    PyObject *storage = PyObject_CallMethodNoArgs(tensor, name_storage);
    if (storage == NULL)
        return -1;
    int failed = number_from(storage, name_nbytes, bytes);
    Py_DECREF(storage);
    return failed < 0 ? -1 : number_from(tensor, name_offset, offset);
}

/* Whether a storage, which may have been freed or cut, still has so many bytes from the tensor's
   first element of so many bytes on: 1, 0, or -1 with an error. */
static int has_memory(PyObject *tensor, uint64_t item_bytes, uint64_t span)
{
    int64_t bytes, offset;
    if (span == 0)
        return 1;
    if (storage_of(tensor, &bytes, &offset) < 0)
        return -1;
    uint64_t start = (uint64_t)offset * item_bytes;
    return bytes >= 0 && start <= (uint64_t)bytes && span <= (uint64_t)bytes - start;
}

/* The address of contiguous indices, if a kernel may read so many of them there: 1, 0, or -1 with
   an error. */
static int readable_indices(PyObject *indices, int64_t numel, uint64_t item_bytes,
                            uint64_t *address)
{
    if (address_of(indices, address) < 0)
        return -1;
    if (*address & (item_bytes - 1))
        return 0;
    return has_memory(indices, item_bytes, (uint64_t)numel * item_bytes);
}

static PyObject *read_tensors(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    PyObject *type;
    Py_ssize_t offset;
    unsigned long long address, numel, storage_bytes, storage_offset;
    if (!PyArg_ParseTuple(arguments, "OnKKKK:read_tensors", &type, &offset, &address, &numel,
                          &storage_bytes, &storage_offset))
        return NULL;
    if (type != Py_None && !PyType_Check(type))
        return PyErr_Format(PyExc_TypeError, "a type or None is needed, not %R", type);
    layout.offset = offset;
    layout.address = (tensor_address)(uintptr_t)address;
    layout.numel = (tensor_number)(uintptr_t)numel;
    layout.storage_bytes = (tensor_number)(uintptr_t)storage_bytes;
    layout.storage_offset = (tensor_number)(uintptr_t)storage_offset;
    PyTypeObject *before = layout.type;
    layout.type = type == Py_None ? NULL : (PyTypeObject *)Py_NewRef(type);
    Py_XDECREF(before);
    Py_RETURN_NONE;
}

static PyObject *facts_of(PyObject *Py_UNUSED(module), PyObject *tensor)
{
    uint64_t address;
    int64_t numel, bytes, offset;
    if (address_of(tensor, &address) < 0 || numel_of(tensor, &numel) < 0 ||
        storage_of(tensor, &bytes, &offset) < 0)
        return NULL;
    return Py_BuildValue("KLLL", (unsigned long long)address, (long long)numel, (long long)bytes,
                         (long long)offset);
}

/* ---- what the calls share ------------------------------------------------------------------ */

/* Put the tensors of a call into one new tuple for its guard. Returns 1, or 0 without one if they
   are not as many as they should be, or -1 with an error. */
static int tensors_of(PyObject *indices, PyObject *const *groups, Py_ssize_t count,
                      Py_ssize_t each, PyObject **tensors)
{
    PyObject *tuple = PyTuple_New(1 + count * each);
    if (tuple == NULL)
        return -1;
    PyTuple_SET_ITEM(tuple, 0, Py_NewRef(indices));
    for (Py_ssize_t group = 0; group < count; group++) {
        PyObject *items = PySequence_Fast(groups[group], "tensors are needed");
        if (items == NULL || PySequence_Fast_GET_SIZE(items) != each) {
            Py_XDECREF(items);
            Py_DECREF(tuple);
            if (items != NULL || PyErr_ExceptionMatches(PyExc_TypeError)) {
                PyErr_Clear();
                return 0;
            }
            return -1;
        }
        for (Py_ssize_t k = 0; k < each; k++)
            PyTuple_SET_ITEM(tuple, 1 + group * each + k,
                             Py_NewRef(PySequence_Fast_GET_ITEM(items, k)));
        Py_DECREF(items);
    }
    *tensors = tuple;
    return 1;
}

/* Whether the guard lets the tensors pass: 1, 0, or -1 with an error. What is no tensor, which a
   guard says by a TypeError, does not. */
static int passes(PyObject *check, PyObject *tensors)
{
    PyObject *answer = PyObject_Call(check, tensors, NULL);
    if (answer == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_TypeError))
            return -1;
        PyErr_Clear();
        return 0;
    }
    int truth = answer == Py_True ? 1 : PyObject_IsTrue(answer);
    Py_DECREF(answer);
    return truth;
}

/* `tensors_of`, then `passes`. */
static int guarded(PyObject *check, PyObject *indices, PyObject *const *groups, Py_ssize_t count,
                   Py_ssize_t each, PyObject **tensors)
{
    int known = tensors_of(indices, groups, count, each, tensors);
    if (known == 1) {
        known = passes(check, *tensors);
        if (known != 1)
            Py_CLEAR(*tensors);
    }
    return known;
}

/* Compare the tickets that kernels took with those that the host has reported: words 0 and 1 of
   the device's fault board (faults.py), host memory that kernels write to. */
static int raise_pending(const volatile uint64_t *board, PyObject *raise)
{
    if (board[0] == board[1])
        return 0;
    PyObject *nothing = PyObject_CallNoArgs(raise);
    Py_XDECREF(nothing);
    return nothing == NULL ? -1 : 0;
}

/* Whether the current device is the one wanted: 1, 0, or -1 with an error. */
static int on_device(PyObject *current_device, long device)
{
    PyObject *number = PyObject_CallNoArgs(current_device);
    if (number == NULL)
        return -1;
    long current = PyLong_AsLong(number);
    Py_DECREF(number);
    if (current == -1 && PyErr_Occurred())
        return -1;
    return current == device;
}

/* An array of unsigned 64-bit numbers from a sequence; NULL with an error. */
static uint64_t *numbers_of(PyObject *sequence, Py_ssize_t *count)
{
    PyObject *items = PySequence_Fast(sequence, "a sequence of integers is needed");
    if (items == NULL)
        return NULL;
    *count = PySequence_Fast_GET_SIZE(items);
    uint64_t *numbers = PyMem_New(uint64_t, *count + 1);
    if (numbers == NULL)
        PyErr_NoMemory();
    for (Py_ssize_t k = 0; numbers != NULL && k < *count; k++) {
        numbers[k] = PyLong_AsUnsignedLongLong(PySequence_Fast_GET_ITEM(items, k));
        if (numbers[k] == (uint64_t)-1 && PyErr_Occurred()) {
            PyMem_Free(numbers);
            numbers = NULL;
        }
    }
    Py_DECREF(items);
    return numbers;
}

/* request.bucket_of; -1 for a number whose square has no room here. */
static long bucket_of(int64_t number)
{
    if (number < 0 || number > UINT32_MAX)
        return -1;
    long bits = 0;
    for (uint64_t square = (uint64_t)number * (uint64_t)number; square; square >>= 1)
        bits++;
    return bits >> 1;
}

/* A new output: of the row shape, strides and dtype of `output`, for so many indices. */
static PyObject *new_output(PyObject *empty, PyObject *output, int64_t numel)
{
    PyObject *row_shape = PyTuple_GET_ITEM(output, 0);
    Py_ssize_t dimensions = PyTuple_GET_SIZE(row_shape);
    PyObject *shape = PyTuple_New(1 + dimensions), *rows = PyLong_FromLongLong(numel);
    if (shape == NULL || rows == NULL) {
        Py_XDECREF(shape);
        Py_XDECREF(rows);
        return NULL;
    }
    PyTuple_SET_ITEM(shape, 0, rows);
    for (Py_ssize_t k = 0; k < dimensions; k++)
        PyTuple_SET_ITEM(shape, 1 + k, Py_NewRef(PyTuple_GET_ITEM(row_shape, k)));
    PyObject *arguments[] = {shape, PyTuple_GET_ITEM(output, 1), PyTuple_GET_ITEM(output, 2)};
    PyObject *tensor = PyObject_Vectorcall(empty, arguments, 3, NULL);
    Py_DECREF(shape);
    return tensor;
}

/* Whether `new_output` can take it. */
static int is_output(PyObject *output)
{
    return PyTuple_Check(output) && PyTuple_GET_SIZE(output) == 3 &&
           PyTuple_Check(PyTuple_GET_ITEM(output, 0));
}

/* ---- Launch -------------------------------------------------------------------------------- */

/* launch.Launch: everything of a launch but the addresses of its tensors. */
typedef struct {
    PyObject_HEAD
    driver_launch driver;
    void *function;
    unsigned grid, threads, shared_bytes;
    Py_ssize_t size;
    unsigned char *template;
    Py_ssize_t place_count, offset_count;
    uint64_t *places, *offsets;
    PyObject *device, *current_stream, *otherwise;
    /* launch.Scale: three numbers for each term; no terms if it is for one number of indices. */
    uint64_t least, most, count_place, starts_place;
    Py_ssize_t term_count;
    uint64_t *terms;
} Launch;

/* Where a launch has no place for the first tiles. */
static const uint64_t NOWHERE = UINT64_MAX;

/* Memory for one launch: its block of parameters, and their addresses. */
typedef struct {
    unsigned char *block;
    void **parameters;
    unsigned grid;
    int64_t scaled; /* to so many indices; -1: as the launch is */
    void *heap;
    void *small_parameters[SMALL_PARAMETERS];
    /* As the driver reads it: a structure's widest member is a pointer or a 64-bit integer. */
    uint64_t small_block[SMALL_BLOCK / 8];
} Memory;

static int memory_for(const Launch *launch, Memory *memory)
{
    memory->block = (unsigned char *)memory->small_block;
    memory->parameters = memory->small_parameters;
    memory->heap = NULL;
    memory->grid = launch->grid;
    memory->scaled = -1;
    if (launch->size > SMALL_BLOCK || launch->offset_count > SMALL_PARAMETERS) {
        size_t pointers = (size_t)launch->offset_count * sizeof(void *);
        memory->heap = PyMem_Malloc(pointers + (size_t)launch->size);
        if (memory->heap == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        memory->parameters = memory->heap;
        memory->block = (unsigned char *)memory->heap + pointers;
    }
    memcpy(memory->block, launch->template, (size_t)launch->size);
    return 0;
}

/* Whether a launch can be scaled to a number of indices. */
static int scales_to(const Launch *launch, int64_t count)
{
    return launch->term_count && (uint64_t)count - launch->least <= launch->most - launch->least;
}

/* Scale a launch to a number of indices: see launch.Launch.at. */
static void scale(const Launch *launch, Memory *memory, int64_t count)
{
    uint64_t grid = 0;
    for (Py_ssize_t k = 0; k < launch->term_count; k += 3) {
        const uint64_t *term = launch->terms + k;
        if (launch->starts_place != NOWHERE) {
            uint32_t start = (uint32_t)grid;
            memcpy(memory->block + launch->starts_place + 4 * (k / 3), &start, sizeof start);
        }
        grid += ((uint64_t)count * term[0] + term[1] - 1) / term[1] * term[2];
    }
    memcpy(memory->block + launch->count_place, &count, sizeof count);
    memory->grid = (unsigned)grid;
    memory->scaled = count;
}

static void put(const Launch *launch, Memory *memory, Py_ssize_t number, uint64_t address)
{
    memcpy(memory->block + launch->places[number], &address, sizeof address);
}

/* Launch in the ordinary way, which repeats what can be repeated and raises what cannot. */
static int launch_otherwise(const Launch *launch, const Memory *memory)
{
    PyObject *addresses = PyList_New(launch->place_count);
    if (addresses == NULL)
        return -1;
    for (Py_ssize_t k = 0; k < launch->place_count; k++) {
        uint64_t address;
        memcpy(&address, memory->block + launch->places[k], sizeof address);
        PyObject *number = PyLong_FromUnsignedLongLong(address);
        if (number == NULL) {
            Py_DECREF(addresses);
            return -1;
        }
        PyList_SET_ITEM(addresses, k, number);
    }
    PyObject *nothing =
        memory->scaled < 0
            ? PyObject_CallOneArg(launch->otherwise, addresses)
            : PyObject_CallFunction(launch->otherwise, "OL", addresses, (long long)memory->scaled);
    Py_DECREF(addresses);
    Py_XDECREF(nothing);
    return nothing == NULL ? -1 : 0;
}

static int launch_now(const Launch *launch, Memory *memory)
{
    PyObject *number = PyObject_CallOneArg(launch->current_stream, launch->device);
    if (number == NULL)
        return -1;
    void *stream = PyLong_AsVoidPtr(number);
    Py_DECREF(number);
    if (stream == NULL && PyErr_Occurred())
        return -1;
    for (Py_ssize_t k = 0; k < launch->offset_count; k++)
        memory->parameters[k] = memory->block + launch->offsets[k];
    int refused;
    Py_BEGIN_ALLOW_THREADS
    refused = launch->driver(launch->function, memory->grid, 1, 1, launch->threads, 1, 1,
                             launch->shared_bytes, stream, memory->parameters, NULL);
    Py_END_ALLOW_THREADS
    return refused ? launch_otherwise(launch, memory) : 0;
}

static int Launch_traverse(Launch *self, visitproc visit, void *arg)
{
    Py_VISIT(self->device);
    Py_VISIT(self->current_stream);
    Py_VISIT(self->otherwise);
    return 0;
}

static void Launch_dealloc(Launch *self)
{
    PyObject_GC_UnTrack(self);
    Py_XDECREF(self->device);
    Py_XDECREF(self->current_stream);
    Py_XDECREF(self->otherwise);
    PyMem_Free(self->template);
    PyMem_Free(self->places);
    PyMem_Free(self->offsets);
    PyMem_Free(self->terms);
    Py_TYPE(self)->tp_free(self);
}

/* Take over launch.Scale: least, most, count_place, starts_place, terms. */
static int read_scale(Launch *self, PyObject *numbers)
{
    PyObject *terms;
    unsigned long long least, most, count_place, starts_place;
    if (!PyArg_ParseTuple(numbers, "KKKKO:scale", &least, &most, &count_place, &starts_place,
                          &terms))
        return -1;
    self->terms = numbers_of(terms, &self->term_count);
    if (self->terms == NULL)
        return -1;
    self->least = least;
    self->most = most;
    self->count_place = count_place;
    self->starts_place = starts_place;
    uint64_t size = (uint64_t)self->size, room = 4 * (uint64_t)(self->term_count / 3);
    int fits = self->term_count > 0 && self->term_count % 3 == 0 && least <= most && size >= 8 &&
               count_place <= size - 8 &&
               (starts_place == NOWHERE || (room <= size && starts_place <= size - room));
    for (Py_ssize_t k = 1; fits && k < self->term_count; k += 3)
        fits = self->terms[k] > 0;
    if (!fits) {
        PyErr_Format(PyExc_ValueError, "a block of %zd bytes does not scale by %R", self->size,
                     numbers);
        return -1;
    }
    return 0;
}

static PyObject *Launch_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords)
{
    static char *names[] = {"driver",         "function", "grid",   "threads", "shared_bytes",
                            "device",         "current_stream", "template", "places", "offsets",
                            "otherwise",      "scale",    NULL};
    unsigned long long driver, function;
    unsigned grid, threads, shared_bytes;
    PyObject *device, *current_stream, *places, *offsets, *otherwise, *scale = Py_None;
    const char *template;
    Py_ssize_t size;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "KKIIIO!Oy#OOO|O:Launch", names, &driver,
                                     &function, &grid, &threads, &shared_bytes, &PyLong_Type,
                                     &device, &current_stream, &template, &size, &places, &offsets,
                                     &otherwise, &scale))
        return NULL;
    if (driver == 0)
        return PyErr_Format(PyExc_ValueError, "there is no driver to launch with");
    Launch *self = (Launch *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->driver = (driver_launch)(uintptr_t)driver;
    self->function = (void *)(uintptr_t)function;
    self->grid = grid;
    self->threads = threads;
    self->shared_bytes = shared_bytes;
    self->size = size;
    self->device = Py_NewRef(device);
    self->current_stream = Py_NewRef(current_stream);
    self->otherwise = Py_NewRef(otherwise);
    self->template = PyMem_Malloc((size_t)size + 1);
    if (self->template == NULL)
        PyErr_NoMemory();
    else {
        memcpy(self->template, template, (size_t)size);
        self->places = numbers_of(places, &self->place_count);
        if (self->places != NULL)
            self->offsets = numbers_of(offsets, &self->offset_count);
    }
    if (self->offsets == NULL) {
        Py_DECREF(self);
        return NULL;
    }
    for (Py_ssize_t k = 0; k < self->place_count + self->offset_count; k++) {
        int place = k < self->place_count;
        uint64_t start = place ? self->places[k] : self->offsets[k - self->place_count];
        uint64_t room = place ? sizeof(uint64_t) : 0;
        if (start > (uint64_t)size || (uint64_t)size - start < room) {
            Py_DECREF(self);
            return PyErr_Format(PyExc_ValueError, "a block of %zd bytes has no place at %llu",
                                size, (unsigned long long)start);
        }
    }
    if (scale != Py_None && read_scale(self, scale) < 0)
        Py_CLEAR(self);
    return (PyObject *)self;
}

static PyTypeObject Launch_type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "multigather._native.Launch",
    .tp_doc = "A launch of which only the addresses are still open, see launch.Launch.",
    .tp_basicsize = sizeof(Launch),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = Launch_new,
    .tp_traverse = (traverseproc)Launch_traverse,
    .tp_dealloc = (destructor)Launch_dealloc,
};

/* Whether it is a launch that takes the addresses of the indices and of so many buffers and
   outputs. */
static int launches_into(PyObject *object, Py_ssize_t buffers)
{
    return Py_IS_TYPE(object, &Launch_type) &&
           ((Launch *)object)->place_count == 1 + 2 * buffers;
}

/* Whether some numbers are those from 0 on, in any order. */
static int is_order(const uint64_t *numbers, Py_ssize_t count)
{
    for (Py_ssize_t k = 0; k < count; k++) {
        if (numbers[k] >= (uint64_t)count)
            return 0;
        for (Py_ssize_t other = 0; other < k; other++)
            if (numbers[other] == numbers[k])
                return 0;
    }
    return 1;
}

/* ---- LaunchNew ----------------------------------------------------------------------------- */

/* shortcut.repeated_launch: (indices, buffers) to new outputs. */
typedef struct {
    PyObject_HEAD
    vectorcallfunc call;
    PyObject *check, *launches, *empty, *current_device, *raise;
    const volatile uint64_t *board;
    long device;
    Py_ssize_t count;
    uint64_t index_bytes;
    /* Of each buffer: what its address must be as far as a mask says, its place in the launch, and
       the bytes of an element and of all its memory. */
    uint64_t *masks, *values, *places, *items, *spans;
} LaunchNew;

/* Gather from guarded tensors: new outputs, or NULL without an error if this call must go the long
   way. */
static PyObject *launch_new(const LaunchNew *self, const Launch *launch, PyObject *outputs,
                            PyObject *const *tensors, int64_t numel)
{
    uint64_t address;
    PyObject *outs = NULL;
    Memory memory;
    if (memory_for(launch, &memory) < 0)
        return NULL;
    if (launch->term_count)
        scale(launch, &memory, numel);
    for (Py_ssize_t k = 0; k < self->count; k++) {
        if (address_of(tensors[1 + k], &address) < 0 ||
            (address & self->masks[k]) != self->values[k] ||
            has_memory(tensors[1 + k], self->items[k], self->spans[k]) != 1)
            goto done;
        put(launch, &memory, 1 + 2 * (Py_ssize_t)self->places[k], address);
    }
    if (readable_indices(tensors[0], numel, self->index_bytes, &address) != 1)
        goto done;
    put(launch, &memory, 0, address);
    outs = PyTuple_New(self->count);
    for (Py_ssize_t k = 0; outs != NULL && k < self->count; k++) {
        PyObject *out = new_output(self->empty, PyTuple_GET_ITEM(outputs, k), numel);
        if (out == NULL || address_of(out, &address) < 0) {
            Py_XDECREF(out);
            Py_CLEAR(outs);
            break;
        }
        PyTuple_SET_ITEM(outs, k, out);
        put(launch, &memory, 2 + 2 * (Py_ssize_t)self->places[k], address);
    }
    if (outs != NULL && launch_now(launch, &memory) < 0)
        Py_CLEAR(outs);
done:
    PyMem_Free(memory.heap);
    return outs;
}

/* Whether a pair is a launch into buffers of this gather and what `new_output` takes for each. */
static int is_prepared(const LaunchNew *self, PyObject *pair)
{
    int fits = PyTuple_Check(pair) && PyTuple_GET_SIZE(pair) == 2 &&
               launches_into(PyTuple_GET_ITEM(pair, 0), self->count) &&
               PyTuple_Check(PyTuple_GET_ITEM(pair, 1)) &&
               PyTuple_GET_SIZE(PyTuple_GET_ITEM(pair, 1)) == self->count;
    for (Py_ssize_t k = 0; fits && k < self->count; k++)
        fits = is_output(PyTuple_GET_ITEM(PyTuple_GET_ITEM(pair, 1), k));
    return fits;
}

/* The launch and the outputs for a number of indices, as a new reference to their pair: 1, 0 if
   there are none, or -1 with an error. Under ~bucket_of(number) is one for a range of numbers,
   under the number itself one that was made for it, and may scale to it. */
static int prepared(const LaunchNew *self, int64_t numel, PyObject **pair)
{
    for (int exact = 0; exact < 2; exact++) {
        PyObject *key = PyLong_FromLongLong(exact ? numel : ~bucket_of(numel));
        if (key == NULL)
            return -1;
        PyObject *found = PyDict_GetItemWithError(self->launches, key);
        Py_DECREF(key);
        if (found == NULL && PyErr_Occurred())
            return -1;
        if (found == NULL)
            continue;
        if (!is_prepared(self, found)) {
            PyErr_Format(PyExc_TypeError, "no launch and its outputs: %R", found);
            return -1;
        }
        const Launch *launch = (Launch *)PyTuple_GET_ITEM(found, 0);
        if ((exact && !launch->term_count) || scales_to(launch, numel)) {
            *pair = Py_NewRef(found);
            return 1;
        }
    }
    return 0;
}

static PyObject *LaunchNew_call(PyObject *object, PyObject *const *arguments, size_t flags,
                                PyObject *names)
{
    LaunchNew *self = (LaunchNew *)object;
    if (PyVectorcall_NARGS(flags) != 2 || names != NULL)
        return PyErr_Format(PyExc_TypeError, "indices and buffers are needed");
    PyObject *tensors = NULL, *pair = NULL, *outs = NULL;
    int64_t numel;
    int known = guarded(self->check, arguments[0], arguments + 1, 1, self->count, &tensors);
    if (known == 1 && raise_pending(self->board, self->raise) == 0 &&
        numel_of(PyTuple_GET_ITEM(tensors, 0), &numel) == 0 &&
        prepared(self, numel, &pair) == 1 && on_device(self->current_device, self->device) == 1)
        outs = launch_new(self, (Launch *)PyTuple_GET_ITEM(pair, 0), PyTuple_GET_ITEM(pair, 1),
                          &PyTuple_GET_ITEM(tensors, 0), numel);
    Py_XDECREF(pair);
    Py_XDECREF(tensors);
    if (outs == NULL && !PyErr_Occurred())
        Py_RETURN_NONE;
    return outs;
}

static int LaunchNew_traverse(LaunchNew *self, visitproc visit, void *arg)
{
    Py_VISIT(self->check);
    Py_VISIT(self->launches);
    Py_VISIT(self->empty);
    Py_VISIT(self->current_device);
    Py_VISIT(self->raise);
    return 0;
}

static void LaunchNew_dealloc(LaunchNew *self)
{
    PyObject_GC_UnTrack(self);
    Py_XDECREF(self->check);
    Py_XDECREF(self->launches);
    Py_XDECREF(self->empty);
    Py_XDECREF(self->current_device);
    Py_XDECREF(self->raise);
    PyMem_Free(self->masks);
    PyMem_Free(self->values);
    PyMem_Free(self->places);
    PyMem_Free(self->items);
    PyMem_Free(self->spans);
    Py_TYPE(self)->tp_free(self);
}

static PyObject *LaunchNew_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords)
{
    static char *names[] = {"check",  "launches", "empty", "current_device", "device",
                            "board",  "raise_pending", "index_bytes", "masks", "values", "places",
                            "items", "spans", NULL};
    PyObject *check, *launches, *empty, *current_device, *raise, *lists[5];
    unsigned long long board, index_bytes;
    long device;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "OO!OOlKOKOOOOO:LaunchNew", names,
                                     &check, &PyDict_Type, &launches, &empty, &current_device,
                                     &device, &board, &raise, &index_bytes, lists, lists + 1,
                                     lists + 2, lists + 3, lists + 4))
        return NULL;
    LaunchNew *self = (LaunchNew *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->call = LaunchNew_call;
    self->check = Py_NewRef(check);
    self->launches = Py_NewRef(launches);
    self->empty = Py_NewRef(empty);
    self->current_device = Py_NewRef(current_device);
    self->raise = Py_NewRef(raise);
    self->board = (const volatile uint64_t *)(uintptr_t)board;
    self->device = device;
    self->index_bytes = index_bytes;
    uint64_t **numbers[] = {&self->masks, &self->values, &self->places, &self->items, &self->spans};
    Py_ssize_t counts[5] = {0};
    int alike = 1;
    for (size_t k = 0; k < 5 && !PyErr_Occurred(); k++) {
        *numbers[k] = numbers_of(lists[k], counts + k);
        alike = alike && counts[k] == counts[0];
    }
    self->count = counts[0];
    if (!PyErr_Occurred() && (!alike || !is_order(self->places, self->count)))
        PyErr_Format(PyExc_ValueError, "each buffer has a mask, a value, a place and two sizes");
    if (PyErr_Occurred())
        Py_CLEAR(self);
    return (PyObject *)self;
}

static PyTypeObject LaunchNew_type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "multigather._native.LaunchNew",
    .tp_doc = "A repeated launch into new outputs, see shortcut.repeated_launch.",
    .tp_basicsize = sizeof(LaunchNew),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_vectorcall_offset = offsetof(LaunchNew, call),
    .tp_call = PyVectorcall_Call,
    .tp_new = LaunchNew_new,
    .tp_traverse = (traverseproc)LaunchNew_traverse,
    .tp_dealloc = (destructor)LaunchNew_dealloc,
};

/* ---- LaunchInto ---------------------------------------------------------------------------- */

/* shortcut.OutShortcut: (indices, buffers, outs) into these outputs. */
typedef struct {
    PyObject_HEAD
    vectorcallfunc call;
    PyObject *check, *launch, *current_device, *raise, *elsewhere, *written;
    const volatile uint64_t *board;
    long device;
    Py_ssize_t count, extent_count;
    int64_t numel, index_bytes;
    /* Addresses of the buffers, then of the outputs, the bytes of an element and of all memory of
       each; first and last byte of each output. */
    uint64_t *addresses, *items, *spans, *extents, *places;
} LaunchInto;

/* Write the addresses of guarded tensors into a block: 1, 0 if they are others than before, or -1
   with an error. */
static int into_block(const LaunchInto *self, PyObject *const *tensors, Memory *memory)
{
    const Launch *launch = (Launch *)self->launch;
    uint64_t address, start;
    for (Py_ssize_t k = 0; k < 2 * self->count; k++) {
        if (address_of(tensors[1 + k], &address) < 0)
            return -1;
        if (address != self->addresses[k])
            return 0;
        int known = has_memory(tensors[1 + k], self->items[k], self->spans[k]);
        if (known != 1)
            return known;
        Py_ssize_t out = k >= self->count;
        put(launch, memory, 1 + out + 2 * (Py_ssize_t)self->places[k - out * self->count], address);
    }
    int known = readable_indices(tensors[0], self->numel, (uint64_t)self->index_bytes, &start);
    if (known != 1)
        return known;
    put(launch, memory, 0, start);
    uint64_t end = start + (uint64_t)self->numel * (uint64_t)self->index_bytes;
    for (Py_ssize_t k = 0; k < self->extent_count; k += 2)
        if (start < self->extents[k + 1] && self->extents[k] < end)
            return 0;
    return 1;
}

/* The outputs of guarded tensors, once autograd knows that they were written. */
static PyObject *written_outs(const LaunchInto *self, PyObject *tensors)
{
    PyObject *outs = PyTuple_GetSlice(tensors, 1 + self->count, 1 + 2 * self->count);
    if (outs == NULL)
        return NULL;
    PyObject *nothing = PyObject_CallOneArg(self->written, outs);
    if (nothing == NULL)
        Py_CLEAR(outs);
    Py_XDECREF(nothing);
    return outs;
}

static PyObject *LaunchInto_call(PyObject *object, PyObject *const *arguments, size_t flags,
                                 PyObject *names)
{
    LaunchInto *self = (LaunchInto *)object;
    if (PyVectorcall_NARGS(flags) != 3 || names != NULL)
        return PyErr_Format(PyExc_TypeError, "indices, buffers and outputs are needed");
    PyObject *tensors = NULL, *outs = NULL;
    int64_t numel;
    Memory memory = {.heap = NULL};
    int known = guarded(self->check, arguments[0], arguments + 1, 2, self->count, &tensors);
    if (known == 1 && numel_of(PyTuple_GET_ITEM(tensors, 0), &numel) == 0 &&
        numel == self->numel && memory_for((Launch *)self->launch, &memory) == 0 &&
        into_block(self, &PyTuple_GET_ITEM(tensors, 0), &memory) == 1 &&
        raise_pending(self->board, self->raise) == 0) {
        int here = on_device(self->current_device, self->device);
        if (here == 0)
            outs = PyObject_Vectorcall(self->elsewhere, arguments, 3, NULL);
        else if (here == 1 && launch_now((Launch *)self->launch, &memory) == 0)
            outs = written_outs(self, tensors);
    }
    PyMem_Free(memory.heap);
    Py_XDECREF(tensors);
    if (outs == NULL && !PyErr_Occurred())
        Py_RETURN_NONE;
    return outs;
}

static int LaunchInto_traverse(LaunchInto *self, visitproc visit, void *arg)
{
    Py_VISIT(self->check);
    Py_VISIT(self->launch);
    Py_VISIT(self->current_device);
    Py_VISIT(self->raise);
    Py_VISIT(self->elsewhere);
    Py_VISIT(self->written);
    return 0;
}

static void LaunchInto_dealloc(LaunchInto *self)
{
    PyObject_GC_UnTrack(self);
    Py_XDECREF(self->check);
    Py_XDECREF(self->launch);
    Py_XDECREF(self->current_device);
    Py_XDECREF(self->raise);
    Py_XDECREF(self->elsewhere);
    Py_XDECREF(self->written);
    PyMem_Free(self->addresses);
    PyMem_Free(self->items);
    PyMem_Free(self->spans);
    PyMem_Free(self->extents);
    PyMem_Free(self->places);
    Py_TYPE(self)->tp_free(self);
}

static PyObject *LaunchInto_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords)
{
    static char *names[] = {"check",  "launch",        "current_device", "device",    "board",
                            "raise_pending", "elsewhere", "numel",       "index_bytes",
                            "addresses",     "items",     "spans",       "extents",   "places",
                            "written", NULL};
    PyObject *check, *launch, *current_device, *raise, *elsewhere, *addresses, *items, *spans;
    PyObject *extents, *places, *written;
    unsigned long long board;
    long long numel, index_bytes;
    long device;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "OO!OlKOOLLOOOOOO:LaunchInto", names,
                                     &check, &Launch_type, &launch, &current_device, &device,
                                     &board, &raise, &elsewhere, &numel, &index_bytes, &addresses,
                                     &items, &spans, &extents, &places, &written))
        return NULL;
    LaunchInto *self = (LaunchInto *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->call = LaunchInto_call;
    self->check = Py_NewRef(check);
    self->launch = Py_NewRef(launch);
    self->current_device = Py_NewRef(current_device);
    self->raise = Py_NewRef(raise);
    self->elsewhere = Py_NewRef(elsewhere);
    self->written = Py_NewRef(written);
    self->board = (const volatile uint64_t *)(uintptr_t)board;
    self->device = device;
    self->numel = numel;
    self->index_bytes = index_bytes;
    Py_ssize_t address_count = 0, item_count = 0, span_count = 0;
    self->places = numbers_of(places, &self->count);
    if (self->places != NULL)
        self->addresses = numbers_of(addresses, &address_count);
    if (self->addresses != NULL)
        self->items = numbers_of(items, &item_count);
    if (self->items != NULL)
        self->spans = numbers_of(spans, &span_count);
    if (self->spans != NULL)
        self->extents = numbers_of(extents, &self->extent_count);
    if (self->extents != NULL &&
        (address_count != 2 * self->count || item_count != address_count ||
         span_count != address_count || self->extent_count % 2 ||
         !is_order(self->places, self->count) || !launches_into(launch, self->count)))
        PyErr_Format(PyExc_ValueError, "each buffer has a place and two addresses and sizes in the launch");
    if (PyErr_Occurred())
        Py_CLEAR(self);
    return (PyObject *)self;
}

static PyTypeObject LaunchInto_type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "multigather._native.LaunchInto",
    .tp_doc = "A repeated launch into the same outputs, see shortcut.OutShortcut.",
    .tp_basicsize = sizeof(LaunchInto),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_vectorcall_offset = offsetof(LaunchInto, call),
    .tp_call = PyVectorcall_Call,
    .tp_new = LaunchInto_new,
    .tp_traverse = (traverseproc)LaunchInto_traverse,
    .tp_dealloc = (destructor)LaunchInto_dealloc,
};

/* ---- Copy ---------------------------------------------------------------------------------- */

/* shortcut.native_copy: (indices, buffers) on a CPU to new outputs, by gather_cpu.c. */
typedef struct {
    PyObject_HEAD
    vectorcallfunc call;
    PyObject *check, *buckets, *empty, *outputs, *failed;
    Py_ssize_t count;
    struct GatherField *layout;
    int index_type, bounds;
    /* Of the buffers: the bytes of an element and of all memory. */
    uint64_t *items, *spans;
    /* Of the buffers, if it is for buffers at these addresses only. */
    uint64_t *addresses;
} Copy;

/* Addresses of so many buffers and their outputs: on the stack up to a number. */
enum { SMALL_COUNT = 32 };
typedef struct {
    uint64_t *values, *heap, small[2 * SMALL_COUNT];
} Addresses;

static int addresses_for(Py_ssize_t count, Addresses *addresses)
{
    addresses->heap = NULL;
    addresses->values = addresses->small;
    if (count > SMALL_COUNT) {
        addresses->values = addresses->heap = PyMem_New(uint64_t, 2 * count);
        if (addresses->heap == NULL) {
            PyErr_NoMemory();
            return -1;
        }
    }
    return 0;
}

/* Below this many bytes to let other threads run takes longer than it gives them. */
enum { HELD_BYTES = 1 << 14 };

/* `gather_cpu`, letting other threads run where it takes a while. */
static int gather_unlocked(const struct GatherCall *call)
{
    int64_t bytes = 0;
    for (int64_t k = 0; k < call->fields; k++)
        bytes += call->field[k].row_bytes;
    if (bytes * call->count < HELD_BYTES)
        return gather_cpu(call);
    int refused;
    Py_BEGIN_ALLOW_THREADS
    refused = gather_cpu(call);
    Py_END_ALLOW_THREADS
    return refused;
}

/* Whether this gathers such numbers of indices: 1, 0, or -1 with an error. */
static int in_buckets(PyObject *buckets, int64_t numel)
{
    PyObject *bucket = PyLong_FromLong(bucket_of(numel));
    if (bucket == NULL)
        return -1;
    int found = PySet_Contains(buckets, bucket);
    Py_DECREF(bucket);
    return found;
}

/* Gather from guarded tensors: new outputs, or NULL without an error if this call must go the long
   way; `*bad` if an index is the reason. */
static PyObject *copy_new(const Copy *self, PyObject *const *tensors, int64_t numel, int *bad)
{
    Addresses addresses;
    uint64_t start;
    PyObject *outs = NULL;
    if (addresses_for(self->count, &addresses) < 0)
        return NULL;
    uint64_t *source = addresses.values, *destination = source + self->count;
    for (Py_ssize_t k = 0; k < self->count; k++)
        if (address_of(tensors[1 + k], source + k) < 0 ||
            has_memory(tensors[1 + k], self->items[k], self->spans[k]) != 1 ||
            (self->addresses != NULL && source[k] != self->addresses[k]))
            goto done;
    if (readable_indices(tensors[0], numel, 1u << (self->index_type & 3), &start) != 1)
        goto done;
    outs = PyTuple_New(self->count);
    for (Py_ssize_t k = 0; outs != NULL && k < self->count; k++) {
        PyObject *out = new_output(self->empty, PyTuple_GET_ITEM(self->outputs, k), numel);
        if (out == NULL || address_of(out, destination + k) < 0) {
            Py_XDECREF(out);
            Py_CLEAR(outs);
            break;
        }
        PyTuple_SET_ITEM(outs, k, out);
    }
    if (outs != NULL) {
        const struct GatherCall call = {(const void *)(uintptr_t)start, numel, 1, self->index_type,
                                        self->bounds, self->count, self->layout, source,
                                        destination};
        *bad = gather_unlocked(&call);
        if (*bad)
            Py_CLEAR(outs);
    }
done:
    PyMem_Free(addresses.heap);
    return outs;
}

static PyObject *Copy_call(PyObject *object, PyObject *const *arguments, size_t flags,
                           PyObject *names)
{
    Copy *self = (Copy *)object;
    if (PyVectorcall_NARGS(flags) != 2 || names != NULL)
        return PyErr_Format(PyExc_TypeError, "indices and buffers are needed");
    PyObject *tensors = NULL, *outs = NULL;
    int64_t numel;
    int bad = 0;
    int known = guarded(self->check, arguments[0], arguments + 1, 1, self->count, &tensors);
    if (known == 1 && numel_of(PyTuple_GET_ITEM(tensors, 0), &numel) == 0 &&
        in_buckets(self->buckets, numel) == 1)
        outs = copy_new(self, &PyTuple_GET_ITEM(tensors, 0), numel, &bad);
    Py_XDECREF(tensors);
    if (bad)
        outs = PyObject_Vectorcall(self->failed, arguments, 2, NULL);
    if (outs == NULL && !PyErr_Occurred())
        Py_RETURN_NONE;
    return outs;
}

static int Copy_traverse(Copy *self, visitproc visit, void *arg)
{
    Py_VISIT(self->check);
    Py_VISIT(self->buckets);
    Py_VISIT(self->empty);
    Py_VISIT(self->outputs);
    Py_VISIT(self->failed);
    return 0;
}

static void Copy_dealloc(Copy *self)
{
    PyObject_GC_UnTrack(self);
    Py_XDECREF(self->check);
    Py_XDECREF(self->buckets);
    Py_XDECREF(self->empty);
    Py_XDECREF(self->outputs);
    Py_XDECREF(self->failed);
    PyMem_Free(self->layout);
    PyMem_Free(self->items);
    PyMem_Free(self->spans);
    PyMem_Free(self->addresses);
    Py_TYPE(self)->tp_free(self);
}

static PyObject *Copy_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords)
{
    static char *names[] = {"check",  "buckets",    "empty",  "outputs",   "layout",
                            "bounds", "index_type", "failed", "items",     "spans",
                            "addresses", NULL};
    PyObject *check, *buckets, *empty, *outputs, *failed, *items, *spans, *addresses;
    const char *layout;
    Py_ssize_t size, item_count, span_count = 0, address_count;
    int bounds, index_type;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "OO!OO!y#iiOOOO:Copy", names, &check,
                                     &PySet_Type, &buckets, &empty, &PyTuple_Type, &outputs,
                                     &layout, &size, &bounds, &index_type, &failed, &items, &spans,
                                     &addresses))
        return NULL;
    Py_ssize_t count = PyTuple_GET_SIZE(outputs);
    for (Py_ssize_t k = 0; k < count; k++) {
        PyObject *each = PyTuple_GET_ITEM(outputs, k);
        if (!is_output(each))
            return PyErr_Format(PyExc_TypeError, "no row shape, strides and dtype: %R", each);
    }
    if (size != count * (Py_ssize_t)sizeof(struct GatherField))
        return PyErr_Format(PyExc_ValueError, "%zd bytes are no layout of %zd buffers", size,
                            count);
    Copy *self = (Copy *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->call = Copy_call;
    self->check = Py_NewRef(check);
    self->buckets = Py_NewRef(buckets);
    self->empty = Py_NewRef(empty);
    self->outputs = Py_NewRef(outputs);
    self->failed = Py_NewRef(failed);
    self->count = count;
    self->bounds = bounds;
    self->index_type = index_type;
    self->layout = PyMem_Malloc((size_t)size + 1);
    if (self->layout == NULL)
        PyErr_NoMemory();
    else
        memcpy(self->layout, layout, (size_t)size);
    if (self->layout != NULL)
        self->items = numbers_of(items, &item_count);
    if (self->items != NULL)
        self->spans = numbers_of(spans, &span_count);
    if (self->spans != NULL && (item_count != count || span_count != count))
        PyErr_Format(PyExc_ValueError, "each buffer has two sizes");
    if (!PyErr_Occurred() && addresses != Py_None) {
        self->addresses = numbers_of(addresses, &address_count);
        if (self->addresses != NULL && address_count != count)
            PyErr_Format(PyExc_ValueError, "each buffer has an address");
    }
    if (PyErr_Occurred())
        Py_CLEAR(self);
    return (PyObject *)self;
}

static PyTypeObject Copy_type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "multigather._native.Copy",
    .tp_doc = "A repeated gather on a CPU into new outputs, see shortcut.native_copy.",
    .tp_basicsize = sizeof(Copy),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_vectorcall_offset = offsetof(Copy, call),
    .tp_call = PyVectorcall_Call,
    .tp_new = Copy_new,
    .tp_traverse = (traverseproc)Copy_traverse,
    .tp_dealloc = (destructor)Copy_dealloc,
};

static PyObject *gather_rows(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    const char *layout;
    Py_ssize_t size, count;
    int bounds, index_type;
    unsigned long long start;
    long long index_stride, numel;
    PyObject *sequence;
    if (!PyArg_ParseTuple(arguments, "y#iiKLLO:gather_rows", &layout, &size, &bounds, &index_type,
                          &start, &index_stride, &numel, &sequence))
        return NULL;
    uint64_t *addresses = numbers_of(sequence, &count);
    if (addresses == NULL)
        return NULL;
    if (size * 2 != count * (Py_ssize_t)sizeof(struct GatherField)) {
        PyMem_Free(addresses);
        return PyErr_Format(PyExc_ValueError, "each buffer has two addresses");
    }
    /* A copy, because bytes need not lie as the structure must. */
    struct GatherField *fields = PyMem_Malloc((size_t)size + 1);
    if (fields == NULL) {
        PyMem_Free(addresses);
        return PyErr_NoMemory();
    }
    memcpy(fields, layout, (size_t)size);
    const struct GatherCall call = {(const void *)(uintptr_t)start, numel, index_stride, index_type,
                                    bounds, count / 2, fields, addresses, addresses + count / 2};
    int refused = gather_unlocked(&call);
    PyMem_Free(fields);
    PyMem_Free(addresses);
    return PyBool_FromLong(!refused);
}

static PyObject *use_threads(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    unsigned long long parallel, number, wanted;
    if (!PyArg_ParseTuple(arguments, "KKK:use_threads", &parallel, &number, &wanted))
        return NULL;
    gather_cpu_threads((void (*)(void (*)(void *), void *, unsigned, unsigned))(uintptr_t)parallel,
                       (int (*)(void))(uintptr_t)number, (int (*)(void))(uintptr_t)wanted);
    Py_RETURN_NONE;
}

/* ---- module -------------------------------------------------------------------------------- */

static PyMethodDef functions[] = {
    {"read_tensors", read_tensors, METH_VARARGS,
     "read_tensors(type, offset, data_ptr, numel, storage_size, storage_offset): read tensors of "
     "this type through functions of torch's stable C interface, given by address; None calls the "
     "tensors' methods."},
    {"facts_of", facts_of, METH_O,
     "Address and number of elements of a tensor, bytes of its storage and its offset there."},
    {"gather_rows", gather_rows, METH_VARARGS,
     "gather_rows(layout, bounds, index_type, indices, index_stride, count, addresses): copy rows "
     "by gather_cpu.c; False, having written nothing, if an index is out of range in mode raise."},
    {"use_threads", use_threads, METH_VARARGS,
     "use_threads(parallel, number, wanted): addresses of OpenMP's start of a parallel region and "
     "of its thread number, and of a function that says how many threads are wanted; 0: none."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "multigather._native",
    .m_doc = "The repeated call of a gather, compiled; see shortcut.py.",
    .m_size = -1,
    .m_methods = functions,
};

PyMODINIT_FUNC PyInit__native(void)
{
    static PyTypeObject *const types[] = {&Launch_type, &LaunchNew_type, &LaunchInto_type,
                                          &Copy_type};
    name_data_ptr = PyUnicode_InternFromString("data_ptr");
    name_numel = PyUnicode_InternFromString("numel");
    name_storage = PyUnicode_InternFromString("untyped_storage");
    name_nbytes = PyUnicode_InternFromString("nbytes");
    name_offset = PyUnicode_InternFromString("storage_offset");
    PyObject *module = PyModule_Create(&definition);
    if (!name_data_ptr || !name_numel || !name_storage || !name_nbytes || !name_offset)
        Py_CLEAR(module);
    for (size_t k = 0; module != NULL && k < sizeof types / sizeof *types; k++)
        if (PyModule_AddType(module, types[k]) < 0)
            Py_CLEAR(module);
    PyObject *driver = PyLong_FromVoidPtr((void *)(uintptr_t)gather_cpu_launch);
    if (module != NULL && (driver == NULL || PyModule_AddObjectRef(module, "cpu_driver", driver) < 0))
        Py_CLEAR(module);
    Py_XDECREF(driver);
    return module;
}
