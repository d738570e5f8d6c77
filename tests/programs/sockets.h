// What programs of several processes have in common: bytes and descriptors through a socket between
// two of them.
#pragma once
#include "check.h"
#include <cstring>
#include <cuda.h>
#include <sys/socket.h>
#include <unistd.h>

inline void say(int socket, const void *data, size_t size) { REQUIRE(write(socket, data, size) == (ssize_t)size); }

inline void hear(int socket, void *data, size_t size) { REQUIRE(recv(socket, data, size, MSG_WAITALL) == (ssize_t)size); }

// A message of one byte, with room for a descriptor.
struct Parcel {
    char byte = 'd', control[CMSG_SPACE(sizeof(int))] = {};
    iovec data = {&byte, 1};
    msghdr message = {};

    Parcel()
    {
        message.msg_iov = &data, message.msg_iovlen = 1;
        message.msg_control = control, message.msg_controllen = sizeof control;
    }
    Parcel(const Parcel &) = delete;
};

inline void send_descriptor(int socket, int fd)
{
    Parcel parcel;
    cmsghdr *header = CMSG_FIRSTHDR(&parcel.message);
    header->cmsg_level = SOL_SOCKET, header->cmsg_type = SCM_RIGHTS, header->cmsg_len = CMSG_LEN(sizeof fd);
    memcpy(CMSG_DATA(header), &fd, sizeof fd);
    REQUIRE(sendmsg(socket, &parcel.message, 0) == 1);
}

inline int receive_descriptor(int socket)
{
    Parcel parcel;
    REQUIRE(recvmsg(socket, &parcel.message, 0) == 1 && parcel.byte == 'd');
    cmsghdr *header = CMSG_FIRSTHDR(&parcel.message);
    REQUIRE(header && header->cmsg_type == SCM_RIGHTS);
    int fd;
    memcpy(&fd, CMSG_DATA(header), sizeof fd);
    return fd;
}

// Device memory that can be sent so.
inline CUmemAllocationProp shareable_memory()
{
    CUmemAllocationProp prop = {};
    prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    return prop;
}
