/* Memory between processes: a part of driver.c. */

Result cuIpcGetMemHandle(struct handle *handle, DevicePtr ptr) {
    Result refused = permitted(0);
    if (refused)
        return refused;
    pthread_mutex_lock(&lock);
    struct allocation *a = find(ptr);
    if (a && (a->base != ptr || !a->bytes || a->opened))
        a = NULL;
    if (a)
        *handle = (struct handle){getpid(), a->fd, a->len, a->base, {0}};
    pthread_mutex_unlock(&lock);
    return a ? SUCCESS : INVALID_VALUE;
}

/* As CUDA, not for memory of the same process; a handle that is open already has the address that it had. */
Result cuIpcOpenMemHandle_v2(DevicePtr *ptr, struct handle handle, unsigned flags) {
    char path[64];
    Result refused = permitted(1);
    if (refused)
        return refused;
    if (flags != 1)
        return INVALID_VALUE;
    if (handle.pid == getpid())
        return INVALID_CONTEXT;
    pthread_mutex_lock(&lock);
    Result result = SUCCESS;
    struct allocation *a = NULL;
    for (int i = 0; i < count_of_allocations && !a; i++)
        if (allocations[i].opened && !memcmp(&allocations[i].handle, &handle, sizeof handle))
            a = &allocations[i];
    if (!a) {
        snprintf(path, sizeof path, "/proc/%d/fd/%d", handle.pid, handle.fd);
        int fd = open(path, O_RDWR | O_CLOEXEC);
        if (fd < 0)
            result = INVALID_VALUE;
        else {
            a = find(map(fd, handle.len));
            a->handle = handle;
        }
    }
    if (a)
        a->opened++, *ptr = a->base;
    pthread_mutex_unlock(&lock);
    return result;
}

Result cuIpcCloseMemHandle(DevicePtr ptr) {
    Result refused = permitted(1);
    if (refused)
        return refused;
    pthread_mutex_lock(&lock);
    Result result = forget(ptr, 1);
    pthread_mutex_unlock(&lock);
    return result;
}
