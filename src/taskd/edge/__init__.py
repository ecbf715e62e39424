"""The outside world, shared by every process: clock, driver, links, bus, journal, log."""
