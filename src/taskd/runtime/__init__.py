"""What every process shares: clock, driver, retry, journal, log, metrics, small files."""

from taskd.config import quieten_grpc

quieten_grpc()  # Before any module of this package imports gRPC.
