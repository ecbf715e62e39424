"""etcd's errors, by what they mean for the caller: try again, give up, or unknown."""

from __future__ import annotations

import grpc
from grpc import aio

from taskd.errors import PeerRefused, Transient

NO_SPACE = "mvcc: database space exceeded"
NO_LEASE = "requested lease not found"
BAD_TOKEN = ("invalid auth token", "revision of auth store is old")
NOT_SIGNED_IN = ("user name is empty", "user name not found")
WRONG_PASSWORD = "authentication failed"
NO_AUTH = "authentication is not enabled"
NOT_NOW = (
    "re-configuration failed",
    "unhealthy cluster",
    "in sync with leader",
    "too many learner",
    "already exist",
    "member not found",
    "promote a learner",
)
"""Why a change of the members is refused at the moment."""
SENT_NOTHING = ("too many requests", "no space", "is a learner")


class EtcdUnanswered(Transient):
    """The call may have taken effect, or may still do so."""


class EtcdBusy(Transient):
    """The call has not taken effect. Try again."""


class EtcdRefused(PeerRefused):
    """The call has not taken effect, and will not before a person acts. The message says how."""


class LeaseNotFound(PeerRefused):
    """The lease has ended, or was never granted."""


class SignInAgain(PeerRefused):
    """The token of the session has expired."""


def error_of(error: aio.AioRpcError, address: str) -> Exception:
    code, details = error.code(), error.details() or ""
    what = details.removeprefix("etcdserver: ")
    if NO_LEASE in what:
        return LeaseNotFound(what)
    if any(reason in what for reason in BAD_TOKEN):
        return SignInAgain(what)
    if NO_SPACE in what:
        return EtcdRefused(
            f"etcd at {address} is full: {what}. Compact and defragment it, then run `etcdctl alarm"
            " disarm`; give it a larger --quota-backend-bytes and --auto-compaction-retention"
        )
    if any(reason in what for reason in NOT_SIGNED_IN):
        return EtcdRefused(
            f"etcd at {address} requires a user: set TASKD_ETCD_USER and TASKD_ETCD_PASSWORD"
        )
    if NO_AUTH in what:
        return EtcdRefused(f"etcd at {address} has no users ({what}): unset TASKD_ETCD_USER")
    if WRONG_PASSWORD in what:
        return EtcdRefused(f"etcd at {address} refused the user or the password ({what})")
    if code is grpc.StatusCode.PERMISSION_DENIED:
        return EtcdRefused(
            f"etcd at {address} does not permit this user ({what}): grant it read and write on"
            " the prefix"
        )
    if any(part in what for part in NOT_NOW):
        return EtcdBusy(f"etcd at {address} does not change its members now: {what}")
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED or any(part in what for part in SENT_NOTHING):
        return EtcdBusy(f"etcd at {address} is busy: {what}")
    if code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED):
        return EtcdRefused(f"etcd at {address} refused the request: {what}")
    return EtcdUnanswered(f"etcd at {address} did not answer: {code.name}: {what}")
