"""Episodes as packed rows: memory-mapped, read on demand, fetched, or cached in memory."""
