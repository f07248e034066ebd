/* Devices and their primary contexts: a part of driver.c. As many as FABRIC_RAY_FAKE_GPUS says, or one. */

#define MOST_DEVICES 8
#define DEEPEST 16

enum { ALREADY_ENABLED = 704 };

static char contexts[MOST_DEVICES];
static int retained[MOST_DEVICES], access_to[MOST_DEVICES][MOST_DEVICES];
/* Devices of this thread's contexts, the last of them current. */
static __thread int stack[DEEPEST], depth;

static int devices(void) {
    const char *said = getenv("FABRIC_RAY_FAKE_GPUS");
    return said ? atoi(said) : 1;
}

static int current(void) { return depth ? stack[depth - 1] : 0; }

static int accesses(int device, int owner) { return device == owner || access_to[device][owner]; }

/* Whether this thread may make a call that needs a context; `unsafe`: and that a capture forbids. */
static Result permitted(int unsafe) {
    if (!initialised)
        return NOT_INITIALIZED;
    if (depth < 1)
        return INVALID_CONTEXT;
    return unsafe && capture_mode != RELAXED ? CAPTURE_UNSUPPORTED : SUCCESS;
}

Result cuDeviceGetCount(int *count) {
    if (!initialised)
        return NOT_INITIALIZED;
    return *count = devices(), SUCCESS;
}

Result cuDeviceGet(int *device, int ordinal) { return *device = ordinal, ordinal >= devices() ? INVALID_VALUE : SUCCESS; }

Result cuDeviceGetName(char *name, int len, int device) {
    (void)device;
    snprintf(name, len, "fake GPU");
    return SUCCESS;
}

Result cuDeviceGetUuid_v2(char *uuid, int device) {
    memcpy(uuid, "fake GPU 0123456", 16);
    uuid[15] += device;
    return SUCCESS;
}

Result cuDeviceGetPCIBusId(char *id, int len, int device) {
    snprintf(id, len, "0000:f%x:00.0", 8 + device);
    return SUCCESS;
}

Result cuDeviceGetAttribute(int *value, int attribute, int device) {
    (void)attribute, (void)device;
    return *value = 0, SUCCESS;
}

Result cuDevicePrimaryCtxRetain(void **made, int device) {
    if (device >= devices())
        return INVALID_VALUE;
    return retained[device]++, *made = contexts + device, SUCCESS;
}

Result cuDevicePrimaryCtxRelease_v2(int device) { return retained[device] ? retained[device]--, SUCCESS : INVALID_CONTEXT; }

Result cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    return *flags = 0, *active = retained[device] > 0, SUCCESS;
}

Result cuCtxGetCurrent(void **found) { return *found = depth ? contexts + current() : NULL, SUCCESS; }
Result cuCtxGetDevice(int *device) { return *device = current(), depth ? SUCCESS : INVALID_CONTEXT; }

Result cuCtxPushCurrent_v2(void *pushed) {
    int device = (char *)pushed - contexts;
    if (device < 0 || device >= devices() || !retained[device] || depth == DEEPEST)
        return INVALID_CONTEXT;
    return stack[depth++] = device, SUCCESS;
}

Result cuCtxPopCurrent_v2(void **popped) {
    if (!depth)
        return INVALID_CONTEXT;
    return *popped = contexts + stack[--depth], SUCCESS;
}

Result cuCtxSetCurrent(void *set) {
    if (depth)
        depth--;
    return set ? cuCtxPushCurrent_v2(set) : SUCCESS;
}

Result cuCtxEnablePeerAccess(void *peer, unsigned flags) {
    int owner = (char *)peer - contexts;
    Result refused = permitted(1);
    if (refused)
        return refused;
    if (flags)
        return INVALID_VALUE;
    if (owner < 0 || owner >= devices() || owner == current())
        return INVALID_CONTEXT;
    if (access_to[current()][owner])
        return ALREADY_ENABLED;
    return access_to[current()][owner] = 1, SUCCESS;
}
