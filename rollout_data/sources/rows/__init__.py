"""Episodes as packed rows: mapped, read when needed, fetched or copied into memory."""
