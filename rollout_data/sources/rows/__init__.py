"""Sources of episodes as packed rows: mapped files, files read on demand, URLs, and memory."""
