"""What every process shares: clock, driver, retry, journal, log, metrics, small files."""
