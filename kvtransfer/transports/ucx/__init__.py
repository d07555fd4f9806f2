"""The `ucx` transport: NIXL with its UCX backend, for RDMA, NVLink and other fabrics that UCX supports."""

from kvtransfer.transports.ucx.transport import UcxTransport

__all__ = ["UcxTransport"]
