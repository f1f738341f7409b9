"""A network of its own for this process: loopback and nothing else, where the system allows that."""

import ctypes
import fcntl
import os
import socket
import struct

NEW_USER, NEW_NET = 0x10000000, 0x40000000
SIOCSIFFLAGS, UP = 0x8914, 0x1


def loopback_only():
    """True when everything started from here on reaches loopback only."""
    libc = ctypes.CDLL(None, use_errno=True)
    uid, gid = os.getuid(), os.getgid()
    if libc.unshare(NEW_NET) != 0:
        if libc.unshare(NEW_USER | NEW_NET) != 0:
            return False
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        fcntl.ioctl(one, SIOCSIFFLAGS, struct.pack("16sH14s", b"lo", UP, b""))
    return True
