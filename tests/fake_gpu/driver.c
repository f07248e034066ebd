/* libcuda without a GPU: what the engine calls of it, over memory of the host.
 *
 * It is as unhelpful as CUDA allows:
 * - Addresses of device memory can't be read or written by the processor; only copies of this driver reach the bytes.
 * - A copy happens at the last moment: when its stream or an event behind it is waited for, or after an event was
 *   asked for a while. Until then the destination holds garbage, and the source may not change.
 * - Addresses are never used again. A copy of freed memory ends the process.
 * - Calls that need a context are refused on a thread that has none.
 * - Another thread always captures a graph, in the global mode: calls that a capture forbids are refused on threads
 *   whose mode isn't relaxed.
 * - Memory is exported by its base address alone; what a process has imported is counted by handle, and neither
 *   exported nor freed. Registrations of host memory are exact.
 *
 * Types and numbers are those of cuda.h.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef int Result;
typedef uint64_t DevicePtr;

enum {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    NOT_INITIALIZED = 3,
    INVALID_CONTEXT = 201,
    NOT_READY = 600,
    ALREADY_REGISTERED = 712,
    NOT_REGISTERED = 713,
    NOT_SUPPORTED = 801,
    CAPTURE_UNSUPPORTED = 900,
};

enum { RELAXED = 2 };

enum { HOST = 1, UNIFIED = 4 };

enum { MEMORY_TYPE = 2, BUFFER_ID = 7, IS_MANAGED = 8, DEVICE_ORDINAL = 9, IS_LEGACY_IPC = 10, RANGE_START = 11,
       RANGE_SIZE = 12, MEMPOOL_HANDLE = 17 };

#define MOST_ALLOCATIONS 65536
#define PAGE 4096
/* Distances of rows inside a device that cuMemAllocPitch would give. */
#define PITCH 512

struct handle {
    int pid, fd;
    uint64_t len, base;
    char rest[40];
};

struct allocation {
    uint64_t base, len;
    char *bytes; /* null: freed */
    int fd, device;
    int opened; /* times that a peer's memory was imported; 0: this process's own */
    struct handle handle;
};

struct op {
    struct op *next;
    struct event *event; /* or a copy */
    uint64_t record;
    uint64_t to, from, len;
};

struct stream {
    int device;
    struct op *first, **last;
    struct stream *next;
};

