/* Host memory that the driver knows of: a part of driver.c. */

static struct { uint64_t base, len; int registered; } known[MOST_ALLOCATIONS];
static int count_of_known;

static int is_known(uint64_t addr) {
    for (int i = 0; i < count_of_known; i++)
        if (addr >= known[i].base && addr - known[i].base < known[i].len)
            return 1;
    return 0;
}

/* Bytes of host memory that are registered. */
uint64_t fake_registered(void) {
    uint64_t len = 0;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < count_of_known; i++)
        len += known[i].registered ? known[i].len : 0;
    pthread_mutex_unlock(&lock);
    return len;
}

/* Registered host memory, or memory that the driver allocated on the host. */
static Result know(void *ptr, uint64_t len, int registered) {
    pthread_mutex_lock(&lock);
    Result result = SUCCESS;
    if (count_of_known == MOST_ALLOCATIONS)
        die("too many registrations");
    for (int i = 0; i < count_of_known; i++)
        if ((uint64_t)ptr < known[i].base + known[i].len && known[i].base < (uint64_t)ptr + len)
            result = ALREADY_REGISTERED;
    if (!result) {
        known[count_of_known].base = (uint64_t)ptr;
        known[count_of_known].registered = registered;
        known[count_of_known++].len = len;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

static Result unknow(void *ptr, int registered) {
    pthread_mutex_lock(&lock);
    Result result = registered ? NOT_REGISTERED : INVALID_VALUE;
    for (int i = 0; i < count_of_known; i++)
        if (known[i].base == (uint64_t)ptr && known[i].registered == registered) {
            known[i] = known[--count_of_known];
            result = SUCCESS;
            break;
        }
    pthread_mutex_unlock(&lock);
    return result;
}

Result cuMemHostAlloc(void **ptr, size_t len, unsigned flags) {
    (void)flags;
    Result refused = permitted(1);
    if (refused)
        return refused;
    len = (len + PAGE - 1) / PAGE * PAGE;
    if (!(*ptr = aligned_alloc(PAGE, len)))
        return INVALID_VALUE;
    return know(*ptr, len, 0);
}

Result cuMemFreeHost(void *ptr) {
    Result refused = permitted(1);
    if (refused || (refused = unknow(ptr, 0)))
        return refused;
    return free(ptr), SUCCESS;
}

Result cuMemHostRegister_v2(void *ptr, size_t len, unsigned flags) {
    (void)flags;
    Result refused = permitted(1);
    return refused ? refused : know(ptr, len, 1);
}

Result cuMemHostUnregister(void *ptr) {
    Result refused = permitted(1);
    return refused ? refused : unknow(ptr, 1);
}

Result cuMemHostGetDevicePointer_v2(DevicePtr *on_device, void *ptr, unsigned flags) {
    (void)flags;
    return *on_device = (DevicePtr)ptr, permitted(0);
}
