"""The `ucx` transport: NIXL with its UCX backend, for RDMA, NVLink and whatever else UCX speaks."""

from kvtransfer.transports.ucx.transport import UcxTransport

__all__ = ["UcxTransport"]
