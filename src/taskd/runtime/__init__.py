"""The outside world, shared by every process: clock, driver, links, bus, journal, log."""

from taskd.config import quieten_grpc

quieten_grpc()  # Before any module of this package imports gRPC.