struct event {
    struct stream *stream;
    uint64_t recorded, done;
    int patience;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct allocation allocations[MOST_ALLOCATIONS];
static int count_of_allocations;
static int initialised;
static uint64_t records;
static unsigned seed = 1;
static __thread int capture_mode;

static void die(const char *why) {
    fprintf(stderr, "fake CUDA driver: %s\n", why);
    abort();
}

#include "devices.h"
#include "host_memory.h"

static struct allocation *find(uint64_t addr) {
    for (int i = count_of_allocations - 1; i >= 0; i--)
        if (addr >= allocations[i].base && addr - allocations[i].base < allocations[i].len)
            return &allocations[i];
    return NULL;
}

/* Where the bytes of a device address lie; an address of the host lies there. */
static char *reach(uint64_t addr, uint64_t len) {
    struct allocation *a = find(addr);
    if (!a)
        return (char *)addr;
    if (!a->bytes)
        die("a copy of device memory that was freed");
    if (addr + len > a->base + a->len)
        die("a copy beyond the end of an allocation");
    return a->bytes + (addr - a->base);
}

static DevicePtr map(int fd, uint64_t len) {
    if (count_of_allocations == MOST_ALLOCATIONS)
        die("too many allocations");
    struct allocation *a = &allocations[count_of_allocations];
    void *base = mmap(NULL, len, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    void *bytes = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (base == MAP_FAILED || bytes == MAP_FAILED)
        die("no address space");
    *a = (struct allocation){.base = (uint64_t)base, .len = len, .bytes = bytes, .fd = fd, .device = current()};
    count_of_allocations++;
    return a->base;
}

static Result forget(DevicePtr base, int imported) {
    struct allocation *a = find(base);
    if (!a || a->base != base || !a->bytes || !imported != !a->opened)
        return INVALID_VALUE;
    if (imported && --a->opened)
        return SUCCESS;
    munmap(a->bytes, a->len);
    close(a->fd);
    a->bytes = NULL;
    return SUCCESS;
}

/* Executes a stream up to a record of an event; all of it without one. */
static void execute(struct stream *s, uint64_t record) {
    while (s->first) {
        struct op *op = s->first;
        if (record && op->event && op->record > record)
            break;
        if (!(s->first = op->next))
            s->last = &s->first;
        uint64_t reached = op->record;
        if (op->event)
            op->event->done = reached;
        else
            memmove(reach(op->to, op->len), reach(op->from, op->len), op->len);
        free(op);
        if (record && reached == record)
            break;
    }
}

static void queue(struct stream *s, struct op op) {
    struct op *kept = malloc(sizeof *kept);
    *kept = op;
    kept->next = NULL;
    *s->last = kept;
    s->last = &kept->next;
}

Result cuInit(unsigned flags) {
    initialised = flags == 0;
    return initialised ? SUCCESS : INVALID_VALUE;
}

Result cuDriverGetVersion(int *version) { return *version = 12080, SUCCESS; }

Result cuGetErrorName(Result error, const char **text) {
    *text = error == INVALID_CONTEXT       ? "CUDA_ERROR_INVALID_CONTEXT"
            : error == CAPTURE_UNSUPPORTED ? "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"
                                           : "CUDA_ERROR";
    return SUCCESS;
}

Result cuGetErrorString(Result error, const char **text) { return cuGetErrorName(error, text); }

Result cuThreadExchangeStreamCaptureMode(int *mode) {
    int before = capture_mode;
    capture_mode = *mode;
    *mode = before;
    return SUCCESS;
}

Result cuPointerGetAttributes(unsigned n, const int *attributes, void **data, DevicePtr ptr) {
    if (!initialised)
        return NOT_INITIALIZED;
    pthread_mutex_lock(&lock);
    struct allocation *a = find(ptr);
    if (a && !a->bytes)
        a = NULL;
    for (unsigned i = 0; i < n; i++) {
        uint64_t value = 0;
        int bytes = 4;
        switch (attributes[i]) {
        case MEMORY_TYPE: value = a ? 2 : is_known(ptr); break;
        case BUFFER_ID: value = a ? (uint64_t)(a - allocations) + 1 : 0, bytes = 8; break;
        case DEVICE_ORDINAL: value = a ? (uint32_t)a->device : (uint32_t)-2; break;
        case IS_LEGACY_IPC: value = a != NULL, bytes = 1; break;
        case IS_MANAGED: bytes = 1; break;
        case RANGE_START: value = a ? a->base : 0, bytes = 8; break;
        case RANGE_SIZE: value = a ? a->len : 0, bytes = 8; break;
        case MEMPOOL_HANDLE: bytes = 8; break;
        }
        memcpy(data[i], &value, bytes);
    }
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

Result cuPointerSetAttribute(const void *value, int attribute, DevicePtr ptr) {
    (void)value, (void)attribute;
    pthread_mutex_lock(&lock);
    struct allocation *a = find(ptr);
    pthread_mutex_unlock(&lock);
    return a && a->bytes ? SUCCESS : INVALID_VALUE;
}

Result cuMemGetAddressRange_v2(DevicePtr *base, size_t *size, DevicePtr ptr) {
    pthread_mutex_lock(&lock);
    struct allocation *a = find(ptr);
    if (a && !a->bytes)
        a = NULL;
    if (a)
        *base = a->base, *size = a->len;
    pthread_mutex_unlock(&lock);
    return a ? SUCCESS : INVALID_VALUE;
}

Result cuMemAlloc_v2(DevicePtr *ptr, size_t len) {
    Result refused = permitted(1);
    if (refused)
        return refused;
    len = (len + PAGE - 1) / PAGE * PAGE;
    int fd = memfd_create("fake GPU memory", MFD_CLOEXEC);
    if (!len || fd < 0 || ftruncate(fd, len))
        return INVALID_VALUE;
    pthread_mutex_lock(&lock);
    *ptr = map(fd, len);
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

Result cuMemFree_v2(DevicePtr ptr) {
    Result refused = permitted(1);
    if (refused)
        return refused;
    pthread_mutex_lock(&lock);
    Result result = forget(ptr, 0);
    pthread_mutex_unlock(&lock);
    return result;
}

#include "ipc.h"

Result cuStreamCreate(struct stream **made, unsigned flags) {
    (void)flags;
    Result refused = permitted(0);
    if (refused)
        return refused;
    struct stream *s = calloc(1, sizeof *s);
    s->device = current();
    s->last = &s->first;
    return *made = s, SUCCESS;
}

/* CUDA stages copies of memory that the stream's device has no access to: through the host, and slowly. */
static int staged;

int fake_staged_copies(void) { return staged; }

static void copy(uint64_t to, uint64_t from, uint64_t len, struct stream *stream) {
    struct allocation *a = find(from), *b = find(to);
    staged += (a && !accesses(stream->device, a->device)) || (b && !accesses(stream->device, b->device));
    reach(from, len);
    /* What is looked at before the end is neither the old bytes nor the new. */
    memset(reach(to, len), 0xa5, len);
    queue(stream, (struct op){.to = to, .from = from, .len = len});
}

Result cuMemcpyAsync(DevicePtr to, DevicePtr from, size_t len, struct stream *stream) {
    Result refused = permitted(0);
    if (refused)
        return refused;
    pthread_mutex_lock(&lock);
    copy(to, from, len, stream);
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

struct place {
    size_t x, y;
    unsigned type;
    void *host;
    DevicePtr device;
    void *array;
    size_t pitch;
};

struct rows {
    struct place from, to;
    size_t width, height;
};

static uint64_t start(const struct place *place, size_t width) {
    int unified = place->type == UNIFIED && (find(place->device) || is_known(place->device));
    if (place->x || place->y || place->array || place->pitch < width)
        die("rows that overlap, or a part of an array");
    if (unified)
        return place->device;
    if (place->type != HOST || find((uint64_t)place->host))
        die("rows of memory that is of another type");
    return (uint64_t)place->host;
}

Result cuMemcpy2DAsync_v2(const struct rows *rows, struct stream *stream) {
    Result refused = permitted(0);
    if (refused)
        return refused;
    pthread_mutex_lock(&lock);
    uint64_t from = start(&rows->from, rows->width), to = start(&rows->to, rows->width);
    if (find(from) && find(to) && (rows->from.pitch % PITCH || rows->to.pitch % PITCH))
        refused = INVALID_VALUE;
    for (size_t i = 0; i < rows->height && !refused; i++)
        copy(to + i * rows->to.pitch, from + i * rows->from.pitch, rows->width, stream);
    pthread_mutex_unlock(&lock);
    return refused;
}

Result cuStreamSynchronize(struct stream *stream) {
    pthread_mutex_lock(&lock);
    execute(stream, 0);
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

Result cuStreamDestroy_v2(struct stream *stream) {
    cuStreamSynchronize(stream);
    free(stream);
    return SUCCESS;
}

Result cuEventCreate(struct event **made, unsigned flags) {
    (void)flags;
    return *made = calloc(1, sizeof **made), permitted(0);
}

Result cuEventRecord(struct event *event, struct stream *stream) {
    Result refused = permitted(0);
    if (refused)
        return refused;
    pthread_mutex_lock(&lock);
    event->stream = stream;
    event->recorded = ++records;
    event->patience = rand_r(&seed) % 6;
    queue(stream, (struct op){.event = event, .record = event->recorded});
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

Result cuEventQuery(struct event *event) {
    Result refused = permitted(1);
    if (refused)
        return refused;
    pthread_mutex_lock(&lock);
    Result result = SUCCESS;
    if (event->done < event->recorded) {
        if (event->patience-- > 0)
            result = NOT_READY;
        else
            execute(event->stream, event->recorded);
    }
    pthread_mutex_unlock(&lock);
    return result;
}

Result cuEventSynchronize(struct event *event) {
    Result refused = permitted(1);
    if (refused)
        return refused;
    pthread_mutex_lock(&lock);
    if (event->done < event->recorded)
        execute(event->stream, event->recorded);
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

Result cuEventDestroy_v2(struct event *event) { return free(event), SUCCESS; }

/* For kernels of this GPU, which are functions of the host: the bytes behind an allocation. */
char *fake_bytes(DevicePtr base) {
    pthread_mutex_lock(&lock);
    struct allocation *a = find(base);
    pthread_mutex_unlock(&lock);
    return a ? a->bytes : NULL;
}
