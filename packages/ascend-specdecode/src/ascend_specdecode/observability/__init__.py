"""What an engine shows of itself: counters, tables, metrics, traces."""
